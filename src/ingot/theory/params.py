"""How many parameters a model has, in all and by part.

Shape letters: V vocab_size, D d_model, L num_layers, N num_heads, G num_kv_heads, H head_dim, F d_ffn.
"""

from ingot.schema.arch import Arch


def block_attention_parameters(arch: Arch) -> int:
    """Matrices of one attention: q [N·H, D], k and v [G·H, D] each, o [D, N·H]."""
    return 2 * arch.d_model * arch.head_dim * (arch.num_heads + arch.num_kv_heads)


def block_mlp_parameters(arch: Arch) -> int:
    """Matrices of one SwiGLU feed-forward: gate and up [F, D], down [D, F] (Shazeer 2020)."""
    return 3 * arch.d_model * arch.d_ffn


def block_norm_parameters(arch: Arch) -> int:
    """Two RMSNorm weights [D], and with QK-norm one weight [H] for queries and one for keys."""
    return 2 * arch.d_model + (2 * arch.head_dim if arch.qk_norm else 0)


def block_parameters(arch: Arch) -> int:
    return block_attention_parameters(arch) + block_mlp_parameters(arch) + block_norm_parameters(arch)


def parameters_by_part(arch: Arch) -> dict[str, int]:
    """Parts sum to `count_parameters`. "head" is 0 when it shares the embedding's matrix."""
    embedding = arch.vocab_size * arch.d_model
    return {
        "embedding": embedding,
        "attention": arch.num_layers * block_attention_parameters(arch),
        "mlp": arch.num_layers * block_mlp_parameters(arch),
        "norms": arch.num_layers * block_norm_parameters(arch) + arch.d_model,
        "head": 0 if arch.tied_embeddings else embedding,
    }


def count_parameters(arch: Arch) -> int:
    """All trainable parameters; a matrix shared by embedding and head counts once."""
    return sum(parameters_by_part(arch).values())


def count_matrix_parameters(arch: Arch) -> int:
    """Parameters that a token is multiplied with: attention, feed-forward and head matrices.

    The embedding look-up is no multiplication; a tied matrix counts once, for its use as head.
    """
    per_block = block_attention_parameters(arch) + block_mlp_parameters(arch)
    return arch.num_layers * per_block + arch.vocab_size * arch.d_model
