"""The bytes that a micro-batch keeps on one rank between its forward and its backward.

theory/saved.py has the bytes per token of ingot's own blocks. This module adds blocks like Megatron's (Korthikanti et
al. 2022, sections 4, 5). Their table 2 has the bytes of a block in 16 bits, with s tokens per sequence, b sequences,
width h (d_model), a heads and t tensor-parallel ranks:

    nothing divided                 s b h (34 + 5 a s / h)
    tensor parallelism              s b h (10 + 24 / t + 5 a s / (h t))
    and sequence parallelism        s b h (34 / t + 5 a s / (h t))
    attention core computed again   the same without 5 a s / (h t)
    all computed again              2 s b h

This module counts the same parts for other widths than 4 h, grouped heads, SwiGLU, and flash attention, which keeps its
output and one number per query instead of scores. Unlike ingot, Megatron keeps the inputs of tensor-parallel regions
divided and gathers them again. Low-precision products keep their inputs in 8 or 4 bits with scales (Transformer
Engine), and attention keeps its output in 16 bits in addition to the copy that the next matrix reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.plugins.layers import feed_forward_of
from ingot.schema.software import INGOT
from ingot.theory.layout import PipelineStage, Position
from ingot.theory.params import COMPUTE_BYTES, value_width
from ingot.theory.saved import (
    block_bytes,
    degrees,
    products_for_attention,
    recomputed_block_bytes,
    stream_norm_bytes,
)


@dataclass(frozen=True)
class BlockSize:
    """The bytes per token of one block.

    kept, recomputed: bytes kept from forward to backward, without and with recomputation.
    attention: the part of `kept` that remains when the backward reaches attention.
    fed_backward, attended_backward: temporary buffers in the backward of the feed-forward and of attention.
    left: bytes kept between the two halves, I and W, of a split backward.
    """

    kept: float = 0.0
    recomputed: float = 0.0
    attention: float = 0.0
    fed_backward: float = 0.0
    attended_backward: float = 0.0
    left: float = 0.0


def block_sizes(position: Position, device: str = "cpu", *, experts: bool = False) -> BlockSize:
    """Return the bytes per token of a block. experts: a block with experts; all 0 if the model has none."""
    if experts and not position.arch.is_moe:
        return BlockSize()
    megatrons, again = is_megatrons(position), position.parallel.recompute != "none"
    if megatrons:
        saved, computed_again = megatron_block_bytes(position, experts=experts), megatron_recomputed_bytes
    else:
        saved, computed_again = block_bytes(position, device, experts=experts), recomputed_block_bytes
    return BlockSize(
        kept=sum(saved.values()),
        recomputed=computed_again(position, experts=experts) if again else 0.0,
        attention=sum(saved[name] for name in attention_names(saved)),
        fed_backward=fed_backward_bytes(position, device, experts=experts),
        attended_backward=attended_backward_bytes(position, device, experts=experts),
        left=left_bytes(position, experts=experts),
    )


def input_bytes(position: Position, stage: PipelineStage) -> float:
    """Return the bytes per token of a stage's input: token ids on the first stage, 0 on others, where the first block
    counts the hidden states.
    """
    return 8.0 if stage.first else 0.0


def output_bytes(position: Position, stage: PipelineStage, device: str = "cpu") -> float:
    """Return the bytes per token of a stage's output.

    On the last stage they are the tensors that the last norm keeps, its output or the gradient of it (which a loss in
    the forward computes), and the target ids. On other stages they are the hidden states, if the software keeps them
    until the backward; ingot keeps the graph alone.
    """
    e, _, cut = degrees(position)
    stream = position.arch.d_model * e
    if stage.last:
        return stream_norm_bytes(position.arch, e, device) / cut + stream + 8
    return 0.0 if position.software == INGOT else stream / cut


def head_gradient_bytes(position: Position, stage: PipelineStage) -> float:
    """Return the bytes of the head's gradient, which a chunked loss computes as a whole; 0 on other stages than the
    last.
    """
    e, tp, _ = degrees(position)
    if position.software.loss != "chunked":
        return 0.0
    return float(position.arch.vocab_size // tp * position.arch.d_model * e) if stage.last else 0.0


def attention_names(saved: Mapping[str, float]) -> list[str]:
    """Return those names of `saved` (bytes by tensor, in order) that come before the second norm of a block."""
    names = list(saved)
    return names[: names.index("mlp norm")]


def fed_backward_bytes(position: Position, device: str = "cpu", *, experts: bool = False) -> float:
    """Return the bytes per token of temporary buffers while a feed-forward runs backward.

    They are the gradient of the residual stream, a second copy if tensor parallelism gathers it, and the gradients
    inside the feed-forward. Blocks with experts count rows instead of tokens: gradients inside the experts and of their
    rows, or the rows in two orders, whichever is larger.
    """
    e, tp, cut = degrees(position)
    arch, rows = position.arch, position.assignments / position.tokens
    inside = rows * max(2 * arch.d_model, 2 * arch.moe.d_expert + arch.d_model) if experts else 2 * arch.d_ffn / tp
    stream = _stream_backward(position, device) / (2 if device == "cuda" else 1)
    return stream + (arch.d_model * e if cut > 1 else 0.0) + inside * e


def attended_backward_bytes(position: Position, device: str = "cpu", *, experts: bool = False) -> float:
    """Return the bytes per token of temporary buffers when the backward reaches attention: the largest of three places.

    1. The core: gradients of queries, keys and values, with rotated ones in float32. 2. The input of attention, where
    three gradients are added. 3. The end of the feed-forward: its input, two gradients of the input and one inside.
    """
    e, tp, cut = degrees(position)
    arch, wide = position.arch, position.arch.d_model * e
    core = products_for_attention(position) * e + arch.num_heads * arch.head_dim / tp * (e + 4)
    gathered = wide if cut > 1 else 0.0
    fed = 0.0 if experts else arch.d_ffn / tp * e + 3 * wide + gathered
    return _stream_backward(position, device) + max(core + 2 * gathered, 3 * wide, fed)


def _stream_backward(position: Position, device: str) -> float:
    e, _, cut = degrees(position)
    return 2 * position.arch.d_model * (max(e, 4) if device == "cpu" else e) / cut


def left_bytes(position: Position, *, experts: bool = False) -> float:
    """Return the bytes per token of one block that are kept between I and W: the inputs of its matrices and the
    gradients of their outputs (parallel/split_backward.py).

    Routed experts keep nothing, because their whole backward runs in I.
    """
    e, tp, _ = degrees(position)
    arch = position.arch
    inputs = arch.d_model + arch.num_heads * value_width(arch) / tp
    gradients = products_for_attention(position) + arch.d_model
    if arch.is_mla:
        inputs += arch.mla.q_rank + arch.mla.kv_rank
    width = arch.moe.shared_experts * arch.moe.d_expert if experts else arch.d_ffn
    if width:
        inputs += arch.d_model + width / tp
        gradients += 2 * width / tp + arch.d_model
    return (inputs + gradients) * e


def blocks_text(position: Position, stage: PipelineStage, device: str = "cpu") -> str:
    """Return the bytes that a stage keeps per token, as text: "9 blocks x 168,072 B + 1 recomputed blocks x 8,192 B +
    ends"."""
    again, sparse_again = position.recomputed(stage), position.recomputed_with_experts(stage)
    sparse, parts = len(stage.expert_layers), []
    for experts, blocks, recomputed in (
        (False, len(stage.layers) - sparse, again - sparse_again),
        (True, sparse, sparse_again),
    ):
        size = block_sizes(position, device, experts=experts)
        what = "blocks with experts" if experts else "blocks"
        parts += [f"{blocks - recomputed} {what} x {size.kept:,.0f} B"] if blocks > recomputed else []
        parts += [f"{recomputed} recomputed {what} x {size.recomputed:,.0f} B"] if recomputed else []
    return " + ".join([*parts, "ends"])


