"""The router: which experts a token goes to, and the losses that balance experts.

The choice depends on one token alone, and with a capacity on one sequence. So it does not depend on how a batch is
divided into micro-batches and ranks. Logits and scores are float32 or wider (Fedus et al. 2021, sec. 2.4).

A capacity acts in training only. Room for an early token's second choice depends on the first choices of later tokens
and on the length of the text. A score of held-out text would use tokens that come later, and generated text has no
later tokens yet.

Shape letters: B batch, T tokens, M = B x T, D d_model, E experts, G groups of experts, K experts of a token.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.schema.arch import Arch, Moe
from ingot.trainer.torch_private import WideBuffers


@dataclass(frozen=True)
class RouterLoss:
    """The inputs of a router in a training step. Without them, there is no capacity limit, noise or balance loss.

    keys_B: int64, one key per sequence of the micro-batch, different for every sequence of the run; the noise is a
      function of the key.
    weight: the factor of one token's nats in the minimized loss; a scalar tensor.
    """

    keys_B: Tensor
    weight: Tensor


class SequenceGather(Protocol):
    """The exchange between ranks that hold parts of the same sequences."""

    def whole_sequences(self, per_token_BTK: Tensor) -> Tensor:
        """Gather the values of every rank's tokens into whole sequences, in order of position. Collective over the
        ranks that share sequences."""
        ...


@dataclass(frozen=True)
class Routing:
    """The router's decision for every token.

    experts_MK: int64, best first. weights_MK: float32 or wider; differentiable. kept_MK: False where an expert had no
    room for the token; None if no capacity acts. experts: the number of experts to choose from. most_rows: the largest
    number of tokens here that one expert can keep. even_rows: the same if each rank used its even part of a capacity
    that ranks share.
    """

    experts_MK: Tensor
    weights_MK: Tensor
    kept_MK: Tensor | None
    experts: int
    most_rows: int
    even_rows: float


class Router(WideBuffers):
    """The router of one layer. (A bias rounded to bfloat16 would choose other experts, hence WideBuffers.)

    bias: [E], added to scores by loss-free balancing. load: [E], each expert's share of the assignments of the previous
    step, times E. Both are buffers, float32 (float64 in a float64 model); None if `arch.moe` does not use them.
    seen: sums over the backwards of this step so far, float64 [E + 3]: assignments per expert, dropped assignments,
    entropy of the scores (nats) summed over tokens, number of tokens. parallel/balance.py reads and clears the sums.
    """

    bias: Tensor | None
    load: Tensor | None
    seen: Tensor | None

    def __init__(self, arch: Arch, layer: int, sequences: SequenceGather):
        super().__init__()
        self.moe, self.layer, self.sequences = arch.moe, layer, sequences
        self.weight = nn.Parameter(torch.empty(arch.moe.num_experts, arch.d_model))
        self.register_buffer("bias", torch.zeros(arch.moe.num_experts) if arch.moe.bias_rate else None)
        self.register_buffer("load", torch.ones(arch.moe.num_experts) if arch.moe.global_loss else None)
        self.seen = None

    def forward(self, x_BTD: Tensor, positions_T: Tensor, router_loss: RouterLoss | None) -> Routing:
        """Choose experts for every token of x_BTD. positions_T: the positions of these tokens."""
        moe = self.moe
        limited = router_loss is not None and moe.capacity_factor > 0
        logits_BTE = _logits(x_BTD, self.weight)
        if router_loss is not None and moe.noise:
            noise_BTE = normal_noise(router_loss.keys_B, positions_T, self.layer, moe.num_experts)
            logits_BTE = logits_BTE + moe.noise * noise_BTE.to(logits_BTE.dtype)
        # Quotients of scores are computed from their logarithms: all sigmoids of a token may be 0 in float32.
        log_scores_BTE = logits_BTE if moe.scores == "softmax" else F.logsigmoid(logits_BTE)
        probabilities_BTE = log_scores_BTE.softmax(-1)
        scores_BTE = probabilities_BTE if moe.scores == "softmax" else log_scores_BTE.exp()
        choices_BTK = choose(scores_BTE.detach(), self.bias, moe)
        if moe.normalize:
            weights_BTK = log_scores_BTE.gather(-1, choices_BTK).softmax(-1) * moe.scale
        else:
            weights_BTK = scores_BTE.gather(-1, choices_BTK) * moe.scale
        whole_BTK = choices_BTK
        if limited or (moe.sequence_loss and router_loss is not None):
            whole_BTK = self.sequences.whole_sequences(choices_BTK)
        kept_BTK = within_capacity(whole_BTK, moe)[:, positions_T] if limited else None
        if router_loss is not None:
            loss = self._balance_loss(logits_BTE, probabilities_BTE, whole_BTK)
            seen = self._count(choices_BTK, kept_BTK, probabilities_BTE.detach())
            weights_BTK = _attach_loss(weights_BTK, loss, router_loss.weight, seen, self)
        kept_MK = None if kept_BTK is None else kept_BTK.flatten(0, 1)
        batch, tokens, _ = choices_BTK.shape
        whole, even, most = whole_BTK.shape[1], tokens, tokens
        if limited:
            most, even = min(moe.capacity(whole), tokens), moe.capacity(whole) * tokens / whole
        chosen_MK, weights_MK = choices_BTK.flatten(0, 1), weights_BTK.flatten(0, 1)
        return Routing(chosen_MK, weights_MK, kept_MK, moe.num_experts, batch * most, batch * even)

    def _balance_loss(self, logits_BTE: Tensor, probabilities_BTE: Tensor, whole_BTK: Tensor) -> Tensor:
        """Return the sum of the balance losses over the tokens here. Over all ranks and micro-batches these sums add up
        to the mean loss times the number of tokens.

        A sequence's loads count the chosen experts, including the effect of the bias: these experts do the work, and
        once the bias has evened the loads out, the loss no longer moves the scores. DeepSeek-AI 2024, V3, eq. 18 counts
        the experts that the scores alone would choose, which also works against the differences that the bias allows.
        """
        moe, loss = self.moe, logits_BTE.new_zeros(())
        if moe.sequence_loss:
            loads_BE = expert_loads(whole_BTK, moe.num_experts).to(loss.dtype)
            loads_BE = loads_BE * (moe.num_experts / whole_BTK[0].numel())
            loss = loss + moe.sequence_loss * (probabilities_BTE * loads_BE[:, None]).sum()
        if self.load is not None:
            loss = loss + moe.global_loss * (probabilities_BTE * self.load.to(loss.dtype)).sum()
        if moe.z_loss:
            loss = loss + moe.z_loss * logits_BTE.logsumexp(-1).square().sum()
        return loss

    def _count(self, choices_BTK: Tensor, kept_BTK: Tensor | None, probabilities_BTE: Tensor) -> Tensor:
        """Return the sums that one backward adds to `seen`."""
        loads_E = expert_loads(choices_BTK, self.moe.num_experts).sum(0).double()
        dropped = loads_E.new_zeros(()) if kept_BTK is None else (~kept_BTK).sum().double()
        entropy = torch.special.entr(probabilities_BTE).sum(dtype=torch.float64)
        tokens = loads_E.new_full((), choices_BTK.shape[0] * choices_BTK.shape[1])
        return torch.cat((loads_E, torch.stack((dropped, entropy, tokens))))


def _logits(x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
    return _Logits.apply(x_BTD, weight_ED)


class _Logits(torch.autograd.Function):
    """The product x @ weight.T in float32 or wider, without a wide copy of x kept for the backward."""

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


def _attach_loss(weights_BTK: Tensor, loss: Tensor, weight: Tensor, seen: Tensor, router: Router) -> Tensor:
    return _AttachLoss.apply(weights_BTK, loss, weight, seen, router)


class _AttachLoss(torch.autograd.Function):
    """The identity on the routing weights. Its backward gives the balance loss its gradient and adds to `seen`.

    The backward runs once per micro-batch, even if recompute repeats the forward.
    """

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
    """Choose the experts of each token, best first: int64 [B, T, K].

    The order of equal scores depends only on the scores of the same token. The score of a group is the sum of its
    top_k / top_groups best scores (DeepSeek-AI 2024, V3, section 2.1.2).
    """
    ranked = scores_BTE if bias_E is None else scores_BTE + bias_E.to(scores_BTE.dtype)
    if moe.groups > 1:
        grouped_BTGE = ranked.unflatten(-1, (moe.groups, -1))
        best = max(moe.top_k // moe.top_groups, 1)
        chosen = grouped_BTGE.topk(best, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        open_BTG = torch.zeros_like(grouped_BTGE[..., 0], dtype=torch.bool).scatter_(-1, chosen, True)
        ranked = grouped_BTGE.masked_fill(~open_BTG[..., None], -torch.inf).flatten(-2)
    return ranked.topk(moe.top_k, dim=-1).indices


def expert_loads(choices_BTK: Tensor, experts: int) -> Tensor:
    """Return the number of assignments of each expert in each sequence: int64 [B, E]."""
    flat = choices_BTK.flatten(1)
    return flat.new_zeros(len(flat), experts).scatter_add_(1, flat, torch.ones_like(flat))


def within_capacity(choices_BTK: Tensor, moe: Moe) -> Tensor:
    """Return which assignments of whole sequences fit into the experts' capacity: bool [B, T, K].

    First choices go before second choices, then early tokens before late tokens (Lepikhin et al. 2020, algorithm 1).
    """
    batch, tokens, top_k = choices_BTK.shape
    by_priority = choices_BTK.transpose(1, 2).reshape(batch, -1)  # [B, K x T]
    order = by_priority.argsort(dim=-1, stable=True)
    counts_BE = expert_loads(choices_BTK, moe.num_experts)
    starts_BE = counts_BE.cumsum(-1) - counts_BE
    place = torch.arange(order.shape[1], device=order.device) - starts_BE.gather(1, by_priority.gather(1, order))
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, place < moe.capacity(tokens))
    return kept.view(batch, top_k, tokens).transpose(1, 2)


def normal_noise(keys_B: Tensor, positions_T: Tensor, layer: int, experts: int) -> Tensor:
    """Return standard normal noise, float64 [B, T, E], a pure function of (key, position, layer, expert).

    The noise is therefore the same on every layout and in a recomputed block. SplitMix64 mixes the counters (Steele et
    al. 2014).
    """
    columns = torch.arange(experts, device=keys_B.device) + layer * experts
    mixed = _mix(_mix(_mix(keys_B)[:, None] + positions_T[None, :])[:, :, None] + columns)
    # The middles of 2^52 equal parts of (0, 1). With 2^53 parts the last middle would round to 1, whose normal is inf.
    uniform = _shift_right(mixed, 12).double() * 2.0**-52 + 2.0**-53
    return torch.special.ndtri(uniform)


def _mix(x: Tensor) -> Tensor:
    """Apply one round of SplitMix64 to int64 numbers, whose overflow wraps around as in unsigned arithmetic."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 `x`: `>>` repeats the sign bit, so mask the repeated bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
