"""The shape of a model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, ClassVar, Literal

from ingot.ranges import (
    Count,
    Experts,
    Factor,
    Heads,
    Layers,
    Positive,
    PositiveExperts,
    PositiveLayers,
    PositiveWidth,
    Steps,
    Tokens,
    Vocabulary,
    Width,
)

Problems = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the feed-forward (Shazeer et al. 2017); num_experts = 0: a dense model.

    top_k: experts per token. d_expert: width of each expert. shared_experts: every token also passes through a
      feed-forward of width shared_experts x d_expert. first_dense: number of blocks before the first with experts.
    scores: function of the router's logits that gives a token's scores for the experts. normalize: the weights of a
      token's experts sum to 1, before they are multiplied by `scale`.
    groups, top_groups: experts form `groups` equal groups (one per node, for example), and a token's experts are taken
      from the `top_groups` groups whose top_k / top_groups best scores have the highest sum (DeepSeek-AI 2024, V3,
      section 2.1.2).
    noise: standard deviation of normal noise added to the logits in training (Shazeer et al. 2017, eq. 4, with the same
      deviation for all experts).
    capacity_factor: an expert takes at most ceil(capacity_factor x top_k x seq_len / num_experts) tokens of each
      sequence, first choices before second choices, early tokens before late tokens; 0: all (dropless). The limit
      applies only in training: held-out and generated text goes to all chosen experts (model/routing.py explains why).
    overflow: "drop": a token beyond the capacity skips this expert, and the weights of its other experts do not change
      (Fedus et al. 2021, section 2.2). "fallback": it passes through one dense expert instead.
    sequence_loss, global_loss: weights of two load-balancing losses (Fedus et al. 2021, eq. 4; for top_k experts
      DeepSeek-AI 2024, V3, eq. 17-20): on the loads of each sequence, and on those of the previous step's whole batch
      (Qiu et al. 2025 take the batch of the same step). With equal loads, each loss equals its weight. Loads count the
      experts that were really chosen, with their biases (V3, eq. 18 counts the choices without biases).
    z_loss: weight of mean logsumexp^2 (Zoph et al. 2022, eq. 5).
    bias_rate: the amount by which a step changes an expert's bias (loss-free balancing, Wang et al. 2024). Biases only
      affect which experts are chosen. bias_steps: number of steps from the start of the run in which biases change;
      after that they stay constant (V3, section 4.2, has a rate of 0 in its last 500B tokens); 0: all steps.
    """

    num_experts: Experts = 0
    top_k: PositiveExperts = 2
    d_expert: Width = 0
    shared_experts: Experts = 0
    first_dense: Layers = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: Positive = 1.0
    groups: PositiveExperts = 1
    top_groups: PositiveExperts = 1
    noise: Factor = 0.0
    capacity_factor: Factor = 0.0
    overflow: Literal["drop", "fallback"] = "drop"
    sequence_loss: Factor = 0.0
    global_loss: Factor = 0.0
    z_loss: Factor = 0.0
    bias_rate: Factor = 0.0
    bias_steps: Steps = 0

    @property
    def has_fallback(self) -> bool:
        return self.capacity_factor > 0 and self.overflow == "fallback"

    def capacity(self, seq_len: int) -> int:
        """Return how many tokens of one sequence an expert takes. The product is computed exactly: 1.1 x 2 x 80 / 8 is
        22, where floats give slightly more and would round up to 23.
        """
        return math.ceil(Fraction(str(self.capacity_factor)) * self.top_k * seq_len / self.num_experts)

    def problems(self) -> Problems:
        if self.num_experts == 0:
            for name, value in _changed(self):
                found = f"{value!r} has no effect without experts"
                yield name, f"{found}; set model.moe.num_experts to 2 or more, or remove it"
            return
        low = list(self._below_least())
        yield from low
        if not low:
            yield from self._choice_problems()
            yield from self._capacity_problems()

    def _below_least(self) -> Problems:
        if self.num_experts < 2:
            yield "num_experts", f"is {self.num_experts}, must be at least 2, or 0 for a dense model"
        if self.bias_steps and not self.bias_rate:
            yield "bias_steps", f"{self.bias_steps} has no effect without biases; set bias_rate, or remove it"

    def _choice_problems(self) -> Problems:
        experts, top_k, groups = self.num_experts, self.top_k, self.groups
        if top_k > experts:
            yield "top_k", f"{top_k} experts per token are more than the {experts} there are; use 1 to {experts}"
        if top_k == 1 and self.normalize:
            found = "is true with top_k = 1: the weight is always 1, and the router learns nothing from the loss"
            yield "normalize", f"{found}; set it to false, or top_k to 2 or more"
        if top_k == experts:
            for name in ("groups", "sequence_loss", "global_loss", "bias_rate"):
                if (value := getattr(self, name)) != getattr(Moe, name):
                    found = f"{value!r}, but every token goes to all {experts} experts: there is nothing to balance"
                    yield name, f"{found}; lower top_k, or remove it"
        if experts % groups or groups == experts:
            legal = [n for n in range(1, experts // 2 + 1) if experts % n == 0]
            yield "groups", f"{experts} experts cannot form {groups} equal groups of at least 2; use one of {legal}"
        elif groups == 1 and self.top_groups > 1:
            yield "top_groups", f"{self.top_groups} has no effect without groups; set groups, or remove it"
        elif groups > 1:
            least = -(-top_k // (experts // groups))
            if not least <= self.top_groups < groups:
                rule = f"a token's {top_k} experts must fit into fewer than all {groups} groups of {experts // groups}"
                legal = f"use {least} to {groups - 1}" if least < groups else "use fewer groups"
                yield "top_groups", f"is {self.top_groups}; {rule}; {legal}"

    def _capacity_problems(self) -> Problems:
        if not self.capacity_factor:
            if self.overflow != "drop":
                found = f'"{self.overflow}", but experts take all tokens'
                yield "overflow", f"{found}; set capacity_factor, or remove it"
        elif self.capacity_factor * self.top_k >= self.num_experts:
            found = f"{self.capacity_factor:g} x top_k {self.top_k} / {self.num_experts} experts"
            rule = "an expert could take all tokens of a sequence, and none would ever overflow"
            yield "capacity_factor", f"{found} is 1 or more: {rule}; use less, or 0 for no limit"


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-AI 2024, V2, section 2.1); kv_rank = 0: ordinary attention.

    q_rank, kv_rank: widths of the latent of queries (0: none) and of the latent of keys and values.
    nope_dim, rope_dim: widths of the parts of a query or key head without and with rotary positions. Their sum is
      head_dim. All key heads of a token share the rotary part.
    v_dim: width of a value head, at most head_dim.
    """

    q_rank: Width = 0
    kv_rank: Width = 0
    nope_dim: Width = 0
    rope_dim: Width = 0
    v_dim: Width = 0

    def problems(self) -> Problems:
        if self.kv_rank == 0:
            for name, value in _changed(self):
                yield name, f"{value} has no effect without latent attention; set model.mla.kv_rank too, or remove it"
            return
        for name in ("kv_rank", "nope_dim", "rope_dim", "v_dim"):
            if (value := getattr(self, name)) < 1:
                yield name, f"is {value}; kv_rank, nope_dim, rope_dim and v_dim belong together, each at least 1"
        if self.rope_dim % 2:
            yield "rope_dim", f"is {self.rope_dim}; RoPE rotates pairs, so it must be even"
        if self.v_dim > self.nope_dim + self.rope_dim:
            found = f"{self.v_dim} is more than nope_dim + rope_dim = {self.nope_dim + self.rope_dim}"
            yield "v_dim", f"{found}; value heads are padded to that width, so use at most that"


def _changed(config: Any) -> Iterator[tuple[str, Any]]:
    """Return (name, value) of the settings that are not at their defaults."""
    pairs = ((f, getattr(config, f.name)) for f in fields(config))
    return ((f.name, value) for f, value in pairs if value != f.default)


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A decoder-only transformer of the Llama kind: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

    sliding_window: number of tokens that a token attends to, including itself; 0: all earlier tokens.
    logit_softcap: final logits are logit_softcap * tanh(logits / logit_softcap), between -logit_softcap and
      +logit_softcap (Gemma Team 2024, Gemma 2, section 2); 0: no cap.
    moe: experts in place of the feed-forward; d_ffn is then the feed-forward width of the blocks before the first block
      with experts.
    mla: latent attention in place of grouped-query attention.
    feed_forward, norm, attention, block: registered layers (plugins/layers.py), by default those above; a plug-in may
      register others. options: name of such a layer -> its settings.

    Shape letters used in the code: B batch, T tokens, D d_model, N num_heads, G num_kv_heads, H head_dim, F d_ffn, V
      vocab_size, E experts.
    """

    vocab_size: Vocabulary
    d_model: PositiveWidth
    num_layers: PositiveLayers
    num_heads: Heads
    num_kv_heads: Heads
    head_dim: PositiveWidth
    d_ffn: PositiveWidth
    max_seq_len: Tokens = 2048
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-5
    qk_norm: bool = False
    tied_embeddings: bool = True
    sliding_window: Count = 0
    logit_softcap: Factor = 0.0
    moe: Moe = field(default_factory=Moe)
    feed_forward: str = "swiglu"
    norm: str = "rms"
    attention: str = "grouped_query"
    block: str = "pre_norm"
    options: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    mla: Mla = field(default_factory=Mla)

    # Times that a token passes the head. Models of other systems, in the planner, may predict several tokens.
    head_passes: ClassVar[int] = 1

    @property
    def is_moe(self) -> bool:
        return self.moe.num_experts > 0

    def has_experts(self, layer: int) -> bool:
        return self.is_moe and layer >= self.moe.first_dense

    @property
    def expert_layers(self) -> range:
        """The indices of the blocks with experts."""
        return range(self.moe.first_dense, self.num_layers) if self.is_moe else range(0)

    @property
    def is_mla(self) -> bool:
        return self.mla.kv_rank > 0

    def problems(self) -> Problems:
        if self.num_heads % self.num_kv_heads:
            legal = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            yield "num_kv_heads", f"{self.num_kv_heads} does not divide num_heads={self.num_heads}; use one of {legal}"
        if self.head_dim % 2 and not self.is_mla:
            yield "head_dim", f"is {self.head_dim}; RoPE rotates pairs, so it must be even"
        if self.is_moe:
            yield from self._moe_problems()
        if self.is_mla:
            yield from self._mla_problems()

    def _moe_problems(self) -> Problems:
        moe = self.moe
        if moe.d_expert == 0:
            width = max(self.d_ffn // max(moe.top_k, 1), 1)
            why = f"d_ffn / top_k = {width}, which costs a token as much as a dense model's feed-forward"
            yield "moe.d_expert", f"is 0: the width of one expert, at least 1; for example {why}"
        if moe.first_dense >= self.num_layers > 0:
            found = f"{moe.first_dense} of {self.num_layers} blocks are dense, so none has experts"
            yield "moe.first_dense", f"{found}; use 0 to {self.num_layers - 1}, or remove model.moe"

    def _mla_problems(self) -> Problems:
        width = self.mla.nope_dim + self.mla.rope_dim
        if self.head_dim != width:
            yield "head_dim", f"is {self.head_dim}; with model.mla it is nope_dim + rope_dim = {width}"
        if self.num_kv_heads != self.num_heads:
            found = f"is {self.num_kv_heads}; latent attention has keys for every head"
            yield "num_kv_heads", f"{found}: use num_heads = {self.num_heads}"
        if self.qk_norm:
            yield "qk_norm", "is true, but latent attention normalizes its latents instead; set it to false"
