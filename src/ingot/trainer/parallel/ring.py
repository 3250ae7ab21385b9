"""Ring attention (Liu et al. 2023): every rank keeps its queries, and keys and values go round.

While a rank attends to the keys and values it has, those of the next step are on their way. Results are merged by the
logarithms of their normalisers, so the ring is exact. In the backward keys and values go round again, and with them
the sums of their gradients, one rank behind, so that the last step brings each sum home. Sums and merges are in float32
at least. A ring ends where no place of it would see anything of what comes next (theory/context.py, ring_steps). Shape
letters: B batch, T tokens of one rank, N query heads, G key/value heads, H head_dim.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions, ring_steps
from ingot.trainer.parallel.flash import attend_part, attend_part_backward
from ingot.trainer.parallel.recompute import kept_whole
from ingot.trainer.parallel.tiles import Tile, masked_tiles, plain_tiles


class Sight(Protocol):
    """What tokens may look at (model/attention.py)."""

    @property
    def document_ids_BS(self) -> Tensor | None: ...
    @property
    def window(self) -> int: ...
    def mask(self, queries_T: Tensor, keys_S: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Ring:
    """This rank's place: its index, and the ranks in order."""

    parallel: Parallel
    index: int
    ranks: list[int]
    group: dist.ProcessGroup

    def attend(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, sight: Sight) -> Tensor:
        """Of this rank's tokens, whose positions are those of its place (theory/context.py), to all tokens."""
        return _RingAttention.apply(q_BNTH, torch.stack((k_BGTH, v_BGTH)), _View(self, sight, q_BNTH))  # type: ignore

    def source(self, step: int) -> int:
        """Whose keys are here in this step."""
        return (self.index - step) % len(self.ranks)

    def pass_on(self, buffer: Tensor, places: int = 1) -> "_Coming":
        """Start to send `buffer` so many places further, and to receive that of the rank as far behind."""
        arriving = torch.empty_like(buffer)
        after, before = (self.ranks[(self.index + by) % len(self.ranks)] for by in (places, -places))
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, buffer, after, self.group), dist.P2POp(dist.irecv, arriving, before, self.group)]
        )
        return _Coming(works, arriving)


@dataclass(frozen=True)
class _Coming:
    works: list[Any]
    buffer: Tensor

    def arrive(self) -> Tensor:
        """Wait until what was sent may be changed and what was received is here. On GPUs only the device waits."""
        for work in self.works:
            work.wait()
        return self.buffer


class _View:
    """Who sees whom in one call, tile by tile."""

    def __init__(self, ring: Ring, sight: Sight, q_BNTH: Tensor):
        self.ring, self.sight = ring, sight
        self.batch, _, self.tokens, _ = q_BNTH.shape
        self.device = q_BNTH.device
        self._positions: dict[int, Tensor] = {}
        whole = self.tokens * len(ring.ranks)
        self.window = sight.window if sight.window < whole else 0
        self.last = ring_steps(ring.parallel, whole, self.window) - 1
        self.has_masks = self.window > 0 or sight.document_ids_BS is not None

    def tiles(self, source: int) -> list[Tile]:
        parallel, own = self.ring.parallel, self.ring.index
        if not self.has_masks:
            return plain_tiles(parallel, own, source, self.tokens)
        batch = 1 if self.sight.document_ids_BS is None else self.batch
        return list(masked_tiles(parallel, own, source, self.tokens, window=self.window, batch=batch))

    def positions(self, place: int) -> Tensor:
        if place not in self._positions:
            parts = ring_positions(self.ring.parallel, place, self.tokens * len(self.ring.ranks))
            pieces = [torch.arange(p.start, p.stop, p.step, device=self.device) for p in parts]
            self._positions[place] = torch.cat(pieces)
        return self._positions[place]

    def seen(self, tile: Tile, source: int) -> Tensor | None:
        """Made anew for each tile, forward and backward: all of them together would be the whole matrix of scores."""
        if not tile.masked:
            return None
        return self.sight.mask(self.positions(self.ring.index)[tile.queries], self.positions(source)[tile.keys])


class _RingAttention(torch.autograd.Function):
    """q [B, N, T, H], keys and values [2, B, G, T, H] -> [B, N, T, H]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, view: _View) -> Tensor:
        out, lse = kept_whole(lambda: _attend_around(q, kv, view))
        ctx.save_for_backward(q, kv, out, lse)
        ctx.view = view
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        view: _View = ctx.view
        ring, wide = view.ring, lse.dtype
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        at_hand, last, own_sum, travelling = kv, view.last, None, None
        for step in range(last + 1):
            coming = ring.pass_on(at_hand) if step < last else None
            added = torch.zeros(kv.shape, dtype=wide, device=q.device)
            for tile in view.tiles(ring.source(step)):
                rows, (k, v) = tile.queries, at_hand[:, :, :, tile.keys]
                seen = view.seen(tile, ring.source(step))
                grad, queries, whole, normalisers = (x[:, :, rows] for x in (grads[0], q, out, lse))
                more, dk, dv = attend_part_backward(
                    grad, queries, whole, normalisers, k, v, causal=tile.causal, seen=seen
                )
                dq[:, :, rows] += more
                added[0, :, :, tile.keys] += dk
                added[1, :, :, tile.keys] += dv
            if step == 0:
                own_sum = added  # stays here; what the others add comes home after the last step
            else:
                added = added if travelling is None else added.add_(travelling.arrive())
                travelling = ring.pass_on(added, 1 if step < last else -last)  # from the last step on its way home
            at_hand = coming.arrive() if coming is not None else at_hand
        assert own_sum is not None
        dkv = own_sum if travelling is None else own_sum.add_(travelling.arrive())
        return dq.to(q.dtype), dkv.to(kv.dtype), None


def _attend_around(q: Tensor, kv: Tensor, view: _View) -> tuple[Tensor, Tensor]:
    """Results [B, N, T, H] and log-sum-exps [B, N, T]."""
    ring, wide = view.ring, torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    at_hand = kv
    for step in range(view.last + 1):
        coming = ring.pass_on(at_hand) if step < view.last else None
        for tile in view.tiles(ring.source(step)):
            rows, (k, v) = tile.queries, at_hand[:, :, :, tile.keys]
            seen = view.seen(tile, ring.source(step))
            made = attend_part(q[:, :, rows], k, v, causal=tile.causal, seen=seen)
            merge(total[:, :, rows], lse[:, :, rows], *made)
        at_hand = coming.arrive() if coming is not None else at_hand
    return total.to(q.dtype), lse


def merge(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Weigh two partial results by their normalisers, in place. A query sees a key of its own rank, which comes first,
    so one of the two is always finite."""
    merged = torch.logaddexp(lse, out_lse)
    total.mul_((lse - merged).exp_()[..., None]).add_(out * (out_lse - merged).exp_()[..., None])
    lse.copy_(merged)
