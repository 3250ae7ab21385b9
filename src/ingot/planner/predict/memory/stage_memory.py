"""What one pipeline stage keeps of a micro-batch, and needs while it runs it backward, in bytes of one rank.

The backward goes from the last block to the first: what blocks keep becomes less, gradients of parameters, and in a
split backward what is left for W, become more. All three change evenly from block to block, so that a backward is
largest at one of its ends: at its last block, the one before it (from when on the last one's gradients travel), or its
first.
"""

from dataclasses import dataclass

from ingot.planner.predict.memory.activations import (
    BlockSize,
    block_sizes,
    head_gradient_bytes,
    input_bytes,
    output_bytes,
)
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
    return tuple(_stage_memory(_Blocks(position, stage, *sizes), device) for stage in position.stages)


def _stage_memory(blocks: "_Blocks", device: str) -> StageMemory:
    position, stage, layers = blocks.position, blocks.stage, blocks.stage.layers
    tokens, e, tp = position.tokens, COMPUTE_BYTES[position.train.precision], position.parallel.tp
    incoming, head = tokens * input_bytes(position, stage), head_gradient_bytes(position, stage)
    ends = {*layers[:1], *layers[-1:]}
    matrix = max((block_matrix(position, layer in stage.expert_layers) for layer in ends), default=0)
    embedding = position.arch.vocab_size // tp * position.arch.d_model if stage.first else 0
    return StageMemory(
        number=stage.number,
        first=stage.first,
        last=stage.last,
        kept=incoming + tokens * (blocks.kept(layers) + output_bytes(position, stage, device)) + head,
        input=incoming,
        head=head,
        left=tokens * blocks.left(layers),
        blocks=tuple(blocks.at(layer, incoming) for layer in sorted({*layers[-2:], *ends}, reverse=True)),
        units=tuple(_unit(stage, group) for group in position.groups(stage) if len(group)),
        outer=Unit(stage.outside),
        embedding=float(embedding * e),
        matrix=float(matrix * e),
    )


@dataclass(frozen=True)
class _Blocks:
    """Of one stage. dense, sparse: sizes of a block without and with experts."""

    position: Position
    stage: Stage
    dense: BlockSize
    sparse: BlockSize

    def kept(self, layers: range) -> float:
        """By those blocks, per token."""
        parallel, experts = self.position.parallel, _common(layers, self.stage.expert_layers)
        every, recomputed = parallel.recompute_every, parallel.recompute != "none"
        sparse_again = _multiples(experts, every) if recomputed else 0
        again = _multiples(layers, every) - sparse_again if recomputed else 0
        dense = (len(layers) - len(experts) - again) * self.dense.kept + again * self.dense.recomputed
        return dense + (len(experts) - sparse_again) * self.sparse.kept + sparse_again * self.sparse.recomputed

    def left(self, layers: range) -> float:
        """By those blocks, per token, for W."""
        experts = len(_common(layers, self.stage.expert_layers))
        return experts * self.sparse.left + (len(layers) - experts) * self.dense.left

    def at(self, layer: int, incoming: float) -> AtBlock:
        stage, position = self.stage, self.position
        tokens, has_experts = position.tokens, layer in stage.expert_layers
        size = self.sparse if has_experts else self.dense
        around = attention_matrices(position.arch, position.parallel.tp) + block_norm_parameters(position.arch)
        fed = Unit((stage.expert_block if has_experts else stage.block) - around, stage.experts if has_experts else 0)
        return AtBlock(
            layer=layer,
            before=incoming + tokens * self.kept(range(stage.layers.start, layer)),
            kept=tokens * size.kept,
            attention=tokens * size.attention,
            fed=tokens * size.fed_backward,
            attended=tokens * size.attended_backward,
            left=tokens * self.left(range(layer + 1, stage.layers.stop)),
            fed_unit=fed,
            unit=(layer - stage.layers.start) // len(position.groups(stage)[0]),
        )


def _common(layers: range, others: range) -> range:
    start = max(layers.start, others.start)
    return range(start, max(min(layers.stop, others.stop), start))


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
    routed = stage.experts * len(_common(group, stage.expert_layers))
    return Unit(stage.block_parameters(group) - routed, routed)
