"""Ring attention (Liu et al. 2023): every rank keeps its queries while keys and values travel around a ring of ranks.

While a rank attends to the keys and values that it has, those of the next step are in flight. Partial results are
merged by the logarithms of their normalizers, so the result is exact. In the backward, keys and values travel around
the ring again, followed one rank later by the sums of their gradients; the last step sends each sum to the rank of its
keys. Sums and merges are in float32 or wider. A ring ends early if no rank attends to any of the next keys (ring_steps
in theory/context.py).

A tile is a block of queries and keys, each in the order of a rank's positions (theory/context.py). Without documents
and windows, a tile needs no mask: it is complete or causal. With them, a tile has a mask and few queries, so that the
mask is small for any sequence length.

Shape letters: B batch, T tokens of one rank, N query heads, G key/value heads, H head_dim.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.schema.parallel import Parallel
from ingot.theory.context import Segments, ring_positions, ring_steps
from ingot.trainer.mesh.collectives import started
from ingot.trainer.parallel.flash import attend_part, attend_part_backward
from ingot.trainer.parallel.recompute import KeptResults

MASK_ELEMENTS = 2**24  # the limit for the mask of one tile; 32 MiB in bf16


class MaskRule(Protocol):
    """The part of AttentionMaskSpec (model/attention.py) that a ring uses."""

    @property
    def document_ids_BS(self) -> Tensor | None: ...
    @property
    def window(self) -> int: ...
    def mask(self, queries_T: Tensor, keys_S: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Ring:
    """This rank's index in the ring, the ring's global ranks in order, their group, and the model's KeptResults."""

    parallel: Parallel
    index: int
    ranks: list[int]
    group: dist.ProcessGroup
    kept: KeptResults

    def attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask_spec: MaskRule) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks: [B, N, T, H]."""
        call = _RingCall(self, mask_spec, q_BNTH)
        return _RingAttention.apply(q_BNTH, torch.stack((k_BGTH, v_BGTH)), call)

    def source(self, step: int) -> int:
        """Return the ring index of the rank whose keys this rank has in step `step`."""
        return (self.index - step) % len(self.ranks)

    def pass_on(self, buffer: Tensor, distance: int = 1) -> "_Arriving":
        """Start to send `buffer` to the rank `distance` ahead, and to receive one from the rank `distance` before."""
        arriving = torch.empty_like(buffer)
        after, before = (self.ranks[(self.index + by) % len(self.ranks)] for by in (distance, -distance))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, buffer, after, self.group), dist.P2POp(dist.irecv, arriving, before, self.group)]
        )
        return _Arriving([started(work, self.group, message=True) for work in works], arriving)


@dataclass(frozen=True)
class _Arriving:
    works: list[Any]
    buffer: Tensor

    def arrive(self) -> Tensor:
        """Wait until the sent buffer may change; return the received buffer. On GPUs only the device waits."""
        for work in self.works:
            work.wait()
        return self.buffer


@dataclass(frozen=True)
class AttentionTile:
    """A block of queries and keys. causal: query i attends to the keys 0..i. masked: attention follows a mask made from
    positions and documents."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False


class _RingCall:
    """One call of attention around a ring: its tiles and their masks. last: the number of the last step."""

    def __init__(self, ring: Ring, mask_spec: MaskRule, q_BNTH: Tensor):
        self.ring, self.mask_spec = ring, mask_spec
        self.batch, _, self.tokens, _ = q_BNTH.shape
        self.device = q_BNTH.device
        self._positions: dict[int, Tensor] = {}
        whole = self.tokens * len(ring.ranks)
        self.window = mask_spec.window if mask_spec.window < whole else 0
        self.last = ring_steps(ring.parallel, whole, self.window) - 1
        self.has_masks = self.window > 0 or mask_spec.document_ids_BS is not None

    def tiles(self, source: int) -> list[AttentionTile]:
        """Return the tiles of this rank's queries and the keys of rank `source` of the ring."""
        parallel, own = self.ring.parallel, self.ring.index
        if not self.has_masks:
            return plain_tiles(parallel, own, source, self.tokens)
        batch = 1 if self.mask_spec.document_ids_BS is None else self.batch
        return list(masked_tiles(parallel, own, source, self.tokens, window=self.window, batch=batch))

    def positions(self, index: int) -> Tensor:
        """Return the positions of the tokens of rank `index` of the ring: int64 [T]."""
        if index not in self._positions:
            segments = ring_positions(self.ring.parallel, index, self.tokens * len(self.ring.ranks))
            parts = [torch.arange(s.start, s.stop, s.step, device=self.device) for s in segments]
            self._positions[index] = torch.cat(parts)
        return self._positions[index]

    def mask(self, tile: AttentionTile, source: int) -> Tensor | None:
        """Return the tile's mask; None if the tile needs no mask. A mask is made again for each use, because all masks
        together would be as large as the whole matrix of scores."""
        if not tile.masked:
            return None
        return self.mask_spec.mask(self.positions(self.ring.index)[tile.queries], self.positions(source)[tile.keys])


