"""A mixture of experts in place of the feed-forward (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-AI 2024).

model/routing.py chooses the experts of each token. Here tokens become rows sorted by expert (model/expert_rows.py),
experts compute on the rows, and each token gets the weighted sum of its rows. Numbers of rows stay on the device, where
the kernel of grouped products reads them: the host waits for them only where it cannot do without (`on_host`).

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, K experts of a token, F d_expert, R rows (at most
M x K).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.schema.arch import Arch
from ingot.trainer.model.expert_rows import ExpertRows, SortedAssignments, combine, sort_assignments, token_rows
from ingot.trainer.model.layers import SwiGLU
from ingot.trainer.model.routing import Router, RouterLoss, Routing, SequenceGather

CountKind = Literal["exchanged", "own"]
_Value = TypeVar("_Value")


def on_host(counts: Tensor, rows: int, kind: CountKind) -> list[int]:
    """Return row counts, int64 [n], as a list: the host waits for them, because they are the sizes of the next tensors.

    Experts make the host wait nowhere else. A dry run, whose tensors have no values, replaces this function.
    kind: "exchanged", the rows that this rank sends to each rank, and then those that arrive per sender and expert;
    "own", the rows per expert of this rank. rows: of "exchanged", the number of assignments here; of "own", the sum.
    """
    return counts.tolist()


def every_time(make: Callable[[], _Value]) -> _Value:
    """Return make(). A block that is recomputed has another function in its place, which keeps the value of the forward
    (parallel/recompute.py)."""
    return make()


class ExpertCounts:
    """The number of rows of each expert of this rank; the rows are sorted by expert.

    counts_E: int64 [E], on the device of the rows. rows: their sum. known: the same numbers on the host, if it has
    them. once: makes a value in a forward, and returns it when the forward is repeated.
    """

    def __init__(self, counts_E: Tensor, rows: int, known: list[int] | None = None, once: Any = every_time):
        self.counts_E, self.rows, self.known, self._once = counts_E, rows, known, once

    def numbers(self) -> list[int]:
        """Return the counts as a list. The host waits for them at the first call, unless it knows them."""
        if self.known is None:
            self.known = self._once(lambda: on_host(self.counts_E, self.rows, "own"))
        return self.known

    @cached_property
    def ends(self) -> Tensor:
        """Return the end of each expert's rows, int32 [E], on the device."""
        return self.counts_E.cumsum(0).to(torch.int32)


class StackedLinear(nn.Module):
    """One matrix for each expert, stacked: weight [E x out, in]."""

    def __init__(self, experts: int, outputs: int, inputs: int):
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, rows_RI: Tensor, counts: ExpertCounts) -> Tensor:
        """Return [R, out]. rows_RI: the inputs, sorted by expert. counts: the number of rows of each expert."""
        return grouped_product(rows_RI, self.weight.view(-1, self.outputs, self.weight.shape[1]), counts)


def grouped_product(rows_RI: Tensor, weight_EOI: Tensor, counts: ExpertCounts) -> Tensor:
    """Multiply each expert's rows by its transposed matrix [out, in].T: in one grouped kernel if that supports these
    tensors, otherwise expert by expert, for which the host needs the counts."""
    if _kernel_takes(rows_RI, weight_EOI):
        if weight_EOI.requires_grad:
            _clear_idle(weight_EOI, counts)
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=counts.ends)
    parts = zip(rows_RI.split(counts.numbers()), weight_EOI.unbind(), strict=True)
    return torch.cat([part @ weight.T for part, weight in parts])


def _clear_idle(weight_EOI: Tensor, counts: ExpertCounts) -> None:
    """Zero the gradients of experts without rows, where the kernel leaves them uninitialized (pytorch/pytorch#172439).

    If the host knows the counts, idle experts alone are written. Otherwise the whole gradient passes through a mask, so
    devices whose kernel writes zeros are left out. In place: the kernel has just made the gradient, and nothing else
    refers to it.
    """
    if counts.known is not None:
        idle = [expert for expert, count in enumerate(counts.known) if count == 0]
        if idle:
            weight_EOI.register_hook(partial(_clear_some, idle))
    elif leaves_idle_gradients(weight_EOI.device):
        idle_E = counts.counts_E == 0
        weight_EOI.register_hook(lambda gradient_EOI: gradient_EOI.masked_fill_(idle_E[:, None, None], 0))


def _clear_some(idle: list[int], gradient_EOI: Tensor) -> Tensor:
    for expert in idle:
        gradient_EOI[expert].zero_()
    return gradient_EOI


