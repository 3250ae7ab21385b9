"""Which experts a token goes to, and what balances them.

It is decided for each token by itself, and where experts have a capacity, for each sequence: so it does not depend on
how a batch is dealt to micro-batches and ranks. Logits and scores are float32 at least (Fedus et al. 2021, sec. 2.4).

A capacity acts in training only. Whether an earlier token's second choice has room depends on the first choices of
later tokens, and on how long the text is: a score of held-out text would know what comes, and generated text has not
been written yet.

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, G groups of them, K experts of a token.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.schema.arch import Arch, Moe


@dataclass(frozen=True)
class Pressure:
    """What a training step tells routers; without it experts take all tokens, and routers draw no noise and learn
    nothing about balance.

    keys_B: int64, of each sequence of the micro-batch, different for every sequence of the run: noise follows from it.
    weight: what a nat of one token counts in what is minimised; a scalar tensor.
    """

    keys_B: Tensor
    weight: Tensor


class Sequences(Protocol):
    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        """A value of this rank's tokens, of all tokens of the sequences by position; all ranks that share them take
        part."""
        ...


@dataclass(frozen=True)
class Routing:
    """experts_MK: int64, best first. weights_MK: float32 at least; differentiable. kept_MK: False where an expert had
    no room for the token; None where all have."""

    experts_MK: Tensor
    weights_MK: Tensor
    kept_MK: Tensor | None


class Router(nn.Module):
    """bias_E, load_E: buffers, float32 (float64 in a float64 model): what loss-free balancing adds to scores, and each
    expert's share of the assignments of the step before x E; present where their use is asked for.

    seen: sums over the backwards of a step so far, float64 [E + 3]: loads, assignments dropped, entropy of the scores
    (nats) summed over tokens, tokens. parallel/balance.py reads and clears it.
    """

    bias: Tensor | None
    load: Tensor | None
    seen: Tensor | None

    def __init__(self, arch: Arch, layer: int, sequences: Sequences):
        super().__init__()
        self.moe, self.layer, self.sequences = arch.moe, layer, sequences
        self.weight = nn.Parameter(torch.empty(arch.moe.num_experts, arch.d_model))
        self.register_buffer("bias", torch.zeros(arch.moe.num_experts) if arch.moe.bias_rate else None)
        self.register_buffer("load", torch.ones(arch.moe.num_experts) if arch.moe.global_loss else None)
        self.seen = None

    def _apply(self, fn, recurse: bool = True):
        """What `to`, `half`, `to_empty`, ... do to parameters and buffers. Here a narrow dtype is for the weight alone:
        rounded to bfloat16, a bias would choose other experts."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, value in self.named_buffers():
            if (wide := torch.promote_types(value.dtype, torch.float32)) != value.dtype:
                setattr(self, name, before[name].to(value.device, wide))
        return self

    def forward(self, x_BTD: Tensor, positions_T: Tensor, pressure: Pressure | None) -> Routing:
        """positions_T: of these tokens."""
        moe = self.moe
        limited = pressure is not None and moe.capacity_factor > 0
        logits_BTE = _logits(x_BTD, self.weight)
        if pressure is not None and moe.noise:
            noise_BTE = normal_noise(pressure.keys_B, positions_T, self.layer, moe.num_experts)
            logits_BTE = logits_BTE + moe.noise * noise_BTE.to(logits_BTE.dtype)
        # Quotients of scores are taken from their logarithms: sigmoids of a token may all be 0 in float32.
        log_scores_BTE = logits_BTE if moe.scores == "softmax" else F.logsigmoid(logits_BTE)
        probabilities_BTE = log_scores_BTE.softmax(-1)
        scores_BTE = probabilities_BTE if moe.scores == "softmax" else log_scores_BTE.exp()
        choices_BTK = choose(scores_BTE.detach(), self.bias, moe)
        if moe.normalize:
            weights_BTK = log_scores_BTE.gather(-1, choices_BTK).softmax(-1) * moe.scale
        else:
            weights_BTK = scores_BTE.gather(-1, choices_BTK) * moe.scale
        whole_BTK = choices_BTK
        if limited or (moe.sequence_loss and pressure is not None):
            whole_BTK = self.sequences.whole_sequences(choices_BTK)
        kept_BTK = within_capacity(whole_BTK, moe)[:, positions_T] if limited else None
        if pressure is not None:
            loss = self._balance_loss(logits_BTE, probabilities_BTE, whole_BTK)
            seen = self._count(choices_BTK, kept_BTK, probabilities_BTE.detach())
            weights_BTK = _pressed(weights_BTK, loss, pressure.weight, seen, self)
        kept_MK = None if kept_BTK is None else kept_BTK.flatten(0, 1)
        return Routing(choices_BTK.flatten(0, 1), weights_BTK.flatten(0, 1), kept_MK)

    def _balance_loss(self, logits_BTE: Tensor, probabilities_BTE: Tensor, whole_BTK: Tensor) -> Tensor:
        """Sum over the tokens here, so that all ranks and micro-batches together have the mean x tokens.

        A sequence's loads are of those who were chosen, with the bias where there is one: it is they who have the work,
        and where the bias has evened it out, nothing pushes scores any more. DeepSeek-AI 2024, V3, eq. 18 counts whom
        the scores alone would choose, which also pushes against what the bias is there to allow.
        """
        moe, loss = self.moe, logits_BTE.new_zeros(())
        if moe.sequence_loss:
            loads_BE = counted(whole_BTK, moe.num_experts).to(loss.dtype) * (moe.num_experts / whole_BTK[0].numel())
            loss = loss + moe.sequence_loss * (probabilities_BTE * loads_BE[:, None]).sum()
        if self.load is not None:
            loss = loss + moe.global_loss * (probabilities_BTE * self.load.to(loss.dtype)).sum()
        if moe.z_loss:
            loss = loss + moe.z_loss * logits_BTE.logsumexp(-1).square().sum()
        return loss

    def _count(self, choices_BTK: Tensor, kept_BTK: Tensor | None, probabilities_BTE: Tensor) -> Tensor:
        loads_E = counted(choices_BTK, self.moe.num_experts).sum(0).double()
        dropped = loads_E.new_zeros(()) if kept_BTK is None else (~kept_BTK).sum().double()
        entropy = torch.special.entr(probabilities_BTE).sum(dtype=torch.float64)
        tokens = loads_E.new_full((), choices_BTK.shape[0] * choices_BTK.shape[1])
        return torch.cat((loads_E, torch.stack((dropped, entropy, tokens))))


