"""A mixture of experts in place of the feed-forward (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-AI 2024).

model/routing.py chooses the experts of each token. Here tokens become rows sorted by expert, experts compute on the
rows, and each token gets the weighted sum of its rows. A token that goes to K experts has K rows. Sums over a token's
rows are computed in the order of its choices, forward and backward, by gathers alone: no sum depends on the order of
threads, and no temporary is as large as [M x K, D].

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, K experts of a token, F d_expert, R rows (at most
M x K).
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.schema.arch import Arch, Moe
from ingot.trainer.model.layers import SwiGLU
from ingot.trainer.model.routing import Router, RouterLoss, Routing, SequenceGather, expert_loads

RowCounts = Literal["assigned", "arriving", "own"]


def on_host(counts: Tensor, balanced: int, kind: RowCounts) -> list[int]:
    """Return row counts, int64 [n], as a list: the host waits for them, because they are the sizes of the next tensors.

    Experts make the host wait nowhere else. A dry run, whose tensors have no values, replaces this function.
    kind: "assigned", this rank's rows per expert; "arriving", the rows that arrive per sender and expert; "own", the
    rows per expert of this rank. balanced: the sum of the counts if all experts had the same load.
    """
    return counts.tolist()


@dataclass(frozen=True)
class ExpertRows:
    """The rows that one kind of expert (routed or fallback) computes, one row per assignment of a token to an expert.

    assignments_R: the assignment of each row, token x K + choice. rows_MK: the row of each assignment. kept_MK: bool,
    False where an assignment has no row (rows_MK is arbitrary there); None if every assignment has a row.
    """

    assignments_R: Tensor
    rows_MK: Tensor
    kept_MK: Tensor | None

    @property
    def tokens_R(self) -> Tensor:
        return self.assignments_R // self.rows_MK.shape[1]


def assign_rows(routing: Routing, moe: Moe) -> tuple[ExpertRows, list[int], ExpertRows | None]:
    """Return the routed experts' rows, sorted by expert and then by token; the number of rows of each expert; and the
    rows of the assignments beyond the capacity (None without a capacity)."""
    experts_MK, kept_MK = routing.experts_MK, routing.kept_MK
    assigned = experts_MK.flatten()
    if kept_MK is not None:
        assigned = torch.where(kept_MK.flatten(), assigned, moe.num_experts)  # after all experts
    order = assigned.argsort(stable=True)
    place_MK = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    place_MK = place_MK.view_as(experts_MK)
    # With equal loads, every expert is full if its capacity is below an equal share.
    balanced = len(order) if kept_MK is None else int(len(order) * min(moe.capacity_factor, 1))
    loads_E = expert_loads(assigned[None], moe.num_experts + 1)[0, : moe.num_experts]
    counts = on_host(loads_E, balanced, "assigned")
    if kept_MK is None:
        return ExpertRows(order, place_MK, None), counts, None
    rows = sum(counts)
    sent = ExpertRows(order[:rows], place_MK.clamp(max=max(rows - 1, 0)), kept_MK)
    dropped = ExpertRows(order[rows:], (place_MK - rows).clamp(min=0), ~kept_MK)
    return sent, counts, dropped


def token_rows(x_MD: Tensor, rows: ExpertRows) -> Tensor:
    """Return the hidden state of each row's token: [R, D]."""
    return _TokenRows.apply(x_MD, rows.tokens_R, rows.rows_MK, rows.kept_MK)


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
    def forward(ctx, x_MD: Tensor, tokens_R: Tensor, rows_MK: Tensor, kept_MK: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MK, kept_MK)
        return x_MD.index_select(0, tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _sum_rows(grads[0], *ctx.saved_tensors), None, None, None


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


class StackedLinear(nn.Module):
    """One matrix for each expert, stacked: weight [E x out, in]."""

    def __init__(self, experts: int, outputs: int, inputs: int):
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
        """Return [R, out]. rows_RI: the inputs, sorted by expert. counts_E: the number of rows of each expert."""
        return grouped_product(rows_RI, self.weight.view(-1, self.outputs, self.weight.shape[1]), counts_E)


def grouped_product(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its transposed matrix [out, in].T: in one grouped kernel if that supports these
    tensors, otherwise expert by expert.

    counts_E: a CPU tensor, so nothing here waits for the device.
    """
    counts = on_host(counts_E, len(rows_RI), "own")
    if _kernel_takes(rows_RI, weight_EOI):
        idle = [expert for expert, count in enumerate(counts) if count == 0]
        if idle and weight_EOI.requires_grad:
            weight_EOI.register_hook(partial(_clear_idle, idle))
        # A blocking copy to a GPU would wait until all earlier work is done.
        offsets = counts_E.cumsum(0).to(device=rows_RI.device, dtype=torch.int32, non_blocking=True)
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=offsets)
    return torch.cat([part @ weight.T for part, weight in zip(rows_RI.split(counts), weight_EOI.unbind(), strict=True)])


def _clear_idle(idle: list[int], gradient_EOI: Tensor) -> Tensor:
    """Zero the gradients of experts without rows: on Blackwell the kernel leaves them uninitialized
    (pytorch/pytorch#172439). In place: the kernel has just made this tensor and nothing else refers to it."""
    for expert in idle:
        gradient_EOI[expert].zero_()
    return gradient_EOI


def _kernel_takes(rows_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Return whether the grouped kernel takes these tensors and is fast: bf16, or fp32 on a CPU, aligned to 16 bytes.

    The kernel does not support float64. For float32 on a GPU it loops over the experts and waits for the device.
    """
    fast = rows_RI.dtype == torch.bfloat16 or (rows_RI.dtype == torch.float32 and not rows_RI.is_cuda)
    size = rows_RI.element_size()
    sizes = (*weight_EOI.shape[1:], rows_RI.storage_offset(), weight_EOI.storage_offset())
    return fast and len(rows_RI) > 0 and all(n * size % 16 == 0 for n in sizes)


class Experts(nn.Module):
    """A SwiGLU feed-forward for each expert."""

    def __init__(self, experts: int, d_model: int, d_expert: int):
        super().__init__()
        self.gate = StackedLinear(experts, d_expert, d_model)
        self.up = StackedLinear(experts, d_expert, d_model)
        self.down = StackedLinear(experts, d_model, d_expert)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        hidden = F.silu(self.gate(rows_RD, counts_E)) * self.up(rows_RD, counts_E)
        return self.down(hidden, counts_E)


class Arriving(Protocol):
    """Rows on their way to this rank's experts."""

    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait for the rows. Return them, [R', D] sorted by expert, and the rows per local expert, [E'] on the CPU."""
        ...


class Returning(Protocol):
    """Results on their way back from the experts."""

    def arrive(self) -> Tensor:
        """Wait for the experts' results for the rows that were sent. Return them, [R, D] in the order of sending."""
        ...


class Dispatch(SequenceGather, Protocol):
    """The transport of tokens to experts and back. Expert parallelism has its own class (parallel/expert.py)."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Return the part of `per_token_T`, one value per token of attention here, for the tokens routed here."""
        ...

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        """Start to send rows, which are sorted by expert: counts[e] rows go to expert e."""
        ...

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        """Start to send back the experts' results for the rows that arrived."""
        ...


@dataclass(frozen=True)
class _ArrivingHere:
    rows_RD: Tensor
    counts_E: Tensor

    def arrive(self) -> tuple[Tensor, Tensor]:
        return self.rows_RD, self.counts_E


@dataclass(frozen=True)
class _ReturningHere:
    rows_RD: Tensor

    def arrive(self) -> Tensor:
        return self.rows_RD


class LocalDispatch:
    """The dispatch of a process that has all experts and whole sequences."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        return per_token_T

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        return per_token_BTK

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        return _ArrivingHere(rows_RD, torch.tensor(counts))

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        return _ReturningHere(made_RD)

    def on_host(self, counts: Tensor, balanced: int, kind: RowCounts) -> list[int]:
        """Call this module's `on_host`. parallel/expert.py uses this method, so a dry run replaces one function."""
        return on_host(counts, balanced, kind)


class MoeLayer(nn.Module):
    """The sum over a token's experts of weight x expert(x), plus shared(x) if there are shared experts."""

    def __init__(self, arch: Arch, layer: int, dispatch: Dispatch):
        super().__init__()
        moe = arch.moe
        self.moe, self.dispatch = moe, dispatch
        self.router = Router(arch, layer, dispatch)
        self.experts = Experts(moe.num_experts, arch.d_model, moe.d_expert)
        self.shared = SwiGLU(arch.d_model, moe.shared_experts * moe.d_expert) if moe.shared_experts else None
        self.fallback = SwiGLU(arch.d_model, moe.d_expert) if moe.has_fallback else None

    def forward(self, x_BTD: Tensor, positions_T: Tensor, router_loss: RouterLoss | None = None) -> Tensor:
        """Return [B, T, D]. positions_T: the positions of all tokens that attention gets on this rank."""
        routing = self.router(x_BTD, self.dispatch.own_tokens(positions_T), router_loss)
        rows, counts, dropped = assign_rows(routing, self.moe)
        x_MD = x_BTD.flatten(0, 1)
        sent = self.dispatch.send(token_rows(x_MD, rows), counts)
        shared = self.shared(x_BTD) if self.shared is not None else None  # overlaps with the transfer of the rows
        back = self.dispatch.send_back(self.experts(*sent.arrive()), sent)
        y_MD = combine(back.arrive(), routing.weights_MK, rows)
        if self.fallback is not None and dropped is not None:
            y_MD = y_MD + combine(self.fallback(token_rows(x_MD, dropped)), routing.weights_MK, dropped)
        y_BTD = y_MD.view_as(x_BTD)
        return y_BTD if shared is None else y_BTD + shared
