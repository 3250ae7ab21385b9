"""Ulysses (Jacobs et al. 2023): in attention ranks have some heads of all tokens instead of all heads of some tokens.

One all-to-all brings queries, keys and values there, another one the results back; the backward does the same with
gradients. Heads of keys and values are repeated as often as it takes to deal them out evenly: where there are fewer
than ranks, several ranks get the same one.

Shape letters: B batch, T tokens of all ranks together, t of one, N query heads, G key/value heads, H head_dim, R ranks.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def attend_by_heads(
    q_BNtH: Tensor,
    k_BGtH: Tensor,
    v_BGtH: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """attend: from N/R query heads and their keys and values, of T tokens, to results of the same shape as queries.

    The ranks have consecutive parts of the T tokens. R divides N.
    """
    ranks, heads = group.size(), k_BGtH.shape[1]
    copies = math.lcm(heads, ranks) // heads
    if copies > 1:
        k_BGtH, v_BGtH = k_BGtH.repeat_interleave(copies, dim=1), v_BGtH.repeat_interleave(copies, dim=1)
    dealt = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (q_BNtH, k_BGtH, v_BGtH)]
    sizes = [x.shape[2] for x in dealt]
    mixed = _swap(torch.cat(dealt, dim=2), group)  # [R, B, heads, t, H], by rank of the tokens
    q_BNTH, k_BGTH, v_BGTH = mixed.movedim(0, 2).flatten(2, 3).split(sizes, dim=1)
    out_BNTH = attend(q_BNTH, k_BGTH, v_BGTH)
    back = _swap(out_BNTH.unflatten(2, (ranks, -1)).movedim(2, 0), group)  # [R, B, N/R, t, H], by rank of the heads
    return back.movedim(0, 1).flatten(1, 2)


def _swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part r of the first dim goes to rank r; part r of the result comes from there."""
    return _Swap.apply(parts, group)  # type: ignore[return-value]


class _Swap(torch.autograd.Function):
    """Its own transpose: the gradient of what came from a rank goes back to it."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found
