"""Bytes per token that one block of Megatron's kind leaves for its backward (Korthikanti et al. 2022, sections 4, 5).

Table 2 there, of s tokens, b sequences, h d_model, a heads on t tensor-parallel ranks, in 16 bits:

    nothing cut                     s b h (34 + 5 a s / h)
    tensor parallelism              s b h (10 + 24 / t + 5 a s / (h t))
    and sequence parallelism        s b h (34 / t + 5 a s / (h t))
    attention core computed again   the same without 5 a s / (h t)
    all computed again              2 s b h

Here with its parts: shapes other than 4 h, grouped heads, SwiGLU, and flash attention, which keeps its output and one
number per query instead of scores. Inputs of regions are kept cut and gathered again, unlike ingot's.
"""

from ingot.schema.arch import Arch
from ingot.theory.layout import Position
from ingot.theory.params import value_width
from ingot.theory.state import COMPUTE_BYTES

_MASK_BYTES = 1


def is_megatrons(position: Position) -> bool:
    """Whether the software's blocks are these, and not eager PyTorch's, which theory/saved.py counts."""
    software = position.software
    return software.core_recompute or software.attention == "unfused" or position.arch.ffn_matrices == 2


def megatron_block_bytes(position: Position, *, experts: bool = False) -> dict[str, float]:
    """Without recomputation. experts: of a block that has some."""
    arch, e, cut = position.arch, COMPUTE_BYTES[position.train.precision], position.sequence_ranks
    stream = arch.d_model * e / cut
    mask = arch.d_model * _MASK_BYTES / cut if position.software.dropout else 0.0
    return {
        "attention norm": stream,
        "input of q, k, v": stream,
        **_attention_bytes(position),
        "dropout behind attention": mask,
        "mlp norm": stream,
        "input of the feed-forward": stream,
        **(
            _expert_bytes(position)
            if experts
            else {"feed-forward": _inside(arch, arch.d_ffn) / position.parallel.tp * e}
        ),
        "dropout behind the feed-forward": mask,
    }


def megatron_recomputed_bytes(position: Position, *, experts: bool = False) -> float:
    """With "full" recomputation a block's input; with "selective" all but the attention core."""
    arch, e = position.arch, COMPUTE_BYTES[position.train.precision]
    if position.parallel.recompute == "full":
        return arch.d_model * e / position.sequence_ranks
    saved = megatron_block_bytes(position, experts=experts)
    return sum(saved.values()) - saved.get("scores", 0.0)


def _attention_bytes(position: Position) -> dict[str, float]:
    """q, k, v, what the output matrix takes, and of unfused attention the softmax of its scores, with dropout its
    result and mask: 5 a s."""
    arch, software, e = position.arch, position.software, COMPUTE_BYTES[position.train.precision]
    heads = arch.num_heads / position.parallel.tp
    groups = max(arch.num_kv_heads / position.parallel.tp, 1)
    saved = {
        "q, k, v": (heads * arch.head_dim + groups * (arch.head_dim + value_width(arch))) * e,
        "attention out": heads * value_width(arch) * e,
    }
    if software.attention != "unfused":
        return saved | {"log-sum-exp": heads * 4}
    per_score = 2 * e + _MASK_BYTES if software.dropout else e
    keys = position.train.seq_len / position.parallel.cp
    return saved | {"scores": heads * keys * per_score}


def _inside(arch: Arch, width: int) -> float:
    """Numbers inside of a feed-forward: the input of GELU and its output, or gate, up and their product."""
    return width * (2 if arch.ffn_matrices == 2 else 3)


def _expert_bytes(position: Position) -> dict[str, float]:
    """Rows of experts, permuted, and what comes back; shared experts; the router's scores in float32."""
    arch, moe, e = position.arch, position.arch.moe, COMPUTE_BYTES[position.train.precision]
    rows = position.assignments / position.tokens
    return {
        "rows of experts": 2 * rows * arch.d_model * e,
        "experts": rows * _inside(arch, moe.d_expert) * e,
        "shared experts": _inside(arch, moe.shared_experts * moe.d_expert) / position.parallel.tp * e,
        "scores of the router": 2 * moe.num_experts * 4 / position.sequence_ranks,
    }