_MASK_BYTES = 1
# Bytes per number of a matrix's input, with its share of the scale: one scale for 128 numbers in fp32 (blockwise), for
# 32 (mxfp8) and for 16 (nvfp4) in 8 bits.
_INPUT_BYTES = {"tensorwise": 1, "rowwise": 1, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def is_megatrons(position: Position) -> bool:
    """Return True if the software's blocks keep the tensors that Megatron's do. Otherwise they keep those of ingot's
    own blocks (theory/saved.py)."""
    software = position.software
    without_gate = software != INGOT and feed_forward_of(position.arch).matrices == 2
    return software.core_recompute or software.attention == "unfused" or without_gate


def megatron_block_bytes(position: Position, *, experts: bool = False) -> dict[str, float]:
    """Return the bytes per token that a block like Megatron's keeps, by tensor, if it is not recomputed as a whole."""
    arch, e, cut = position.arch, COMPUTE_BYTES[position.train.precision], position.sequence_ranks
    stream = arch.d_model * e / cut
    mask = arch.d_model * _MASK_BYTES / cut if position.software.dropout else 0.0
    read = 0.0 if position.software.parts_recomputed else arch.d_model * _input_bytes(position) / cut
    return {
        "attention norm": stream,
        "input of q, k, v": read,
        **_attention_bytes(position),
        "dropout after attention": mask,
        "mlp norm": stream,
        "input of the feed-forward": stream if experts else read,  # a router reads 16 bits
        **(_expert_bytes(position) if experts else {"feed-forward": _inside(position, arch.d_ffn)}),
        "dropout after the feed-forward": mask,
    }


def megatron_recomputed_bytes(position: Position, *, experts: bool = False) -> float:
    """Return the bytes per token that a recomputed block like Megatron's keeps: with "full" only its input, with
    "selective" everything except the attention core.
    """
    arch, e = position.arch, COMPUTE_BYTES[position.train.precision]
    if position.parallel.recompute == "full":
        return arch.d_model * e / position.sequence_ranks
    saved = megatron_block_bytes(position, experts=experts)
    return sum(saved.values()) - saved.get("scores", 0.0)


def _input_bytes(position: Position) -> float:
    """Return the bytes per number of a matrix product's input, as the product keeps it for the backward."""
    return _INPUT_BYTES.get(position.software.recipe, COMPUTE_BYTES[position.train.precision])


def _attention_bytes(position: Position) -> dict[str, float]:
    """Return the bytes per token that attention keeps: q, k, v (or the latents from which they are recomputed) and the
    input of the output matrix. Unfused attention also keeps the softmax of its scores and, with dropout, its result and
    mask: together the 5 a s of table 2.
    """
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
    """Return the bytes per token kept inside a feed-forward of `width`: the input of GELU, or gate and up, and the
    input of the last matrix.
    """
    before = 1 if feed_forward_of(position.arch).matrices == 2 else 2
    after = 0.0 if position.software.parts_recomputed else _input_bytes(position)
    return width / position.parallel.tp * (before * COMPUTE_BYTES[position.train.precision] + after)


def _expert_bytes(position: Position) -> dict[str, float]:
    """Return the bytes per token that experts keep: permuted input rows, output rows (unless tuned kernels apply the
    router's weights inside the experts), shared experts, and the router's scores in float32.
    """
    arch, moe, e = position.arch, position.arch.moe, COMPUTE_BYTES[position.train.precision]
    rows, tp = position.assignments / position.tokens, position.parallel.tp
    back = 0 if position.software.kernels == "tuned" else e
    return {
        "rows of experts": rows * arch.d_model * (_input_bytes(position) + back),
        "experts": rows * tp * _inside(position, moe.d_expert),  # an expert is on one rank, whole
        "shared experts": _inside(position, moe.shared_experts * moe.d_expert),
        "scores of the router": 2 * moe.num_experts * 4 / position.sequence_ranks,
    }
