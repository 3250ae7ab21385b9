"""Ring attention (Liu et al. 2023): every rank keeps its queries while keys and values travel around a ring of ranks.

While a rank attends to the keys and values that it has, those of the next step are in flight. Partial results are
merged by the logarithms of their normalizers, so the result is exact. In the backward, keys and values travel around
the ring again, followed one rank later by the sums of their gradients; the last step sends each sum to the rank of its
keys. Sums and merges are in float32 or wider. A ring ends early if no rank attends to any of the next keys (ring_steps
in theory/context.py).

A tile is a block of queries and keys, each in the order of a rank's positions (theory/context.py). Without documents
and windows, a step has one tile at most, complete or causal. With them, attend/tiles.py lays out the pairs of each
step: a document is complete or causal in it, too, and masks are small for any sequence length.

Shape letters: B batch, T tokens of one rank, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions, ring_steps
from ingot.trainer.attend.documents import ends_of, on_device
from ingot.trainer.attend.kernels import attend_part, attend_part_backward
from ingot.trainer.attend.tiled import TileBiases
from ingot.trainer.attend.tiles import Tile, tiles_of
from ingot.trainer.mesh.collectives import started
from ingot.trainer.parallel.recompute import KeptResults


class MaskRule(Protocol):
    """The part of AttentionMaskSpec (model/attention.py) that a ring uses."""

    @property
    def document_ids_BS(self) -> Tensor | None: ...
    @property
    def window(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Ring:
    """This rank's index in the ring, the ring's global ranks in order, their group, and the model's KeptResults."""

    parallel: Parallel
    index: int
    ranks: list[int]
    group: dist.ProcessGroup
    kept: KeptResults
    _plans: WeakKeyDictionary[MaskRule, "_RingPlan"] = field(default_factory=WeakKeyDictionary)

    def attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask_spec: MaskRule) -> Tensor:
        """Return the attention of this rank's queries to the keys of all ranks: [B, N, T, H]."""
        if mask_spec not in self._plans:  # one for all layers of a forward
            self._plans[mask_spec] = _RingPlan(self, mask_spec, q_BNTH)
        return _RingAttention.apply(q_BNTH, torch.stack((k_BGTH, v_BGTH)), self._plans[mask_spec])

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


class _RingPlan:
    """The tiles of each step of a ring, and their masks. last: the number of the last step.

    Nothing here has a reference to the mask spec, with which a plan is forgotten.
    """

    def __init__(self, ring: Ring, mask_spec: MaskRule, q_BNTH: Tensor):
        self.ring = ring
        self.batch, _, self.tokens, _ = q_BNTH.shape
        self.dtype, self.device = q_BNTH.dtype, q_BNTH.device
        self._ids, self._tiles, self._ids_of_ranks = mask_spec.document_ids_BS, {}, {}
        self._ends = None if self._ids is None else ends_of(self._ids)
        whole = self.tokens * len(ring.ranks)
        self.window = mask_spec.window if mask_spec.window < whole else 0
        self.last = ring_steps(ring.parallel, whole, self.window) - 1

    def tiles(self, source: int) -> list[Tile]:
        """Return the tiles of this rank's queries and the keys of rank `source` of the ring."""
        if source not in self._tiles:
            parallel, own = self.ring.parallel, self.ring.index
            if self._ends is None and not self.window:
                self._tiles[source] = plain_tiles(parallel, own, source, self.tokens)
            else:
                self._tiles[source] = ring_tiles(
                    parallel, own, source, self.tokens, ends=self._ends, window=self.window, batch=self.batch
                )
        return self._tiles[source]

    def bias(self, tile: Tile, source: int) -> Tensor | None:
        """Return the tile's bias; None if it needs none. A bias is made again for each use: all of them together would
        take memory that grows with the number of ranks."""
        queries, keys = (self._ids_of(r) if tile.documents else None for r in (self.ring.index, source))
        return TileBiases(queries, keys, self.dtype, self.device).of(tile)

    def _ids_of(self, index: int) -> Tensor:
        """Return the document numbers of the tokens of rank `index` of the ring: [B, T], on the device."""
        if index not in self._ids_of_ranks:
            assert self._ids is not None
            segments = ring_positions(self.ring.parallel, index, self.tokens * len(self.ring.ranks))
            own = torch.cat([self._ids[:, s.start : s.stop : s.step] for s in segments], dim=1)
            self._ids_of_ranks[index] = on_device(own, self.device)
        return self._ids_of_ranks[index]


