"""A mixture of experts in place of the feed-forward (Shazeer et al. 2017; Fedus et al. 2021; DeepSeek-AI 2024).

Who takes a token is decided for each token by itself, and where experts have a capacity, for each sequence: so it does
not depend on how a batch is dealt to micro-batches and ranks. Expert matrices are stacked along their rows, so that a
rank's part of them is a block of rows.

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, K experts of a token, F d_expert, R rows on their way
to experts (at most M x K).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.layers import SwiGLU
from ingot.schema import arch as schema
from ingot.schema.arch import Arch


@dataclass(frozen=True)
class Pressure:
    """What a training step tells routers; without it they draw no noise and learn nothing about balance.

    keys_B: int64, of each sequence of the micro-batch, different for every sequence of the run: noise follows from it.
    weight: what a nat of one token counts in what is minimised; a scalar tensor.
    """

    keys_B: Tensor
    weight: Tensor


class Arriving(Protocol):
    def arrive(self) -> tuple[Tensor, Tensor]:
        """Wait for rows [R', D] for the experts of this rank, expert by expert, and how many each has [E']."""
        ...


class Returning(Protocol):
    def arrive(self) -> Tensor:
        """Wait for what experts made of the rows that were sent [R, D], in the order they were sent in."""
        ...


class Dispatch(Protocol):
    """How tokens come to experts and back; expert parallelism has another one (parallel/expert.py)."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        """Of a value for each token that attention sees, those of the tokens that experts see here."""
        ...

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        """The same of all tokens of the sequences, by position; all ranks that share them take part."""
        ...

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        """Start sending rows, expert by expert, counts[e] of them to expert e."""
        ...

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        """Start sending back what was made of what arrived."""
        ...


@dataclass(frozen=True)
class _Here:
    rows_RD: Tensor
    counts_E: Tensor

    def arrive(self) -> tuple[Tensor, Tensor]:
        return self.rows_RD, self.counts_E


@dataclass(frozen=True)
class _Back:
    rows_RD: Tensor

    def arrive(self) -> Tensor:
        return self.rows_RD


class LocalDispatch:
    """All experts and whole sequences are here."""

    def own_tokens(self, per_token_T: Tensor) -> Tensor:
        return per_token_T

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        return per_token_BTK

    def send(self, rows_RD: Tensor, counts: list[int]) -> Arriving:
        return _Here(rows_RD, torch.tensor(counts))

    def send_back(self, made_RD: Tensor, sent: Arriving) -> Returning:
        return _Back(made_RD)


def on_host(counts: Tensor, balanced: int) -> list[int]:
    """The host waits for numbers of rows, int64 [n], without which it cannot size what comes next.

    balanced: their sum if all experts had the same load; a trace, which has no numbers, takes its share of it.
    """
    return counts.tolist()


@dataclass(frozen=True)
class Routing:
    """experts_MK: int64. weights_MK: in the dtype of the tokens; differentiable."""

    experts_MK: Tensor
    weights_MK: Tensor


class Router(nn.Module):
    """bias_E, load_E: buffers, float32 (float64 in a float64 model): what loss-free balancing adds to scores, and each
    expert's share of the assignments of the step before x E; present where their use is asked for.

    seen: sums over the backwards of a step so far, float64 [E + 3]: loads, assignments dropped, entropy of the scores
    (nats) summed over tokens, tokens. parallel/balance.py reads and clears it.
    """

    def __init__(self, arch: Arch, layer: int, dispatch: Dispatch):
        super().__init__()
        self.moe, self.layer, self.dispatch = arch.moe, layer, dispatch
        self.weight = nn.Parameter(torch.empty(arch.moe.num_experts, arch.d_model))
        self.register_buffer("bias", torch.zeros(arch.moe.num_experts) if arch.moe.bias_rate else None)
        self.register_buffer("load", torch.ones(arch.moe.num_experts) if arch.moe.global_loss else None)
        self.seen: Tensor | None = None

    def forward(self, x_BTD: Tensor, positions_T: Tensor, pressure: Pressure | None) -> tuple[Routing, Tensor | None]:
        """positions_T: of these tokens. Returns the routing and, with a capacity, which assignments are kept [M, K]."""
        moe, batch, tokens = self.moe, x_BTD.shape[0], x_BTD.shape[1]
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        logits_BTE = F.linear(x_BTD.to(wide), self.weight.to(wide))
        if pressure is not None and moe.noise:
            logits_BTE = logits_BTE + moe.noise * normal_noise(
                pressure.keys_B, positions_T, self.layer, moe.num_experts
            ).to(wide)
        scores_BTE = logits_BTE.softmax(-1) if moe.scores == "softmax" else logits_BTE.sigmoid()
        choices_BTK = choose(scores_BTE.detach(), self.bias, moe)
        weights_BTK = scores_BTE.gather(-1, choices_BTK)
        if moe.normalize:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        weights_BTK = weights_BTK * moe.scale
        whole_BTK = choices_BTK
        if moe.capacity_factor or (moe.sequence_loss and pressure is not None):
            whole_BTK = self.dispatch.whole_sequences(choices_BTK)
        kept_MK = None
        if moe.capacity_factor:
            kept_MK = within_capacity(whole_BTK, moe)[:, positions_T].reshape(batch * tokens, -1)
        if pressure is not None:
            probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
            loss = self._balance_loss(logits_BTE, probabilities_BTE, whole_BTK)
            seen = self._count(choices_BTK, kept_MK, probabilities_BTE.detach())
            weights_BTK = _Press.apply(weights_BTK, loss, pressure.weight, seen, self)
        return Routing(choices_BTK.flatten(0, 1), weights_BTK.flatten(0, 1).type_as(x_BTD)), kept_MK

    def _balance_loss(self, logits_BTE: Tensor, probabilities_BTE: Tensor, whole_BTK: Tensor) -> Tensor:
        """Sum over the tokens here, so that all ranks and micro-batches together have the mean x tokens."""
        moe, loss = self.moe, logits_BTE.new_zeros(())
        if moe.sequence_loss:
            loads_BE = counted(whole_BTK, moe.num_experts) * (moe.num_experts / whole_BTK[0].numel())
            loss = loss + moe.sequence_loss * (probabilities_BTE * loads_BE[:, None].to(loss.dtype)).sum()
        if moe.global_loss:
            loss = loss + moe.global_loss * (probabilities_BTE * self.load.to(loss.dtype)).sum()
        if moe.z_loss:
            loss = loss + moe.z_loss * logits_BTE.logsumexp(-1).square().sum()
        return loss

    def _count(self, choices_BTK: Tensor, kept_MK: Tensor | None, probabilities_BTE: Tensor) -> Tensor:
        loads_E = counted(choices_BTK, self.moe.num_experts).sum(0)
        dropped = loads_E.new_zeros(()) if kept_MK is None else (~kept_MK).sum()
        entropy = torch.special.entr(probabilities_BTE).sum()
        tokens = choices_BTK.shape[0] * choices_BTK.shape[1]
        rest = [dropped.double(), entropy.double(), loads_E.new_full((), tokens, dtype=torch.float64)]
        return torch.cat((loads_E.double(), torch.stack(rest)))


class _Press(torch.autograd.Function):
    """Leaves the weights as they are; in the backward, which runs once for every micro-batch also where the forward is
    repeated, the balance loss gets its gradient and what was counted is added up."""

    @staticmethod
    def forward(ctx, weights_BTK: Tensor, loss: Tensor, weight: Tensor, seen: Tensor, router: Router):
        ctx.weight, ctx.seen, ctx.router = weight.to(loss.dtype), seen, router
        return weights_BTK.view_as(weights_BTK)

    @staticmethod
    def backward(ctx, *grads):
        router = ctx.router
        router.seen = ctx.seen if router.seen is None else router.seen + ctx.seen
        return grads[0], ctx.weight, None, None, None


def choose(scores_BTE: Tensor, bias_E: Tensor | None, moe: schema.Moe) -> Tensor:
    """The experts of each token, best first: int64 [B, T, K]."""
    ranked = scores_BTE if bias_E is None else scores_BTE + bias_E.to(scores_BTE.dtype)
    if moe.groups > 1:
        grouped = ranked.unflatten(-1, (moe.groups, -1))
        best = max(moe.top_k // moe.top_groups, 1)
        chosen = grouped.topk(best, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        open_BTG = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
        ranked = grouped.masked_fill(~open_BTG[..., None], -torch.inf).flatten(-2)
    return ranked.topk(moe.top_k, dim=-1).indices


def counted(choices_BTK: Tensor, experts: int) -> Tensor:
    """How many assignments each expert has in each sequence: int64 [B, E]."""
    flat = choices_BTK.flatten(1)
    return torch.zeros(len(flat), experts, dtype=torch.int64, device=flat.device).scatter_add_(
        1, flat, torch.ones_like(flat)
    )


def capacity(moe: schema.Moe, seq_len: int) -> int:
    """Tokens of one sequence that an expert takes."""
    return math.ceil(moe.capacity_factor * moe.top_k * seq_len / moe.num_experts)


def within_capacity(choices_BTK: Tensor, moe: schema.Moe) -> Tensor:
    """Which assignments of whole sequences are kept: bool [B, T, K]. First choices go before second ones, then earlier
    tokens before later ones."""
    batch, tokens, top_k = choices_BTK.shape
    by_priority = choices_BTK.transpose(1, 2).reshape(batch, -1)  # [B, K x T]
    order = by_priority.argsort(dim=-1, stable=True)
    counts_BE = counted(choices_BTK, moe.num_experts)
    starts_BE = counts_BE.cumsum(-1) - counts_BE
    place = torch.arange(order.shape[1], device=order.device) - starts_BE.gather(1, by_priority.gather(1, order))
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, place < capacity(moe, tokens))
    return kept.view(batch, top_k, tokens).transpose(1, 2)


def normal_noise(keys_B: Tensor, positions_T: Tensor, layer: int, experts: int) -> Tensor:
    """Standard normal float64 [B, T, E], a pure function of (key, position, layer, expert): the same on every layout,
    and when a block is computed again. Counters are mixed by SplitMix64 (Steele et al. 2014)."""
    columns = torch.arange(experts, device=keys_B.device) + layer * experts
    mixed = _mix(_mix(_mix(keys_B)[:, None] + positions_T[None, :])[:, :, None] + columns)
    uniform = ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53 + 2.0**-54
    return torch.special.ndtri(uniform)


def _mix(x: Tensor) -> Tensor:
    """int64, which wraps around as unsigned numbers do; `>>` keeps the sign, so it is masked away."""
    x = x - 0x61C8864680B583EB
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


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
    """Each expert's rows times its matrix [out, in].T: one kernel where PyTorch has it, else one product each."""
    if rows_RI.is_cuda and rows_RI.dtype == torch.bfloat16:
        offsets = counts_E.cumsum(0).to(device=rows_RI.device, dtype=torch.int32)
        return torch._grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=offsets)
    parts = rows_RI.split(counts_E.tolist())
    return torch.cat([part @ weight.T for part, weight in zip(parts, weight_EOI.unbind(), strict=True)])


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


