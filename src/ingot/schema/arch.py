"""The shape of a model."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts in place of the feed-forward (Shazeer et al. 2017); num_experts = 0: a dense model.

    top_k: experts of each token. d_expert: width of each expert. shared_experts: every token passes through a
    feed-forward of shared_experts x d_expert as well. first_dense: blocks before the first one with experts.
    scores: of a token for the experts, softmax or sigmoid of the router's logits. normalize: the weights of a token's
      experts sum to 1, before they are multiplied by `scale`.
    groups, top_groups: experts lie in `groups` equal groups (of nodes), and a token's are taken from the `top_groups`
      whose top_k / top_groups best scores sum highest (DeepSeek-AI 2024, V3, section 2.1.2).
    noise: deviation of normal noise on the logits, in training (Shazeer et al. 2017, eq. 4, with one deviation).
    capacity_factor: an expert takes at most ceil(capacity_factor x top_k x seq_len / num_experts) tokens of each
      sequence, first choices before second ones, early tokens before late ones; 0: all (dropless).
    overflow: tokens beyond that lose this expert ("drop") or pass through one dense expert instead ("fallback").
    sequence_loss, global_loss: weights of load-balancing losses (Fedus et al. 2021, eq. 4), with the loads of each
      sequence, or of the whole batch of the step before. z_loss: weight of mean logsumexp^2 (Zoph et al. 2022, eq. 5).
    bias_rate: loss-free balancing: what a step adds to an expert's bias, which only decides who is chosen, or takes
      from it (Wang et al. 2024).
    """

    num_experts: int = 0
    top_k: int = 2
    d_expert: int = 0
    shared_experts: int = 0
    first_dense: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    noise: float = 0.0
    capacity_factor: float = 0.0
    overflow: Literal["drop", "fallback"] = "drop"
    sequence_loss: float = 0.0
    global_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @property
    def has_fallback(self) -> bool:
        return self.capacity_factor > 0 and self.overflow == "fallback"


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-AI 2024, V2, section 2.1); kv_rank = 0: ordinary attention.

    q_rank, kv_rank: widths of the latents of queries (0: none) and of keys and values. nope_dim, rope_dim: parts of a
    query's and key's head without and with rotary positions, the latter shared by all heads of a key; together they are
    head_dim. v_dim: width of a value's head.
    """

    q_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A decoder-only transformer of the Llama kind: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

    sliding_window: a token looks at that many tokens, itself among them; 0: at all before it.
    moe: experts in place of the feed-forward. mla: latent attention in place of grouped-query attention.

    Shape letters used in the code: B batch, T tokens, D d_model, N num_heads, G num_kv_heads, H head_dim, F d_ffn,
    V vocab_size, E experts.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ffn: int
    max_seq_len: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied_embeddings: bool = True
    sliding_window: int = 0
    moe: Moe = field(default_factory=Moe)
    mla: Mla = field(default_factory=Mla)

    @property
    def is_moe(self) -> bool:
        return self.moe.num_experts > 0

    def has_experts(self, layer: int) -> bool:
        return self.is_moe and layer >= self.moe.first_dense

    @property
    def expert_layers(self) -> range:
        """The numbers of the blocks with experts."""
        return range(self.moe.first_dense, self.num_layers) if self.is_moe else range(0)

    @property
    def is_mla(self) -> bool:
        return self.mla.kv_rank > 0

    def problems(self):
        sizes = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ffn", "max_seq_len")
        for name in sizes:
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"
        for name in ("rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                yield name, f"is {getattr(self, name)}, must be positive"
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            legal = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            yield "num_kv_heads", f"{self.num_kv_heads} does not divide num_heads={self.num_heads}; use one of {legal}"
        if self.head_dim % 2:
            yield "head_dim", f"is {self.head_dim}; RoPE rotates pairs, so it must be even"
        if self.sliding_window < 0:
            yield "sliding_window", f"is {self.sliding_window}, must be at least 0"