class _RingAttention(torch.autograd.Function):
    """Attention of q [B, N, T, H] to keys and values [2, B, G, T, H] -> [B, N, T, H]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, call: _RingCall) -> Tensor:
        out, lse = call.ring.kept.keep(lambda: _attend_around(q, kv, call))
        ctx.save_for_backward(q, kv, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        call: _RingCall = ctx.call
        ring, wide = call.ring, lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        at_hand, last, own_sum, traveling = kv, call.last, None, None
        for step in range(last + 1):
            coming = ring.pass_on(at_hand) if step < last else None
            added = torch.zeros(kv.shape, dtype=wide, device=q.device)
            for tile in call.tiles(ring.source(step)):
                rows, (k, v) = tile.queries, at_hand[:, :, :, tile.keys]
                mask = call.mask(tile, ring.source(step))
                grad, queries, whole, normalizers = (x[:, :, rows] for x in (grads[0], q, out, lse))
                more, dk, dv = attend_part_backward(
                    grad, queries, whole, normalizers, k, v, causal=tile.causal, mask=mask
                )
                dq[:, :, rows] += more
                added[0, :, :, tile.keys] += dk
                added[1, :, :, tile.keys] += dv
            if step == 0:
                own_sum = added  # stays here; the sum over the other ranks arrives after the last step
            else:
                added = added if traveling is None else added.add_(traveling.arrive())
                traveling = ring.pass_on(added, 1 if step < last else -last)  # after the last step to its own rank
            at_hand = coming.arrive() if coming is not None else at_hand
        assert own_sum is not None
        dkv = own_sum if traveling is None else own_sum.add_(traveling.arrive())
        return dq.to(q.dtype), dkv.to(kv.dtype), None


def _attend_around(q: Tensor, kv: Tensor, call: _RingCall) -> tuple[Tensor, Tensor]:
    """Return the results [B, N, T, H] and log-sum-exps [B, N, T] of attention to the keys of all ranks."""
    ring, wide = call.ring, torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    at_hand = kv
    for step in range(call.last + 1):
        coming = ring.pass_on(at_hand) if step < call.last else None
        for tile in call.tiles(ring.source(step)):
            rows, (k, v) = tile.queries, at_hand[:, :, :, tile.keys]
            mask = call.mask(tile, ring.source(step))
            made = attend_part(q[:, :, rows], k, v, causal=tile.causal, mask=mask)
            merge(total[:, :, rows], lse[:, :, rows], *made)
        at_hand = coming.arrive() if coming is not None else at_hand
    return total.to(q.dtype), lse


def merge(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge the partial result `out` into `total` in place, each weighted by its normalizer.

    The result for the rank's own keys is merged first, and every query attends to one of those, so at least one of the
    two log-sum-exps is always finite.
    """
    merged = torch.logaddexp(lse, out_lse)
    total.mul_((lse - merged).exp_()[..., None]).add_(out * (out_lse - merged).exp_()[..., None])
    lse.copy_(merged)


def plain_tiles(parallel: Parallel, own: int, source: int, tokens: int) -> list[AttentionTile]:
    """Return at most one tile without a mask, for the queries of ring rank `own` and the keys of ring rank `source`.

    tokens: the number of tokens of each rank.
    """
    everything, half = slice(0, tokens), tokens // 2
    if source == own:
        return [AttentionTile(everything, everything, causal=True)]
    if parallel.context_layout == "striped":
        if source < own:
            return [AttentionTile(everything, everything, causal=True)]
        return [AttentionTile(slice(1, tokens), slice(0, tokens - 1), causal=True)] if tokens > 1 else []
    if parallel.context_layout == "zigzag":
        # A rank's first half comes before all tokens of later ranks, its second half after all of them.
        if source < own:
            return [AttentionTile(everything, slice(0, half))]
        return [AttentionTile(slice(half, tokens), everything)]
    return [AttentionTile(everything, everything)] if source < own else []


def masked_tiles(
    parallel: Parallel, own: int, source: int, tokens: int, *, window: int, batch: int, limit: int = MASK_ELEMENTS
) -> Iterator[AttentionTile]:
    """Yield tiles whose masks have at most `limit` elements (at least one row).

    Together the tiles contain all pairs of a query and an earlier key within the window (0: at any distance). Blocks
    without such a pair are left out.
    """
    queries, keys = (ring_positions(parallel, index, tokens * parallel.ring) for index in (own, source))
    start = 0
    for segment in queries:
        rows = _rows(limit // batch, tokens, window // segment.step)
        for at in range(0, len(segment), rows):
            part = segment[at : at + rows]
            first = _count_before(keys, part[0] - window + 1) if window else 0
            end = _count_before(keys, part[-1] + 1)
            if first < end:
                yield AttentionTile(slice(start + at, start + at + len(part)), slice(first, end), masked=True)
        start += len(segment)


def _rows(elements: int, keys: int, window: int) -> int:
    """Return the largest number of adjacent queries whose mask has at most `elements` elements.

    With a window, n adjacent queries attend to at most n + window + 1 keys. window: in steps between queries.
    """
    rows = elements // keys
    if window:
        wide = window + 1
        rows = max(rows, (math.isqrt(wide**2 + 4 * elements) - wide) // 2)
    return max(rows, 1)


def _count_before(segments: Segments, position: int) -> int:
    """Return the number of positions in `segments` that are smaller than `position`."""
    return sum(bisect_left(segment, position) for segment in segments)
