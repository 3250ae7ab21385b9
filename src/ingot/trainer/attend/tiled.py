"""Attention tile by tile (tiles.py), on a device without a kernel for documents of different lengths.

Shape letters: B batch, T queries, S keys, N query heads, G key/value heads, H head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.trainer.attend.documents import on_device
from ingot.trainer.attend.kernels import attend_part, attend_part_backward, bias_of
from ingot.trainer.attend.tiles import Tile, tiles_of


@dataclass(frozen=True, eq=False)
class TileBiases:
    """The biases of tiles. queries, keys: the document numbers of their tokens, int32 [B, T] and [B, S] on the device;
    None if no tile has several documents."""

    queries: Tensor | None
    keys: Tensor | None
    dtype: torch.dtype
    device: torch.device

    def of(self, tile: Tile) -> Tensor | None:
        """Return the bias of a tile, [B or 1, 1, queries, keys]; None if it needs none."""
        if not tile.is_masked:
            return None
        queries, keys = (part.stop - part.start for part in (tile.queries, tile.keys))
        apart = torch.arange(keys, device=self.device) - torch.arange(queries, device=self.device)[:, None]
        high = 0 if tile.causal else tile.high
        mask = torch.ones_like(apart, dtype=torch.bool) if high is None else apart <= high
        mask = mask if tile.low is None else mask & (apart >= tile.low)
        if tile.documents:
            assert self.queries is not None and self.keys is not None
            of_queries, of_keys = self.queries[tile.rows, tile.queries], self.keys[tile.rows, tile.keys]
            mask = mask & (of_queries[:, :, None] == of_keys[:, None, :])
        return bias_of(mask.view(-1, 1, queries, keys), self.dtype)


@dataclass(frozen=True, eq=False)
class TilePlan:
    """The tiles of all queries of a forward, and the bias of each, which all layers share. Each query is in one tile.

    shares_keys: a key is in several tiles, as with a window.
    """

    tiles: Sequence[tuple[Tile, Tensor | None]]
    shares_keys: bool


def plan_tiles(
    ends: Sequence[Sequence[int]] | None,
    document_ids_BS: Tensor | None,
    *,
    batch: int,
    tokens: int,
    keys: int,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TilePlan:
    """Return the plan for the queries of the last `tokens` of `keys` tokens. ends, document_ids_BS: of the documents,
    on the host; None: each sequence is one."""
    first = keys - tokens
    tiles = tiles_of((range(first, keys),), (range(keys),), ends, window, batch=batch)
    ids = None
    if document_ids_BS is not None and any(tile.documents for tile in tiles):
        ids = on_device(document_ids_BS, device)
    biases = TileBiases(None if ids is None else ids[:, first:], ids, dtype, device)
    planned: list[tuple[Tile, Tensor | None]] = []
    by_distance: dict[tuple, Tensor | None] = {}  # most tiles of a window have the same bias
    for tile in tiles:
        queries, there = (part.stop - part.start for part in (tile.queries, tile.keys))
        key = (queries, there, tile.causal, tile.low, tile.high)
        if tile.documents:
            planned.append((tile, biases.of(tile)))
        else:
            if key not in by_distance:
                by_distance[key] = biases.of(tile)
            planned.append((tile, by_distance[key]))
    return TilePlan(planned, shares_keys=any(tile.queries != tile.keys for tile in tiles))


def attend_tiles(q_BNTH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, plan: TilePlan) -> Tensor:
    """Return the attention of all queries: [B, N, T, H]."""
    return _TiledAttention.apply(q_BNTH, k_BGSH, v_BGSH, plan)


class _TiledAttention(torch.autograd.Function):
    """One function for all tiles: the gradient of a slice would be a tensor as large as the whole sequence."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan) -> Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for tile, bias in plan.tiles:
            rows, here, there = tile.rows, tile.queries, tile.keys
            made = attend_part(q[rows, :, here], k[rows, :, there], v[rows, :, there], causal=tile.causal, bias=bias)
            out[rows, :, here], lse[rows, :, here] = made
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx, *grads: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        plan: TilePlan = ctx.plan
        dq = torch.empty_like(q)
        summed = lse.dtype if plan.shares_keys else k.dtype
        dk, dv = (torch.zeros(x.shape, dtype=summed, device=x.device) for x in (k, v))
        for tile, bias in plan.tiles:
            rows, here, there = tile.rows, tile.queries, tile.keys
            grad, queries, whole, normalizers = (x[rows, :, here] for x in (grads[0], q, out, lse))
            own_k, own_v = k[rows, :, there], v[rows, :, there]
            more, more_k, more_v = attend_part_backward(
                grad, queries, whole, normalizers, own_k, own_v, causal=tile.causal, bias=bias
            )
            dq[rows, :, here] = more
            dk[rows, :, there] += more_k
            dv[rows, :, there] += more_v
        return dq, dk.to(k.dtype), dv.to(v.dtype), None
