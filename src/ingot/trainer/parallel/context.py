"""Context parallelism: the ranks of the cp axis share the tokens of each sequence.

Only attention combines tokens. For attention the cp ranks form a grid: `ulysses` neighbors exchange heads, and rings
across them pass keys and values on (parallel/ring.py). Either dimension of the grid may have size 1 (Fang & Zhao 2024).
theory/context.py defines the tokens of each rank.

Ulysses (Jacobs et al. 2023): during attention a rank has some heads of all tokens instead of all heads of some tokens.
One all-to-all exchanges queries, keys and values, another one the results; the backward does the same with gradients.
With fewer key/value heads than ranks, heads are repeated until they divide evenly, so several ranks get the same head.

Shape letters: B batch, T tokens of all ranks together, t tokens of one rank, N query heads, G key/value heads, H
head_dim, R ranks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.theory.context import rank_positions
from ingot.trainer.mesh.collectives import all_to_all, gather
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.recompute import KeptResults
from ingot.trainer.parallel.ring import Ring


class TokenShare:
    """The tokens of whole sequences that this rank has: all of them without context parallelism."""

    def __init__(self, mesh: Mesh):
        self.mesh, self.ranks = mesh, mesh.size("cp")
        self._known: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in sequences of `tokens`, ascending: int64 [tokens / cp]."""
        return self._positions_and_order(tokens, device)[0]

    def own(self, x_BT: Tensor) -> Tensor:
        """Return this rank's tokens of whole sequences."""
        return x_BT if self.ranks == 1 else x_BT.index_select(1, self.positions(x_BT.shape[1], x_BT.device))

    def whole(self, x_BT: Tensor) -> Tensor:
        """Return whole sequences [B, T, ..] from all ranks' tokens [B, T / cp, ..]. Collective, no gradients."""
        if self.ranks == 1:
            return x_BT
        return self.in_order(gather(x_BT, 1, self.mesh.group("cp")))

    def in_order(self, by_rank_BT: Tensor) -> Tensor:
        """Return sequences in order of position, from sequences in which the ranks' tokens are concatenated."""
        return by_rank_BT.index_select(1, self._positions_and_order(by_rank_BT.shape[1], by_rank_BT.device)[1])

    def _positions_and_order(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions of this rank's tokens, and for each position its index in the concatenated tokens of all
        ranks.

        The last result is cached, because a step needs it again for every micro-batch.
        """
        key = tokens, torch.device(device)
        if key not in self._known:
            by_rank = [self._positions_of(index, tokens) for index in range(self.ranks)]
            own, order = by_rank[self.mesh.index("cp")], torch.cat(by_rank).argsort()
            self._known = {key: (own.to(device), order.to(device))}
        return self._known[key]

    def _positions_of(self, index: int, tokens: int) -> Tensor:
        parts = rank_positions(self.mesh.parallel, index, tokens)
        return torch.cat([torch.arange(part.start, part.stop, part.step) for part in parts])


class ContextParallelism(TokenShare):
    """The attention of a rank that has a part of each sequence. The rest of a forward uses this rank's tokens alone.

    attend: the function for the model's attention (model/attention.py). kept: the results of the ring that selective
    recompute keeps. attend_locally: computes attention of whole sequences, (q_BNTH, k_BGTH, v_BGTH, mask_spec) -> BNTH.
    hidden: the model's blocks are compiled, in two parts, before and after an attention that the compiler does not see.
    """

    attend: Callable[..., Tensor]

    def __init__(self, mesh: Mesh, attend_locally: Callable[..., Tensor], hidden: bool = False):
        super().__init__(mesh)
        self._attend_locally, self._ulysses = attend_locally, mesh.size("ulysses")
        # This rank's mask spec -> the spec of whole sequences.
        self._whole_specs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.kept = KeptResults()
        self._ring = Ring(mesh.parallel, mesh.index("ring"), mesh.ranks("ring"), mesh.group("ring"), self.kept)
        self.attend = attend_locally if self.ranks == 1 else self._attend
        if hidden:
            # The compiler does not see messages between ranks and would move work across them, and it would compile
            # the tiles of each batch of documents again.
            self.attend = torch.compiler.disable(self.attend)  # type: ignore

    def _attend(self, q_BNtH: Tensor, k_BGtH: Tensor, v_BGtH: Tensor, mask_spec: Any) -> Tensor:
        """Return the attention of this rank's queries to all tokens of their sequences: [B, N, t, H].

        The queries are at mask_spec.positions_T.
        """
        attend = self._attend_whole if len(self._ring.ranks) == 1 else self._ring.attend
        if self._ulysses == 1:
            return attend(q_BNtH, k_BGtH, v_BGtH, mask_spec)
        attend_here = partial(attend, mask_spec=mask_spec)
        return attend_by_heads(q_BNtH, k_BGtH, v_BGtH, attend_here, self.mesh.group("ulysses"))

    def _attend_whole(self, q_BNTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, mask_spec: Any) -> Tensor:
        if mask_spec not in self._whole_specs:  # one for all layers of a forward
            tokens = q_BNTH.shape[2]
            whole = replace(mask_spec, positions_T=torch.arange(tokens, device=q_BNTH.device))
            self._whole_specs[mask_spec] = whole.planned(tokens, q_BNTH, q_BNTH.shape[3])
        return self._attend_locally(q_BNTH, k_BGTH, v_BGTH, self._whole_specs[mask_spec])


def attend_by_heads(
    q_BNtH: Tensor,
    k_BGtH: Tensor,
    v_BGtH: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Tensor:
    """Exchange tokens for heads, call `attend`, and exchange back. Returns [B, N, t, H].

    attend: takes N/R query heads of T tokens, and their keys and values; returns results with the shape of the queries.
    The ranks have consecutive parts of the T tokens. R divides N.
    """
    ranks, heads = group.size(), k_BGtH.shape[1]
    copies = math.lcm(heads, ranks) // heads
    if copies > 1:
        k_BGtH, v_BGtH = k_BGtH.repeat_interleave(copies, dim=1), v_BGtH.repeat_interleave(copies, dim=1)
    by_rank = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (q_BNtH, k_BGtH, v_BGtH)]
    sizes = [x.shape[2] for x in by_rank]
    mixed = _swap(torch.cat(by_rank, dim=2), group)  # [R, B, heads, t, H], by rank of the tokens
    q_BNTH, k_BGTH, v_BGTH = mixed.movedim(0, 2).flatten(2, 3).split(sizes, dim=1)
    out_BNTH = attend(q_BNTH, k_BGTH, v_BGTH)
    back = _swap(out_BNTH.unflatten(2, (ranks, -1)).movedim(2, 0), group)  # [R, B, N/R, t, H], by rank of the heads
    return back.movedim(0, 1).flatten(1, 2)


def _swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part r of the first dim to rank r, and return the parts from all ranks in rank order."""
    return _Swap.apply(parts, group)


class _Swap(torch.autograd.Function):
    """An all-to-all. The backward is the same all-to-all: the gradient of a part returns to the part's sender."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return all_to_all(grads[0], ctx.group), None
