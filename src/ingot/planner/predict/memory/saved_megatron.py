"""Bytes per token that one block of Megatron's kind leaves for its backward (Korthikanti et al. 2022, sections 4, 5).

Table 2 there, of s tokens, b sequences, h d_model, a heads on t tensor-parallel ranks, in 16 bits:

    nothing cut                     s b h (34 + 5 a s / h)
    tensor parallelism              s b h (10 + 24 / t + 5 a s / (h t))
    and sequence parallelism        s b h (34 / t + 5 a s / (h t))
    attention core computed again   the same without 5 a s / (h t)
    all computed again              2 s b h

Here with its parts: shapes other than 4 h, grouped heads, SwiGLU, and flash attention, which keeps its output and one
number per query instead of scores. Inputs of regions are kept cut and gathered again, unlike ingot's.

Low-precision products keep their inputs as they read them, in 8 or 4 bits with scales (Transformer Engine), and
attention its output in 16 bits beside the one that the next matrix reads.
"""

from ingot.theory.layout import Position
from ingot.theory.params import value_width
from ingot.theory.state import COMPUTE_BYTES

_MASK_BYTES = 1
# Of one number of a matrix's input, with its share of the scales: of 128 in fp32, of 32 and of 16 in 8 bits.
_INPUT_BYTES = {"tensorwise": 1, "rowwise": 1, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def is_megatrons(position: Position) -> bool:
    """Whether the software's blocks are these, and not eager PyTorch's, which theory/saved.py counts."""
    software = position.software
    return software.core_recompute or software.attention == "unfused" or position.arch.ffn_matrices == 2


def megatron_block_bytes(position: Position, *, experts: bool = False) -> dict[str, float]:
    """Without recomputation of whole blocks. experts: of a block that has some."""
    arch, e, cut = position.arch, COMPUTE_BYTES[position.train.precision], position.sequence_ranks
    stream = arch.d_model * e / cut
    mask = arch.d_model * _MASK_BYTES / cut if position.software.dropout else 0.0
    read = 0.0 if position.software.parts_recomputed else arch.d_model * _input_bytes(position) / cut
    return {
        "attention norm": stream,
        "input of q, k, v": read,
        **_attention_bytes(position),
        "dropout behind attention": mask,
        "mlp norm": stream,
        "input of the feed-forward": stream if experts else read,  # a router reads 16 bits
        **(_expert_bytes(position) if experts else {"feed-forward": _inside(position, arch.d_ffn)}),
        "dropout behind the feed-forward": mask,
    }


def megatron_recomputed_bytes(position: Position, *, experts: bool = False) -> float:
    """With "full" recomputation a block's input; with "selective" all but the attention core."""
    arch, e = position.arch, COMPUTE_BYTES[position.train.precision]
    if position.parallel.recompute == "full":
        return arch.d_model * e / position.sequence_ranks
    saved = megatron_block_bytes(position, experts=experts)
    return sum(saved.values()) - saved.get("scores", 0.0)


def _input_bytes(position: Position) -> float:
    """Of one number that a matrix product reads, kept for the gradient of the matrix."""
    return _INPUT_BYTES.get(position.software.recipe, COMPUTE_BYTES[position.train.precision])


def _attention_bytes(position: Position) -> dict[str, float]:
    """q, k, v (or the latents that they are made of again), what the output matrix takes, and of unfused attention the
    softmax of its scores, with dropout its result and mask: 5 a s."""
    arch, software, e = position.arch, position.software, COMPUTE_BYTES[position.train.precision]
    heads = arch.num_heads / position.parallel.tp
    groups = max(arch.num_kv_heads / position.parallel.tp, 1)
    made = (heads * arch.head_dim + groups * (arch.head_dim + value_width(arch))) * e
    if arch.is_mla and software.parts_recomputed:
        made = float(arch.mla.q_rank + arch.mla.kv_rank + arch.mla.rope_dim) * e
    read = heads * value_width(arch) * _input_bytes(position) if software.recipe else 0.0
    saved = {"q, k, v": made, "attention out": heads * value_width(arch) * e + read}
    if software.attention != "unfused":
        return saved | {"log-sum-exp": heads * 4}
    per_score = 2 * e + _MASK_BYTES if software.dropout else e
    keys = position.train.seq_len / position.parallel.cp
    return saved | {"scores": heads * keys * per_score}


def _inside(position: Position, width: float) -> float:
    """Bytes inside of a feed-forward: the input of GELU, or gate and up; and what the matrix behind reads."""
    before = 1 if position.arch.ffn_matrices == 2 else 2
    after = 0.0 if position.software.parts_recomputed else _input_bytes(position)
    return width / position.parallel.tp * (before * COMPUTE_BYTES[position.train.precision] + after)


def _expert_bytes(position: Position) -> dict[str, float]:
    """Rows of experts, permuted, and what comes back, unless tuned kernels weigh rows inside of experts; shared
    experts; the router's scores in float32."""
    arch, moe, e = position.arch, position.arch.moe, COMPUTE_BYTES[position.train.precision]
    rows, tp = position.assignments / position.tokens, position.parallel.tp
    back = 0 if position.software.kernels == "tuned" else e
    return {
        "rows of experts": rows * arch.d_model * (_input_bytes(position) + back),
        "experts": rows * tp * _inside(position, moe.d_expert),  # an expert is on one rank, whole
        "shared experts": _inside(position, moe.shared_experts * moe.d_expert),
        "scores of the router": 2 * moe.num_experts * 4 / position.sequence_ranks,
    }
