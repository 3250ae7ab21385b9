"""The number of parameters of a model, in total, by part and per token, and the bytes of training state per parameter.

Shape letters: V vocab_size, D d_model, L num_layers, N num_heads, G num_kv_heads, H head_dim, F width of a
  feed-forward, E experts.

State per parameter between two optimizer steps (Rajbhandari et al. 2020, section 3.1). AdamW in mixed precision needs 2
B for the copy used in computation, g B for its gradient (2 in bf16, 4 in fp32), 4 B for the float32 master and 8 B for
two moments: 16 B, or 18 B with fp32 gradients. N ranks share one copy of a parameter: N = dp_shard x cp, and for routed
experts dp_shard x cp x tp / ep.

    DDP (N = 1)   2 + g + 12      16 or 18
    ZeRO-1        2 + g + 12/N    4 + 12/N or 6 + 12/N     master and moments are split
    ZeRO-2        2 + (g + 12)/N  2 + 14/N or 2 + 16/N     gradients too
    ZeRO-3        16/N            no copy besides the float32 shards, whose gradients are float32 too

In fp32 and fp64 the computation uses the master of s = 4 or 8 B itself: no copy, gradients s, moments 2s.
"""

from dataclasses import dataclass

from ingot.plugins.layers import extra_attention_matrices, feed_forward_of, norm_vectors, stream_norms
from ingot.schema.arch import Arch
from ingot.schema.parallel import Parallel


def block_attention_parameters(arch: Arch) -> int:
    """Return the parameters of one attention: q [N·H, D], k and v [G·H, D] each, o [D, N·H]; or those of
    latent attention, its down and up matrices."""
    extra = sum(rows * columns for rows, columns in extra_attention_matrices(arch))
    if arch.is_mla:
        return latent_down_parameters(arch) + latent_up_parameters(arch) + extra
    return 2 * arch.d_model * arch.head_dim * (arch.num_heads + arch.num_kv_heads) + extra


def latent_down_parameters(arch: Arch) -> int:
    """Return the parameters of the matrices that project a token to the latents: q_down [q_rank, D] and kv_down
    [kv_rank + rope_dim, D], which also gives the rotary part of keys. All heads share the latents.

    Source: DeepSeek-AI 2024, V2, section 2.1; model/attention.py.
    """
    return arch.d_model * (arch.mla.q_rank + arch.mla.kv_rank + arch.mla.rope_dim)


def latent_up_parameters(arch: Arch) -> int:
    """Return the parameters of those matrices of latent attention that tensor parallelism divides by heads.

    They are q_up [N·H, q_rank], or q [N·H, D] if queries have no latent; kv_up [N·(nope_dim + v_dim), kv_rank]; o [D,
    N·v_dim].
    """
    mla = arch.mla
    queries = arch.head_dim * (mla.q_rank or arch.d_model)
    return arch.num_heads * (queries + (mla.nope_dim + mla.v_dim) * mla.kv_rank + mla.v_dim * arch.d_model)


def value_width(arch: Arch) -> int:
    """Return the width of one head's values, which is also the width of its output."""
    return arch.mla.v_dim if arch.is_mla else arch.head_dim


def feed_forward_parameters(arch: Arch, width: int) -> int:
    """Return the parameters of one feed-forward: gate and up [F, D], down [D, F] (SwiGLU, Shazeer 2020); with GELU
    there is no gate.
    """
    return feed_forward_of(arch).matrices * arch.d_model * width


def block_mlp_parameters(arch: Arch) -> int:
    """Return the feed-forward parameters of a block without experts."""
    return feed_forward_parameters(arch, arch.d_ffn)


def router_parameters(arch: Arch) -> int:
    """Return the parameters of one router, [E, D]. The bias of loss-free balancing has no gradient and is not
    counted.
    """
    return arch.moe.num_experts * arch.d_model


def expert_parameters(arch: Arch) -> int:
    """Return the parameters of one routed expert; the dense expert for overflow (moe.overflow) has as many."""
    return feed_forward_parameters(arch, arch.moe.d_expert)


def shared_parameters(arch: Arch) -> int:
    """Return the parameters of the shared experts of one block, which are one feed-forward of their summed width."""
    return feed_forward_parameters(arch, arch.moe.shared_experts * arch.moe.d_expert)


def block_moe_parameters(arch: Arch) -> int:
    """Return the parameters of a block's mixture: router, routed and shared experts, and the expert for overflow."""
    experts = arch.moe.num_experts + arch.moe.has_fallback
    return router_parameters(arch) + experts * expert_parameters(arch) + shared_parameters(arch)


def block_active_moe_parameters(arch: Arch) -> int:
    """Return the parameters of a block's mixture that one token uses: router, top_k experts and shared experts.

    The expert for overflow replaces one of the top_k experts, so it is not counted.
    """
    return router_parameters(arch) + arch.moe.top_k * expert_parameters(arch) + shared_parameters(arch)