def _logits(x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
    return _Logits.apply(x_BTD, weight_ED)  # type: ignore[return-value]


class _Logits(torch.autograd.Function):
    """x @ weight.T in float32 at least, without keeping a wide copy of x for the backward."""

    @staticmethod
    def forward(ctx, x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_ED)
        return F.linear(_wide(x_BTD), _wide(weight_ED))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (grad_BTE,), (x_BTD, weight_ED) = grads, ctx.saved_tensors
        grad_weight = grad_BTE.flatten(0, 1).T @ _wide(x_BTD).flatten(0, 1)
        return (grad_BTE @ _wide(weight_ED)).type_as(x_BTD), grad_weight.type_as(weight_ED)


def _pressed(weights_BTK: Tensor, loss: Tensor, weight: Tensor, seen: Tensor, router: Router) -> Tensor:
    return _Press.apply(weights_BTK, loss, weight, seen, router)  # type: ignore[return-value]


class _Press(torch.autograd.Function):
    """Leaves the weights as they are; in the backward, which runs once for every micro-batch also where the forward is
    repeated, the balance loss gets its gradient and what was counted is added up."""

    @staticmethod
    def forward(ctx, weights_BTK: Tensor, loss: Tensor, weight: Tensor, seen: Tensor, router: Router):
        ctx.weight, ctx.seen, ctx.router = weight.to(loss.dtype), seen, router
        return weights_BTK.view_as(weights_BTK)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        router = ctx.router
        router.seen = ctx.seen if router.seen is None else router.seen + ctx.seen
        return grads[0], ctx.weight, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def choose(scores_BTE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
    """The experts of each token, best first: int64 [B, T, K]. Who wins among equals depends on the token's scores
    alone.

    Groups: a group is as good as the sum of its top_k / top_groups best (DeepSeek-AI 2024, V3, section 2.1.2).
    """
    ranked = scores_BTE if bias_E is None else scores_BTE + bias_E.to(scores_BTE.dtype)
    if moe.groups > 1:
        grouped_BTGE = ranked.unflatten(-1, (moe.groups, -1))
        best = max(moe.top_k // moe.top_groups, 1)
        chosen = grouped_BTGE.topk(best, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        open_BTG = torch.zeros_like(grouped_BTGE[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
        ranked = grouped_BTGE.masked_fill(~open_BTG[..., None], -torch.inf).flatten(-2)
    return ranked.topk(moe.top_k, dim=-1).indices


def counted(choices_BTK: Tensor, experts: int) -> Tensor:
    """How many assignments each expert has in each sequence: int64 [B, E]."""
    flat = choices_BTK.flatten(1)
    return flat.new_zeros(len(flat), experts).scatter_add_(1, flat, torch.ones_like(flat))


def within_capacity(choices_BTK: Tensor, moe: Moe) -> Tensor:
    """Which assignments of whole sequences are kept: bool [B, T, K]. First choices go before second ones, then earlier
    tokens before later ones (Lepikhin et al. 2020, algorithm 1)."""
    batch, tokens, top_k = choices_BTK.shape
    by_priority = choices_BTK.transpose(1, 2).reshape(batch, -1)  # [B, K x T]
    order = by_priority.argsort(dim=-1, stable=True)
    counts_BE = counted(choices_BTK, moe.num_experts)
    starts_BE = counts_BE.cumsum(-1) - counts_BE
    place = torch.arange(order.shape[1], device=order.device) - starts_BE.gather(1, by_priority.gather(1, order))
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, place < moe.capacity(tokens))
    return kept.view(batch, top_k, tokens).transpose(1, 2)


def normal_noise(keys_B: Tensor, positions_T: Tensor, layer: int, experts: int) -> Tensor:
    """Standard normal float64 [B, T, E], a pure function of (key, position, layer, expert): the same on every layout,
    and when a block is computed again. Counters are mixed by SplitMix64 (Steele et al. 2014)."""
    columns = torch.arange(experts, device=keys_B.device) + layer * experts
    mixed = _mix(_mix(_mix(keys_B)[:, None] + positions_T[None, :])[:, :, None] + columns)
    # The middles of 2^52 equal parts of (0, 1): with one bit more the last of them rounds to 1, whose normal is inf.
    uniform = _shifted(mixed, 12).double() * 2.0**-52 + 2.0**-53
    return torch.special.ndtri(uniform)


def _mix(x: Tensor) -> Tensor:
    """int64, which wraps around as unsigned numbers do."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits of unsigned numbers: `>>` repeats the sign, so it is masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
