"""The shape of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A decoder-only transformer of the Llama kind: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

    Shape letters used in the code: B batch, T tokens, D d_model, N num_heads, G num_kv_heads, H head_dim, F d_ffn,
    V vocab_size.
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
