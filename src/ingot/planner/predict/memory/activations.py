"""Bytes that micro-batches leave in memory between their forward and their backward, on one rank. What one block
leaves per token is in theory/saved.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.planner.predict.memory.saved_megatron import is_megatrons, megatron_block_bytes, megatron_recomputed_bytes
from ingot.theory.layout import Position, Stage
from ingot.theory.params import value_width
from ingot.theory.saved import block_bytes, degrees, norm_bytes, products_for_attention, recomputed_block_bytes


@dataclass(frozen=True)
class BlockSize:
    """Bytes per token of one block. kept, recomputed: from forward to backward, without and with recomputation;
    attention: of `kept`, what is left when the backward has got to attention. fed_backward, attended_backward: buffers
    of the backward of the feed-forward and of attention. left: between the two halves of a split backward."""

    kept: float = 0.0
    recomputed: float = 0.0
    attention: float = 0.0
    fed_backward: float = 0.0
    attended_backward: float = 0.0
    left: float = 0.0


def block_sizes(position: Position, device: str = "cpu", *, experts: bool = False) -> BlockSize:
    """experts: of a block that has some."""
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


def input_bytes(position: Position, stage: Stage) -> float:
    """Of a stage, per token: token ids on the first one. Hidden states are the first block's to keep."""
    return 8.0 if stage.first else 0.0


def output_bytes(position: Position, stage: Stage, device: str = "cpu") -> float:
    """Per token: hidden states, which the backward starts from; on the last stage those of the last norm, the gradient
    of its output (which the loss computes ahead), and target ids."""
    e, _, cut = degrees(position)
    stream = position.arch.d_model * e
    return norm_bytes(position.arch.d_model, e, device) / cut + stream + 8 if stage.last else stream / cut


def head_gradient_bytes(position: Position, stage: Stage) -> float:
    """Of one micro-batch: the loss computes the head's gradient ahead and keeps it until the backward. A loss of whole
    logits does not."""
    e, tp, _ = degrees(position)
    if position.software.loss != "chunked":
        return 0.0
    return float(position.arch.vocab_size // tp * position.arch.d_model * e) if stage.last else 0.0


def attention_names(saved: Mapping[str, float]) -> list[str]:
    """Of what a block keeps, in order: that before its second norm."""
    names = list(saved)
    return names[: names.index("mlp norm")]


def fed_backward_bytes(position: Position, device: str = "cpu", *, experts: bool = False) -> float:
    """Buffers while a feed-forward runs backward, per token: the gradient of the residual stream, and once more where
    tensor parallelism gathers it; three inside, when the product is not needed any more. Of experts the
    same and rows; or rows in two orders, as they have them on their way back to tokens in the forward already."""
    e, tp, cut = degrees(position)
    arch, rows = position.arch, position.assignments / position.tokens
    inside = rows * max(2 * arch.d_model, 2 * arch.moe.d_expert + arch.d_model) if experts else 2 * arch.d_ffn / tp
    stream = _stream_backward(position, device) / (2 if device == "cuda" else 1)
    return stream + (arch.d_model * e if cut > 1 else 0.0) + inside * e


def attended_backward_bytes(position: Position, device: str = "cpu", *, experts: bool = False) -> float:
    """The same as it comes to attention: of its queries, keys and values, and of the rotated ones in float32; of its
    input, whose gradients come from each of the three and are added up; or what the feed-forward has at its end, its
    input, two gradients of that and one of its inside."""
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
    """What I leaves of one block for W, per token: inputs of matrices and gradients of their outputs
    (parallel/split_backward.py). Routed experts have their whole backward in I."""
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


def blocks_text(position: Position, stage: Stage, device: str = "cpu") -> str:
    """What a stage keeps per token, by kind: "9 blocks x 168,072 B + 1 recomputed blocks x 8,192 B + ends"."""
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