def leaves_idle_gradients(device: torch.device) -> bool:
    """Return whether the grouped kernel leaves gradients of experts without rows uninitialized: on Blackwell and later,
    and on AMD's GPUs (pytorch/pytorch#174314)."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 10


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

    def forward(self, rows_RD: Tensor, counts: ExpertCounts) -> Tensor:
        hidden = F.silu(self.gate(rows_RD, counts)) * self.up(rows_RD, counts)
        return self.down(hidden, counts)


class Arriving(Protocol):
    """Rows on their way to this rank's experts."""

    def arrive(self) -> tuple[Tensor, ExpertCounts]:
        """Wait for the rows. Return them, [R', D] sorted by expert, and the rows of each local expert."""
        ...


class Returning(Protocol):
    """Results on their way back from the experts."""

    def arrive(self) -> Tensor:
        """Wait for the experts' results. Return the sum of each token here, [M, D], weighted as routed."""
        ...


class Dispatch(SequenceGather, Protocol):
    """The transport of tokens to experts and back. Expert parallelism has its own class (parallel/expert.py).

    A library that moves tokens with kernels of its own fits in here: it gets tokens and their experts, not rows.
    """

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Return the part of `per_token_T`, one value per token of attention here, for the tokens routed here."""
        ...

    def send(self, x_MD: Tensor, routing: Routing) -> Arriving:
        """Start to send tokens to the experts that are chosen for them."""
        ...

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        """Start to send back the experts' results for the rows that arrived."""
        ...


@dataclass(frozen=True)
class _ArrivingHere:
    rows_RD: Tensor
    counts: ExpertCounts
    rows: ExpertRows
    weights_MK: Tensor

    def arrive(self) -> tuple[Tensor, ExpertCounts]:
        return self.rows_RD, self.counts


@dataclass(frozen=True)
class _ReturningHere:
    made_RD: Tensor
    sent: _ArrivingHere

    def arrive(self) -> Tensor:
        return combine(self.made_RD, self.sent.weights_MK, self.sent.rows)


class LocalDispatch:
    """The dispatch of a process that has all experts and whole sequences.

    All sizes are known without the counts: with a capacity there are as many rows as it can keep, and the last expert
    computes those that are fill. once: as in ExpertCounts.
    """

    def __init__(self, once: Any = every_time):
        self.once = once

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        return per_token_T

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        return per_token_BTK

    def send(self, x_MD: Tensor, routing: Routing) -> Arriving:
        ordered = sort_assignments(routing)
        size = min(len(ordered.order_A), routing.experts * routing.most_rows)
        rows = ordered.first(size)
        counts = self.counts(ordered.counts_E, size, has_fill=rows.fill_R is not None)
        return _ArrivingHere(token_rows(x_MD, rows), counts, rows, routing.weights_MK)

    def send_back(self, made_RD: Tensor, sent: Any) -> Returning:
        return _ReturningHere(made_RD, sent)

    # The parts of a dispatch, for parallel/expert.py, which does not import the model.

    def on_host(self, counts: Tensor, rows: int, kind: CountKind) -> list[int]:
        return on_host(counts, rows, kind)

    def sorted(self, routing: Routing) -> SortedAssignments:
        return sort_assignments(routing)

    def token_rows(self, x_MD: Tensor, rows: ExpertRows) -> Tensor:
        return token_rows(x_MD, rows)

    def combine(self, made_RD: Tensor, weights_MK: Tensor, rows: ExpertRows) -> Tensor:
        return combine(made_RD, weights_MK, rows)

    def counts(
        self, counts_E: Tensor, rows: int, known: list[int] | None = None, *, has_fill: bool = False
    ) -> ExpertCounts:
        """Return the counts of `rows` rows. has_fill: the last expert also takes the rows beyond the counts. (The
        kernel leaves rows of no expert uninitialized, and 0 times such a row may be NaN: pytorch/pytorch#154557.)"""
        if has_fill:
            counts_E = torch.cat((counts_E[:-1], rows - counts_E[:-1].sum(0, keepdim=True)))
        return ExpertCounts(counts_E, rows, known, self.once)


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
        sent = self.dispatch.send(x_BTD.flatten(0, 1), routing)
        # What every token passes through overlaps with the transfer of the rows.
        shared = self.shared(x_BTD) if self.shared is not None else None
        instead = self._instead(x_BTD, routing)
        y_MD = self.dispatch.send_back(self.experts(*sent.arrive()), sent).arrive()
        if instead is not None:
            y_MD = y_MD + instead
        y_BTD = y_MD.view_as(x_BTD)
        return y_BTD if shared is None else y_BTD + shared

    def _instead(self, x_BTD: Tensor, routing: Routing) -> Tensor | None:
        """Return what the fallback makes of each token, times the weights of its assignments beyond the capacity:
        [M, D]; None if there is no fallback or no capacity acts.

        All tokens pass through it: the number of those that need it is a number of the device.
        """
        if self.fallback is None or routing.kept_MK is None:
            return None
        weights_M = routing.weights_MK.masked_fill(routing.kept_MK, 0).sum(-1)
        return (self.fallback(x_BTD).flatten(0, 1) * weights_M[:, None]).type_as(x_BTD)
