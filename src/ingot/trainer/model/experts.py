"""What experts do with their rows, and how tokens become rows and sums of rows.

A token that goes to K experts is K rows, sorted by expert. Sums over a token's rows are taken in the order of its
choices, forward and backward, by gathers alone: no sum depends on how threads meet, and none is as large as [M x K, D].

Shape letters: M tokens, D d_model, E experts, K experts of a token, F d_expert, R rows (at most M x K).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.schema.arch import Moe
from ingot.trainer.model.routing import Routing, counted


def on_host(counts: Tensor, balanced: int) -> list[int]:
    """The host waits for numbers of rows, int64 [n], without which it cannot size what comes next.

    balanced: their sum if all experts had the same load; a trace, which has no numbers, takes its share of it.
    """
    return counts.tolist()


@dataclass(frozen=True)
class Rows:
    """assignments_R: of each row, token x K + choice. rows_MK: of each assignment; anything where it has no row, which
    is where kept_MK (bool) is False. None: all have one."""

    assignments_R: Tensor
    rows_MK: Tensor
    kept_MK: Tensor | None

    @property
    def tokens_R(self) -> Tensor:
        return self.assignments_R // self.rows_MK.shape[1]


def deal(routing: Routing, moe: Moe) -> tuple[Rows, list[int], Rows | None]:
    """Rows of the experts, one expert after the other and in the order of tokens; how many each has; and with a
    capacity, rows of the assignments that no expert keeps."""
    experts_MK, kept_MK = routing.experts_MK, routing.kept_MK
    assigned = experts_MK.flatten()
    if kept_MK is not None:
        assigned = torch.where(kept_MK.flatten(), assigned, moe.num_experts)  # behind all experts
    order = assigned.argsort(stable=True)
    place_MK = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    place_MK = place_MK.view_as(experts_MK)
    # A balanced expert is full where the capacity is below its share.
    balanced = len(order) if kept_MK is None else int(len(order) * min(moe.capacity_factor, 1))
    loads_E = counted(assigned[None], moe.num_experts + 1)[0, : moe.num_experts]
    counts = on_host(loads_E, balanced)
    if kept_MK is None:
        return Rows(order, place_MK, None), counts, None
    rows = sum(counts)
    sent = Rows(order[:rows], place_MK.clamp(max=max(rows - 1, 0)), kept_MK)
    left = Rows(order[rows:], (place_MK - rows).clamp(min=0), ~kept_MK)
    return sent, counts, left


def spread(x_MD: Tensor, rows: Rows) -> Tensor:
    """Each row's token: [R, D]."""
    return _Spread.apply(x_MD, rows.tokens_R, rows.rows_MK, rows.kept_MK)  # type: ignore[return-value]


def combine(made_RD: Tensor, weights_MK: Tensor, rows: Rows) -> Tensor:
    """Of each token, the sum of weight x row over its rows, taken in float32 at least: [M, D] in the rows' dtype."""
    return _Combine.apply(made_RD, weights_MK, rows.assignments_R, rows.rows_MK, rows.kept_MK)  # type: ignore


def _summed(values_RD: Tensor, rows_MK: Tensor, factors_MK: Tensor | None) -> Tensor:
    wide = torch.promote_types(values_RD.dtype, torch.float32)
    total_MD = values_RD.new_zeros(len(rows_MK), values_RD.shape[1], dtype=wide)
    for choice in range(rows_MK.shape[1] if len(values_RD) else 0):
        part_MD = values_RD.index_select(0, rows_MK[:, choice])
        if factors_MK is None:
            total_MD += part_MD
        else:
            total_MD.addcmul_(part_MD, factors_MK[:, choice, None])
    return total_MD.type_as(values_RD)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MD: Tensor, tokens_R: Tensor, rows_MK: Tensor, kept_MK: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, kept_MK)
        return x_MD.index_select(0, tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _summed(grads[0], *ctx.saved_tensors), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made_RD: Tensor, weights_MK: Tensor, assignments_R: Tensor, rows_MK: Tensor, kept_MK) -> Tensor:
        ctx.save_for_backward(made_RD, weights_MK, assignments_R, rows_MK, kept_MK)
        return _summed(made_RD, rows_MK, weights_MK if kept_MK is None else weights_MK * kept_MK)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (grad_MD,), (made_RD, weights_MK, assignments_R, rows_MK, kept_MK) = grads, ctx.saved_tensors
        # In place, which multiplies in the weights' wider dtype and rounds once.
        grad_made = grad_MD.index_select(0, assignments_R // rows_MK.shape[1])
        grad_made.mul_(weights_MK.flatten().index_select(0, assignments_R)[:, None])
        grad_weights, wide_MD = torch.zeros_like(weights_MK), grad_MD.to(weights_MK.dtype)
        for choice in range(weights_MK.shape[1] if len(made_RD) else 0):
            grad_weights[:, choice] = (wide_MD * made_RD.index_select(0, rows_MK[:, choice])).sum(-1)
        if kept_MK is not None:
            grad_weights.masked_fill_(~kept_MK, 0)
        return grad_made, grad_weights, None, None, None


class Stack(nn.Module):
    """One matrix for each expert, stacked: weight [E x out, in]."""

    def __init__(self, experts: int, outputs: int, inputs: int):
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """rows come expert by expert, counts_E of them for each. Returns [R, out]."""
        return grouped_product(rows_RI, self.weight.view(-1, self.outputs, self.weight.shape[1]), counts_E)


def grouped_product(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix [out, in].T: one kernel where it is made for them, else one product each.

    counts_E: on the host, so that nothing here waits for the device.
    """
    counts = on_host(counts_E, len(rows_RI))
    if _kernel_takes(rows_RI, weight_EOI):
        idle = [expert for expert, count in enumerate(counts) if count == 0]
        if idle and weight_EOI.requires_grad:
            weight_EOI.register_hook(partial(_without, idle))
        # A plain copy to a GPU would wait until all that was started before it is done.
        offsets = counts_E.cumsum(0).to(device=rows_RI.device, dtype=torch.int32, non_blocking=True)
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=offsets)
    return torch.cat([part @ weight.T for part, weight in zip(rows_RI.split(counts), weight_EOI.unbind(), strict=True)])


def _without(idle: list[int], gradient_EOI: Tensor) -> Tensor:
    """Experts without rows have no gradient, but on Blackwell the kernel leaves theirs as memory was before
    (pytorch/pytorch#172439). In place: the kernel has just made it, for us alone."""
    for expert in idle:
        gradient_EOI[expert].zero_()
    return gradient_EOI


def _kernel_takes(rows_RI: Tensor, weight_EOI: Tensor) -> bool:
    """It knows no float64, and rows of 16 bytes. float32 on a GPU would be a loop inside of it, which waits as well."""
    fast = rows_RI.dtype == torch.bfloat16 or (rows_RI.dtype == torch.float32 and not rows_RI.is_cuda)
    size = rows_RI.element_size()
    sizes = (*weight_EOI.shape[1:], rows_RI.storage_offset(), weight_EOI.storage_offset())
    return fast and len(rows_RI) > 0 and all(n * size % 16 == 0 for n in sizes)


class Experts(nn.Module):
    """SwiGLU for each expert."""

    def __init__(self, experts: int, d_model: int, d_expert: int):
        super().__init__()
        self.gate = Stack(experts, d_expert, d_model)
        self.up = Stack(experts, d_expert, d_model)
        self.down = Stack(experts, d_model, d_expert)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        hidden = F.silu(self.gate(rows_RD, counts_E)) * self.up(rows_RD, counts_E)
        return self.down(hidden, counts_E)