class _RingAttention(torch.autograd.Function):
    """Attention of q [B, N, T, H] to keys and values [2, B, G, T, H] -> [B, N, T, H]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, call: _RingPlan) -> Tensor:
        out, lse = call.ring.kept.keep(lambda: _attend_around(q, kv, call))
        ctx.save_for_backward(q, kv, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        call: _RingPlan = ctx.call
        ring, wide = call.ring, lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        at_hand, last, own_sum, traveling = kv, call.last, None, None
        for step in range(last + 1):
            coming = ring.pass_on(at_hand) if step < last else None
            added = torch.zeros(kv.shape, dtype=wide, device=q.device)
            for tile in call.tiles(ring.source(step)):
                rows, here, (k, v) = tile.rows, tile.queries, at_hand[:, tile.rows, :, tile.keys]
                bias = call.bias(tile, ring.source(step))
                grad, queries, whole, normalizers = (x[rows, :, here] for x in (grads[0], q, out, lse))
                more, dk, dv = attend_part_backward(
                    grad, queries, whole, normalizers, k, v, causal=tile.causal, bias=bias
                )
                dq[rows, :, here] += more
                added[0, rows, :, tile.keys] += dk
                added[1, rows, :, tile.keys] += dv
            if step == 0:
                own_sum = added  # stays here; the sum over the other ranks arrives after the last step
            else:
                added = added if traveling is None else added.add_(traveling.arrive())
                traveling = ring.pass_on(added, 1 if step < last else -last)  # after the last step to its own rank
            at_hand = coming.arrive() if coming is not None else at_hand
        assert own_sum is not None
        dkv = own_sum if traveling is None else own_sum.add_(traveling.arrive())
        return dq.to(q.dtype), dkv.to(kv.dtype), None


def _attend_around(q: Tensor, kv: Tensor, call: _RingPlan) -> tuple[Tensor, Tensor]:
    """Return the results [B, N, T, H] and log-sum-exps [B, N, T] of attention to the keys of all ranks."""
    ring, wide = call.ring, torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    at_hand = kv
    for step in range(call.last + 1):
        coming = ring.pass_on(at_hand) if step < call.last else None
        for tile in call.tiles(ring.source(step)):
            rows, here, (k, v) = tile.rows, tile.queries, at_hand[:, tile.rows, :, tile.keys]
            bias = call.bias(tile, ring.source(step))
            # A document that shares a tile may have its first token on this rank, and no earlier one on the other.
            made = attend_part(q[rows, :, here], k, v, causal=tile.causal, bias=bias, without_keys=tile.documents)
            merge(total[rows, :, here], lse[rows, :, here], *made)
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


def plain_tiles(parallel: Parallel, own: int, source: int, tokens: int) -> list[Tile]:
    """Return at most one tile without a mask, for the queries of ring rank `own` and the keys of ring rank `source`.

    tokens: the number of tokens of each rank.
    """
    everything, half = slice(0, tokens), tokens // 2
    if source == own:
        return [Tile(everything, everything, causal=True)]
    if parallel.context_layout == "striped":
        if source < own:
            return [Tile(everything, everything, causal=True)]
        return [Tile(slice(1, tokens), slice(0, tokens - 1), causal=True)] if tokens > 1 else []
    if parallel.context_layout == "zigzag":
        # A rank's first half comes before all tokens of later ranks, its second half after all of them.
        if source < own:
            return [Tile(everything, slice(0, half))]
        return [Tile(slice(half, tokens), everything)]
    return [Tile(everything, everything)] if source < own else []


def ring_tiles(
    parallel: Parallel,
    own: int,
    source: int,
    tokens: int,
    *,
    ends: Sequence[Sequence[int]] | None,
    window: int,
    batch: int,
) -> list[Tile]:
    """Return the tiles of the queries of ring rank `own` and the keys of rank `source`, with documents or a window.

    tokens: the number of tokens of each rank. ends: where the documents of each of `batch` sequences end.
    """
    queries, keys = (ring_positions(parallel, index, tokens * parallel.ring) for index in (own, source))
    return tiles_of(queries, keys, ends, window, batch=batch)
