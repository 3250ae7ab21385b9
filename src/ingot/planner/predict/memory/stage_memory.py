"""The bytes that one pipeline stage keeps of a micro-batch, and those it needs while it runs backward, on one rank.

The backward runs from the last block to the first. Meanwhile saved activations shrink; gradients of parameters and, in
a split backward, the inputs kept for W grow. All three change evenly from block to block, so memory is largest at one
end of the backward: at the last block, at the block before it (while the last block's gradients are reduced), or at the
first block.
"""

from dataclasses import dataclass

from ingot.planner.predict.memory.activations import (
    BlockSize,
    block_sizes,
    head_gradient_bytes,
    input_bytes,
    output_bytes,
)
from ingot.theory.layout import PipelineStage, Position, attention_matrices
from ingot.theory.params import COMPUTE_BYTES, block_norm_parameters


@dataclass(frozen=True)
class BlockBackward:
    """The bytes of one micro-batch at the start of the backward of block `layer`.

    before: bytes that the stage's input and earlier blocks keep. kept: bytes of this block, with recomputed tensors.
    attention: the part of `kept` that remains when the backward reaches attention.
    fed, attended: temporary buffers in the backward of the feed-forward and of attention. left: bytes that later blocks
    keep for W. fed_unit: parameters of the block's feed-forward. unit: index of the block's unit in the stage.
    """

    layer: int
    before: float
    kept: float
    attention: float
    fed: float
    attended: float
    left: float
    fed_unit: "ParameterUnit"
    unit: int


@dataclass(frozen=True)
class ParameterUnit:
    """Numbers of parameters that are gathered and reduced together. common: all except routed experts. routed: those of
    routed experts."""

    common: int
    routed: int = 0


@dataclass(frozen=True)
class StageMemory:
    """The bytes and parameters of one stage.

    kept: bytes that one micro-batch keeps from F to B or I. input: the part of `kept` that is freed last, the stage's
      input. head: bytes of the head's gradient: the part of `kept` that is freed first if the loss computes it in the
      forward. late: the loss is computed in the backward, so `kept` has no gradient of the head.
    left: bytes that one micro-batch keeps between I and W. blocks: the blocks at which the backward can be largest.
    units: the parameters of blocks, by unit. outer: the parameters outside blocks.
    embedding: bytes of the embedding's whole gradient. matrix: bytes of the gradient of the largest matrix of a block.
    """

    number: int
    first: bool
    last: bool
    kept: float
    input: float
    head: float
    left: float
    blocks: tuple[BlockBackward, ...]
    units: tuple[ParameterUnit, ...]
    outer: ParameterUnit
    embedding: float
    matrix: float
    late: bool = False

    @property
    def whole(self) -> ParameterUnit:
        """All parameters of the stage as one unit."""
        units = [self.outer, *self.units]
        return ParameterUnit(sum(unit.common for unit in units), sum(unit.routed for unit in units))

    @property
    def last_unit(self) -> ParameterUnit:
        """The unit whose gradients are complete last: the parameters outside blocks on the first stage, which has the
        embedding, otherwise the unit of the first blocks."""
        return self.outer if self.first or not self.units else self.units[0]


def stage_memories(position: Position, device: str, late: bool = False) -> tuple[StageMemory, ...]:
    """Return the bytes and parameters of each stage of a rank, in order. late: the loss is computed in the backward."""
    sizes = block_sizes(position, device), block_sizes(position, device, experts=True)
    stages = position.stages
    return tuple(_stage_memory(_Blocks(position, stage, *sizes), device, late and stage.last) for stage in stages)


def _stage_memory(blocks: "_Blocks", device: str, late: bool) -> StageMemory:
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
        kept=incoming
        + tokens * (blocks.kept(layers) + output_bytes(position, stage, device))
        + (0.0 if late else head),
        input=incoming,
        head=head,
        left=tokens * blocks.left(layers),
        blocks=tuple(blocks.at(layer, incoming) for layer in sorted({*layers[-2:], *ends}, reverse=True)),
        units=tuple(_unit(stage, group) for group in position.groups(stage) if len(group)),
        outer=ParameterUnit(stage.outside),
        embedding=float(embedding * e),
        matrix=float(matrix * e),
        late=late,
    )


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one stage. dense, sparse: sizes of a block without and with experts."""

    position: Position
    stage: PipelineStage
    dense: BlockSize
    sparse: BlockSize

    def kept(self, layers: range) -> float:
        """Return the bytes per token that the blocks `layers` keep from forward to backward."""
        parallel, experts = self.position.parallel, _common(layers, self.stage.expert_layers)
        every, recomputed = parallel.recompute_every, parallel.recompute != "none"
        sparse_again = _multiples(experts, every) if recomputed else 0
        again = _multiples(layers, every) - sparse_again if recomputed else 0
        dense = (len(layers) - len(experts) - again) * self.dense.kept + again * self.dense.recomputed
        return dense + (len(experts) - sparse_again) * self.sparse.kept + sparse_again * self.sparse.recomputed

    def left(self, layers: range) -> float:
        """Return the bytes per token that the blocks `layers` keep between I and W."""
        experts = len(_common(layers, self.stage.expert_layers))
        return experts * self.sparse.left + (len(layers) - experts) * self.dense.left

    def at(self, layer: int, incoming: float) -> BlockBackward:
        """Return the bytes at the start of the backward of block `layer`. incoming: bytes of the stage's input."""
        stage, position = self.stage, self.position
        tokens, has_experts = position.tokens, layer in stage.expert_layers
        size = self.sparse if has_experts else self.dense
        around = attention_matrices(position.arch, position.parallel.tp) + block_norm_parameters(position.arch)
        fed = ParameterUnit(
            (stage.expert_block if has_experts else stage.block) - around, stage.experts if has_experts else 0
        )
        return BlockBackward(
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
    """Return the number of elements in the largest matrix of a block on this rank. All experts of a rank count as one
    matrix."""
    arch, tp = position.arch, position.parallel.tp
    around = max(arch.num_heads * arch.head_dim, 1) * arch.d_model // tp
    if not experts:
        return max(arch.d_ffn * arch.d_model // tp, around)
    return max(arch.moe.num_experts // position.parallel.ep * arch.moe.d_expert * arch.d_model, around)


def _multiples(layers: range, every: int) -> int:
    """Return how many of the layer numbers are multiples of `every`."""
    return max(-(-layers.stop // every) - -(-layers.start // every), 0) if len(layers) else 0


def _unit(stage: PipelineStage, group: range) -> ParameterUnit:
    routed = stage.experts * len(_common(group, stage.expert_layers))
    return ParameterUnit(stage.block_parameters(group) - routed, routed)
