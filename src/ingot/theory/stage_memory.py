"""What one pipeline stage keeps of a micro-batch, and needs while it runs it backward, in bytes of one rank.

The backward goes from the last block to the first: what blocks keep becomes less, gradients of parameters, and in a
split backward what is left for W, become more. All three change evenly from block to block, so that a backward is
largest at one of its ends: at its last block, the one before it (from when on the last one's gradients travel), or its
first.
"""

from dataclasses import dataclass

from ingot.theory.activations import BlockSize, block_sizes, head_gradient_bytes, input_bytes, output_bytes
from ingot.theory.layout import Position, Stage, attention_matrices
from ingot.theory.params import block_norm_parameters
from ingot.theory.state import COMPUTE_BYTES


@dataclass(frozen=True)
class AtBlock:
    """As the backward of block `layer` begins. before: kept by the stage's input and the blocks before it; kept: by it,
    with what it computes again; attention: of that, once its backward has got to attention. fed, attended: buffers of
    either part. left: by blocks after it for W. fed_unit: parameters of its feed-forward; unit: the one it is in."""

    layer: int
    before: float
    kept: float
    attention: float
    fed: float
    attended: float
    left: float
    fed_unit: "Unit"
    unit: int


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: routed experts, and the rest."""

    common: int
    routed: int = 0


@dataclass(frozen=True)
class StageMemory:
    """kept: of one micro-batch from F to B or I. input, head: of that, what stays longest, the stage's input, and what
    goes first, the gradients that the loss makes ahead. left: between I and W. blocks: see above. units: of its blocks.
    embedding: the gradient of the embedding, whole; matrix: that of the largest other matrix."""

    number: int
    first: bool
    last: bool
    kept: float
    input: float
    head: float
    left: float
    blocks: tuple[AtBlock, ...]
    units: tuple[Unit, ...]
    outer: Unit
    embedding: float
    matrix: float

    @property
    def whole(self) -> Unit:
        units = [self.outer, *self.units]
        return Unit(sum(unit.common for unit in units), sum(unit.routed for unit in units))

    @property
    def last_unit(self) -> Unit:
        """Whose gradients are complete last: the embedding's, or the first blocks'."""
        return self.outer if self.first or not self.units else self.units[0]


def stage_memories(position: Position, device: str) -> tuple[StageMemory, ...]:
    """Of all stages of a rank."""
    sizes = block_sizes(position, device), block_sizes(position, device, experts=True)
    return tuple(_stage_memory(position, stage, device, *sizes) for stage in position.stages)


def _stage_memory(position: Position, stage: Stage, device: str, dense: BlockSize, sparse: BlockSize) -> StageMemory:
    tokens, e, layers = position.tokens, COMPUTE_BYTES[position.train.precision], stage.layers
    recomputed = position.parallel.recompute != "none"
    every, expert_layers = position.parallel.recompute_every, stage.expert_layers

    def kept(layers: range) -> float:
        """By those blocks, per token."""
        experts = range(max(layers.start, expert_layers.start), min(layers.stop, expert_layers.stop))
        total = 0.0
        for size, count, again in (
            (dense, len(layers) - len(experts), _multiples(layers, every) - _multiples(experts, every)),
            (sparse, len(experts), _multiples(experts, every)),
        ):
            again = again if recomputed else 0
            total += (count - again) * size.kept + again * size.recomputed
        return total

    def left(layers: range) -> float:
        experts = len(range(max(layers.start, expert_layers.start), min(layers.stop, expert_layers.stop)))
        return experts * sparse.left + (len(layers) - experts) * dense.left

    groups = [group for group in position.groups(stage) if len(group)]
    size_of_group = len(groups[0]) if groups else 1
    incoming = tokens * input_bytes(position, stage)
    around = attention_matrices(position.arch, position.parallel.tp) + block_norm_parameters(position.arch)
    blocks = []
    for layer in sorted({*layers[-2:], *layers[:1]}, reverse=True):
        size = sparse if layer in expert_layers else dense
        routed = stage.experts if layer in expert_layers else 0
        blocks.append(
            AtBlock(
                layer=layer,
                before=incoming + tokens * kept(range(layers.start, layer)),
                kept=tokens * size.kept,
                attention=tokens * size.attention,
                fed=tokens * size.fed_backward,
                attended=tokens * size.attended_backward,
                left=tokens * left(range(layer + 1, layers.stop)),
                fed_unit=Unit(stage.expert_block - around if routed else stage.block - around, routed),
                unit=(layer - layers.start) // size_of_group,
            )
        )
    head = head_gradient_bytes(position, stage)
    largest = max((block_matrix(position, layer in expert_layers) for layer in {*layers[:1], *layers[-1:]}), default=0)
    return StageMemory(
        number=stage.number,
        first=stage.first,
        last=stage.last,
        kept=incoming + tokens * (kept(layers) + output_bytes(position, stage, device)) + head,
        input=incoming,
        head=head,
        left=tokens * left(layers),
        blocks=tuple(blocks),
        units=tuple(_unit(stage, group) for group in groups),
        outer=Unit(stage.outside),
        embedding=float(position.arch.vocab_size // position.parallel.tp * position.arch.d_model * e) * stage.first,
        matrix=float(largest * e),
    )


def block_matrix(position: Position, experts: bool) -> int:
    """Elements of the largest matrix of a block on this rank; experts of a rank are one matrix."""
    arch, tp = position.arch, position.parallel.tp
    around = max(arch.num_heads * arch.head_dim, 1) * arch.d_model // tp
    if not experts:
        return max(arch.d_ffn * arch.d_model // tp, around)
    return max(arch.moe.num_experts // position.parallel.ep * arch.moe.d_expert * arch.d_model, around)


def _multiples(layers: range, every: int) -> int:
    """How many of them divide by `every`."""
    return max(-(-layers.stop // every) - -(-layers.start // every), 0) if len(layers) else 0


def _unit(stage: Stage, group: range) -> Unit:
    routed = stage.experts * len(
        range(max(group.start, stage.expert_layers.start), min(group.stop, stage.expert_layers.stop))
    )
    return Unit(stage.block_parameters(group) - routed, routed)
