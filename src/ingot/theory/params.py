"""How many parameters a model has, in all and by part, and how many of them a token meets.

Shape letters: V vocab_size, D d_model, L num_layers, N num_heads, G num_kv_heads, H head_dim, F width of a
feed-forward, E experts.
"""

from ingot.schema.arch import Arch


def block_attention_parameters(arch: Arch) -> int:
    """Matrices of one attention: q [N·H, D], k and v [G·H, D] each, o [D, N·H]; or those of latent attention."""
    if arch.is_mla:
        return latent_down_parameters(arch) + latent_up_parameters(arch)
    return 2 * arch.d_model * arch.head_dim * (arch.num_heads + arch.num_kv_heads)


def latent_down_parameters(arch: Arch) -> int:
    """From tokens to what all heads share (DeepSeek-AI 2024, V2, section 2.1; model/latent.py): q_down [q_rank, D], and
    kv_down [kv_rank + rope_dim, D], which makes the rotated part of keys as well."""
    return arch.d_model * (arch.mla.q_rank + arch.mla.kv_rank + arch.mla.rope_dim)


def latent_up_parameters(arch: Arch) -> int:
    """By heads: q_up [N·H, q_rank], or q [N·H, D] without a latent of queries; kv_up
    [N·(nope_dim + v_dim), kv_rank]; o [D, N·v_dim]."""
    mla = arch.mla
    queries = arch.head_dim * (mla.q_rank or arch.d_model)
    return arch.num_heads * (queries + (mla.nope_dim + mla.v_dim) * mla.kv_rank + mla.v_dim * arch.d_model)


def value_width(arch: Arch) -> int:
    """Of one head's values, and so of its output."""
    return arch.mla.v_dim if arch.is_mla else arch.head_dim


def feed_forward_parameters(arch: Arch, width: int) -> int:
    """Matrices of one SwiGLU feed-forward: gate and up [F, D], down [D, F] (Shazeer 2020); of GELU's two."""
    return arch.ffn_matrices * arch.d_model * width


def block_mlp_parameters(arch: Arch) -> int:
    """Of a block without experts."""
    return feed_forward_parameters(arch, arch.d_ffn)


def router_parameters(arch: Arch) -> int:
    """One row [D] for each expert. The bias of loss-free balancing is no parameter: no gradient trains it."""
    return arch.moe.num_experts * arch.d_model


def expert_parameters(arch: Arch) -> int:
    """Of one routed expert, and of the dense one that takes overflow."""
    return feed_forward_parameters(arch, arch.moe.d_expert)


def shared_parameters(arch: Arch) -> int:
    """Of the shared experts of one block, which are one feed-forward of their common width."""
    return feed_forward_parameters(arch, arch.moe.shared_experts * arch.moe.d_expert)


def block_moe_parameters(arch: Arch) -> int:
    """Of a block with experts: router, routed and shared experts, and the one for overflow."""
    experts = arch.moe.num_experts + arch.moe.has_fallback
    return router_parameters(arch) + experts * expert_parameters(arch) + shared_parameters(arch)


def block_active_moe_parameters(arch: Arch) -> int:
    """Those that a token of such a block is multiplied with: router, its top_k experts and the shared ones. The expert
    for overflow stands in for one of them, so it is not counted."""
    return router_parameters(arch) + arch.moe.top_k * expert_parameters(arch) + shared_parameters(arch)


def block_norm_parameters(arch: Arch) -> int:
    """Two RMSNorm weights [D]; with QK-norm one weight [H] for queries and one for keys; of latent attention one for
    each latent."""
    heads = 2 * arch.head_dim if arch.qk_norm else 0
    return 2 * arch.d_model + heads + (arch.mla.q_rank + arch.mla.kv_rank if arch.is_mla else 0)


def parameters_by_part(arch: Arch) -> dict[str, int]:
    """Parts sum to `count_parameters`. "experts" (with their routers) is there where a block has some. "head" is 0 when
    it shares the embedding's matrix."""
    embedding, sparse = arch.vocab_size * arch.d_model, len(arch.expert_layers)
    return {
        "embedding": embedding,
        "attention": arch.num_layers * block_attention_parameters(arch),
        "mlp": (arch.num_layers - sparse) * block_mlp_parameters(arch),
        **({"experts": sparse * block_moe_parameters(arch)} if sparse else {}),
        "norms": arch.num_layers * block_norm_parameters(arch) + arch.d_model,
        "head": 0 if arch.tied_embeddings else embedding,
    }


def count_parameters(arch: Arch) -> int:
    """All trainable parameters; a matrix shared by embedding and head counts once."""
    return sum(parameters_by_part(arch).values())


def count_active_parameters(arch: Arch, *, embedding: bool = True) -> int:
    """Those that take part in one token's forward: all of a dense model.

    Publishers differ in the embedding, of which a token takes one row: Mistral (Mixtral-8x7B: 12.9B) and Qwen
    (Qwen3-30B-A3B: 3.3B) count its matrix, DeepSeek's 37B of V3 are without it. embedding: count it; a tied matrix
    stays, for its use as head.
    """
    idle = len(arch.expert_layers) * (block_moe_parameters(arch) - block_active_moe_parameters(arch))
    looked_up = 0 if embedding or arch.tied_embeddings else arch.vocab_size * arch.d_model
    return count_parameters(arch) - idle - looked_up


def active_block_matrices(arch: Arch) -> int:
    """Parameters of all blocks that a token is multiplied with."""
    sparse = len(arch.expert_layers)
    dense = (arch.num_layers - sparse) * block_mlp_parameters(arch)
    return arch.num_layers * block_attention_parameters(arch) + dense + sparse * block_active_moe_parameters(arch)


def count_matrix_parameters(arch: Arch) -> int:
    """Parameters that a token is multiplied with: attention, feed-forward (of experts: its own) and head matrices.

    The embedding look-up is no multiplication; a tied matrix counts once, for its use as head.
    """
    return active_block_matrices(arch) + arch.head_passes * arch.vocab_size * arch.d_model
