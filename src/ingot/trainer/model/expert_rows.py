"""The rows of a mixture of experts: one row per assignment of a token to an expert, sorted by expert.

A token that goes to K experts has K rows. Sums over a token's rows are computed in the order of its choices, forward
and backward, by gathers alone: no sum depends on the order of threads, and no temporary is as large as [M x K, D]. All
numbers of rows stay on the device: the host knows the sizes of these tensors without them.

Shape letters: M tokens, D d_model, E experts, K experts of a token, R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.trainer.model.routing import Routing, expert_loads


@dataclass(frozen=True)
class ExpertRows:
    """The rows of the tokens here, and what is left of them for each token.

    assignments_R: int64, the assignment of each row, token x K + choice. rows_MK: int64, the row of each assignment.
    kept_MK: bool, False where an assignment has no row (rows_MK is arbitrary there); None if every assignment has a
    row. fill_R: bool, True where a row is fill; None if no row is. Fill is all zeros, so whatever gradient it gets, it
    adds nothing to that of a matrix; its assignment is arbitrary.
    """

    assignments_R: Tensor
    rows_MK: Tensor
    kept_MK: Tensor | None = None
    fill_R: Tensor | None = None

    @property
    def tokens_R(self) -> Tensor:
        return self.assignments_R // self.rows_MK.shape[1]


@dataclass(frozen=True)
class SortedAssignments:
    """All assignments, sorted by expert and then by token; those beyond the capacity after all others.

    order_A: int64 [M x K], the assignments in this order. place_MK: int64, the place of each assignment in it.
    counts_E: int64, the number of kept assignments of each expert, on the device of the tokens. kept_MK: as in Routing.
    """

    order_A: Tensor
    place_MK: Tensor
    counts_E: Tensor
    kept_MK: Tensor | None

    def first(self, rows: int, *, exactly: bool = False) -> ExpertRows:
        """Return the first `rows` assignments as rows. They include every kept assignment; the others are fill.

        exactly: there are no others.
        """
        if self.kept_MK is None:
            return ExpertRows(self.order_A, self.place_MK)
        fill_R = None if exactly else torch.arange(rows, device=self.order_A.device) >= self.counts_E.sum()
        return ExpertRows(self.order_A[:rows], self.place_MK.clamp(max=max(rows - 1, 0)), self.kept_MK, fill_R)

    def in_blocks(self, blocks: int, rows: int) -> ExpertRows:
        """Return blocks of `rows` rows, one after the other. Block b has the kept assignments of the b-th part of the
        experts, sorted as here, and then fill. rows: not less than a part has kept assignments."""
        counts_B = self.counts_E.view(blocks, -1).sum(1)
        starts_B = counts_B.cumsum(0) - counts_B
        within = torch.arange(rows, device=self.order_A.device)
        places_R = (starts_B[:, None] + within).clamp(max=len(self.order_A) - 1).flatten()
        # The block of an assignment is the last one that starts at its place or before it; blocks may be empty.
        block_MK = torch.searchsorted(starts_B, self.place_MK, right=True) - 1
        rows_MK = block_MK * rows + self.place_MK - starts_B[block_MK]
        kept_MK = self.kept_MK
        if kept_MK is not None:
            rows_MK = torch.where(kept_MK, rows_MK, 0)
        return ExpertRows(self.order_A[places_R], rows_MK, kept_MK, (within >= counts_B[:, None]).flatten())


def sort_assignments(routing: Routing) -> SortedAssignments:
    experts = routing.experts
    assigned = routing.experts_MK.flatten()
    if routing.kept_MK is not None:
        assigned = torch.where(routing.kept_MK.flatten(), assigned, experts)  # after all experts
    order = assigned.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts_E = expert_loads(assigned[None], experts + 1)[0, :experts]
    return SortedAssignments(order, place.view_as(routing.experts_MK), counts_E, routing.kept_MK)


def token_rows(x_MD: Tensor, rows: ExpertRows) -> Tensor:
    """Return the hidden state of each row's token, and zeros as fill: [R, D]."""
    return _TokenRows.apply(x_MD, rows.tokens_R, rows.rows_MK, rows.kept_MK, rows.fill_R)


def combine(made_RD: Tensor, weights_MK: Tensor, rows: ExpertRows) -> Tensor:
    """Return each token's sum of weight x row, [M, D] in the dtype of the rows, summed in float32 or wider."""
    return _Combine.apply(made_RD, weights_MK, rows.assignments_R, rows.rows_MK, rows.kept_MK)


def _sum_rows(values_RD: Tensor, rows_MK: Tensor, factors_MK: Tensor | None) -> Tensor:
    wide = torch.promote_types(values_RD.dtype, torch.float32)
    total_MD = values_RD.new_zeros(len(rows_MK), values_RD.shape[1], dtype=wide)
    for choice in range(rows_MK.shape[1] if len(values_RD) else 0):
        part_MD = values_RD.index_select(0, rows_MK[:, choice])
        if factors_MK is None:
            total_MD += part_MD
        else:
            total_MD.addcmul_(part_MD, factors_MK[:, choice, None])
    return total_MD.type_as(values_RD)


class _TokenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MD: Tensor, tokens_R: Tensor, rows_MK: Tensor, kept_MK: Tensor | None, fill_R: Tensor | None):
        ctx.save_for_backward(rows_MK, kept_MK)
        x_RD = x_MD.index_select(0, tokens_R)
        return x_RD if fill_R is None else x_RD.masked_fill_(fill_R[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _sum_rows(grads[0], *ctx.saved_tensors), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made_RD: Tensor, weights_MK: Tensor, assignments_R: Tensor, rows_MK: Tensor, kept_MK) -> Tensor:
        ctx.save_for_backward(made_RD, weights_MK, assignments_R, rows_MK, kept_MK)
        return _sum_rows(made_RD, rows_MK, weights_MK if kept_MK is None else weights_MK * kept_MK)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (grad_MD,), (made_RD, weights_MK, assignments_R, rows_MK, kept_MK) = grads, ctx.saved_tensors
        # In place, so that the product is computed in the wider dtype of the weights and rounded once.
        grad_made = grad_MD.index_select(0, assignments_R // rows_MK.shape[1])
        grad_made.mul_(weights_MK.flatten().index_select(0, assignments_R)[:, None])
        grad_weights, wide_MD = torch.zeros_like(weights_MK), grad_MD.to(weights_MK.dtype)
        for choice in range(weights_MK.shape[1] if len(made_RD) else 0):
            grad_weights[:, choice] = (wide_MD * made_RD.index_select(0, rows_MK[:, choice])).sum(-1)
        if kept_MK is not None:
            grad_weights.masked_fill_(~kept_MK, 0)
        return grad_made, grad_weights, None, None, None