def block_norm_parameters(arch: Arch) -> int:
    """Return the number of norm weights of a block: those of the residual stream; with QK-norm also one [H] for queries
    and one [H] for keys; with latent attention also one of the width of each latent.
    """
    heads = 2 * arch.head_dim if arch.qk_norm else 0
    return stream_norm_parameters(arch) + heads + (arch.mla.q_rank + arch.mla.kv_rank if arch.is_mla else 0)


def stream_norm_parameters(arch: Arch) -> int:
    """Return the number of weights of a block's norms of the residual stream."""
    return stream_norms(arch) * last_norm_parameters(arch)


def last_norm_parameters(arch: Arch) -> int:
    """Return the number of weights of one norm of the residual stream, such as the last one."""
    return norm_vectors(arch) * arch.d_model


def parameters_by_part(arch: Arch) -> dict[str, int]:
    """Return the number of parameters by part; the parts sum to `count_parameters`.

    The key "experts" (with routers) exists only if some block has experts. "head" is 0 if it shares the embedding's
    matrix.
    """
    embedding, sparse = arch.vocab_size * arch.d_model, len(arch.expert_layers)
    return {
        "embedding": embedding,
        "attention": arch.num_layers * block_attention_parameters(arch),
        "mlp": (arch.num_layers - sparse) * block_mlp_parameters(arch),
        **({"experts": sparse * block_moe_parameters(arch)} if sparse else {}),
        "norms": arch.num_layers * block_norm_parameters(arch) + last_norm_parameters(arch),
        "head": 0 if arch.tied_embeddings else embedding,
    }


def count_parameters(arch: Arch) -> int:
    """Return the number of trainable parameters; a matrix shared by embedding and head counts once."""
    return sum(parameters_by_part(arch).values())


def count_active_parameters(arch: Arch, *, embedding: bool = True) -> int:
    """Return the number of parameters that take part in one token's forward: all parameters of a dense model.

    embedding: count the embedding's matrix, of which a token uses one row. Mistral (Mixtral-8x7B: 12.9B) and Qwen
    (Qwen3-30B-A3B: 3.3B) count it; DeepSeek (V3: 37B) does not. A tied matrix is always counted, because the head uses
    it.
    """
    idle = len(arch.expert_layers) * (block_moe_parameters(arch) - block_active_moe_parameters(arch))
    looked_up = 0 if embedding or arch.tied_embeddings else arch.vocab_size * arch.d_model
    return count_parameters(arch) - idle - looked_up


def active_block_matrices(arch: Arch) -> int:
    """Return the number of matrix parameters in all blocks that a token is multiplied with; norms are left out."""
    sparse = len(arch.expert_layers)
    dense = (arch.num_layers - sparse) * block_mlp_parameters(arch)
    return arch.num_layers * block_attention_parameters(arch) + dense + sparse * block_active_moe_parameters(arch)


def count_matrix_parameters(arch: Arch) -> int:
    """Return the number of matrix parameters that a token is multiplied with: attention, feed-forward or chosen
    experts, and head.

    The embedding look-up is not a multiplication; a tied matrix counts once, for its use as head.
    """
    return active_block_matrices(arch) + arch.head_passes * arch.vocab_size * arch.d_model


ADAMW_MOMENTS = 2.0
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
STORED_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state per parameter on one rank. copy: the copy used in computation; 0 if the master itself is used."""

    copy: float
    gradient: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return self.copy + self.gradient + self.master + self.moments


def state_per_parameter(
    parallel: Parallel, precision: str, ranks: int = 0, moments: float = ADAMW_MOMENTS
) -> StateBytes:
    """Return the bytes of state per parameter on the device, for a resolved layout (theory/layout.py).

    ranks: N of the table at the top of this module; 0: the N of all parameters except routed experts. moments: state
    tensors of the optimizer per parameter (theory/update.py).
    With `offload`, moments are in host memory or files and count 0; the masters stay on the device. With
    `offload_parameters` the shards and their gradients are on the host too.
    """
    e, s, n = COMPUTE_BYTES[precision], STORED_BYTES[precision], ranks or parallel.shard_ranks
    g, kept = kept_gradient_bytes(parallel, precision), 0.0 if parallel.offload != "none" else moments * s / n
    if parallel.zero == 3:
        return StateBytes(0.0, 0.0, 0.0, 0.0) if parallel.offload_parameters else StateBytes(0.0, s / n, s / n, kept)
    gradient = g / n if parallel.zero == 2 else g
    return StateBytes(e, gradient, s / n, kept) if e != s else StateBytes(0.0, gradient, s, kept)


def kept_gradient_bytes(parallel: Parallel, precision: str) -> int:
    """Return the bytes per number of a gradient that is kept between micro-batches. FSDP2 (zero 3) keeps shards in the
    dtype of the master.
    """
    return STORED_BYTES[precision] if parallel.zero == 3 else sent_gradient_bytes(parallel, precision)


def sent_gradient_bytes(parallel: Parallel, precision: str) -> int:
    """Return the bytes per number of a gradient while data-parallel ranks reduce it."""
    return 2 if parallel.grads == "bf16" else STORED_BYTES[precision]