class Moe(nn.Module):
    """sum over a token's experts of weight x expert(x), plus shared(x) if there are shared experts."""

    def __init__(self, arch: Arch, layer: int, dispatch: Dispatch):
        super().__init__()
        moe, self.top_k, self.num_experts, self.dispatch = arch.moe, arch.moe.top_k, arch.moe.num_experts, dispatch
        self.router = Router(arch, layer, dispatch)
        self.experts = Experts(moe.num_experts, arch.d_model, moe.d_expert)
        self.shared = SwiGLU(arch.d_model, moe.shared_experts * moe.d_expert) if moe.shared_experts else None
        self.fallback = SwiGLU(arch.d_model, moe.d_expert) if moe.has_fallback else None

    def forward(self, x_BTD: Tensor, positions_T: Tensor, pressure: Pressure | None = None) -> Tensor:
        """positions_T: of all tokens that attention sees here. Returns [B, T, D]."""
        routing, kept_MK = self.router(x_BTD, self.dispatch.own_tokens(positions_T), pressure)
        x_MD, assigned = x_BTD.flatten(0, 1), routing.experts_MK.flatten()
        if kept_MK is not None:
            assigned = torch.where(kept_MK.flatten(), assigned, self.num_experts)  # after all experts: left behind
        order = assigned.argsort(stable=True)
        counts = on_host(torch.bincount(assigned, minlength=self.num_experts + 1), len(assigned))
        sent_rows = order[: sum(counts[: self.num_experts])]
        sent = self.dispatch.send(x_MD[sent_rows // self.top_k], counts[: self.num_experts])
        shared = self.shared(x_BTD) if self.shared is not None else None  # while rows are on their way
        back = self.dispatch.send_back(self.experts(*sent.arrive()), sent)
        made_RD, rows = back.arrive(), sent_rows
        if self.fallback is not None:
            left_rows = order[len(sent_rows) :]
            made_RD = torch.cat((made_RD, self.fallback(x_MD[left_rows // self.top_k])))
            rows = order
        # Every assignment back in its place, so that a token's experts are summed in one order.
        spread = made_RD.new_zeros(len(assigned), made_RD.shape[-1]).index_copy(0, rows, made_RD)
        y_MD = torch.einsum("mk,mkd->md", routing.weights_MK, spread.view(len(x_MD), self.top_k, -1))
        y_BTD = y_MD.view_as(x_BTD)
        return y_BTD if shared is None else y_BTD + shared
