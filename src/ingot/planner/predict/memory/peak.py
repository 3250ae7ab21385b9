"""The peak memory of one pipeline rank in an optimizer step, by kind.

The peak is the largest of the places in a forward or backward where memory can be largest, over all states of the
schedule (in_flight.py).
"""

import math
from dataclasses import dataclass, replace

from ingot.planner.predict.memory.in_flight import InFlight, MemoryAction, RankHistory, history_of
from ingot.planner.predict.memory.stage_memory import BlockBackward, ParameterUnit, StageMemory, stage_memories
from ingot.schema.software import INGOT
from ingot.theory import memory
from ingot.theory.layout import Position
from ingot.theory.params import COMPUTE_BYTES, kept_gradient_bytes, sent_gradient_bytes

_NOTHING = ParameterUnit(0)


@dataclass(frozen=True)
class LiveBytes:
    """The bytes alive at one place of the program, without weights, optimizer state and constant buffers. place: the
    description of the place in messages. backward: temporary buffers of a backward.
    """

    place: str
    activations: float = 0.0
    backward: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    gathered: float = 0.0

    @property
    def bytes(self) -> float:
        return self.activations + self.backward + self.logits + self.gradients + self.gathered


@dataclass(frozen=True)
class MemoryPeak:
    """The peak of a rank's live bytes.

    moment: all live bytes at the peak. own: the part due to the action that runs then, without the micro-batches in
      flight (`situation`). stages: the rank's stages. stays: bytes of gradient buffers that are never freed.
    """

    moment: LiveBytes
    own: LiveBytes
    situation: InFlight
    stages: tuple[StageMemory, ...]
    stays: float


class Gradients:
    """A counter of gradient bytes on one rank: whole gradients that a backward computes, and the rank's shards of the
    accumulated gradients.
    """

    def __init__(self, position: Position, stages: tuple[StageMemory, ...]):
        parallel, precision = position.parallel, position.train.precision
        self.zero, self.holds = parallel.zero, parallel.splits_backward
        self.element = COMPUTE_BYTES[precision]
        self.kept, self.sent = kept_gradient_bytes(parallel, precision), sent_gradient_bytes(parallel, precision)
        self.ranks = parallel.shard_ranks
        self.expert_ranks = parallel.expert_ranks
        # Gradient buffers that are not sharded stay allocated from step to step; Megatron's always stay.
        always = position.software.megatron_state
        self.common_stays = self.zero != 3 and (self.ranks == 1 or always)
        self.routed_stays = self.zero != 3 and (self.expert_ranks == 1 or always)
        # Some systems gather and reduce one matrix at a time, not units of blocks.
        matrix = max(stage.matrix for stage in stages) / self.element
        self.most = matrix if self.zero == 3 and position.software.gathers_matrices else math.inf
        self.stays = self.kept * (position.common * self.common_stays + position.routed * self.routed_stays)

    def whole(self, *units: ParameterUnit) -> float:
        """Return the bytes of the units' whole gradients, in the dtype in which these are kept or reduced."""
        common = 0 if self.common_stays else sum(unit.common for unit in units)
        routed = 0 if self.routed_stays else sum(unit.routed for unit in units)
        return float(min(common + routed, self.most) * (self.sent if self.zero == 3 else self.kept))

    def shards(self, *units: ParameterUnit) -> float:
        """Return the bytes of this rank's shards of the units' gradients."""
        common = 0 if self.common_stays else sum(unit.common for unit in units) / self.ranks
        routed = 0 if self.routed_stays else sum(unit.routed for unit in units) / self.expert_ranks
        return (common + routed) * self.kept

    def computed(self, *units: ParameterUnit) -> float:
        """Return the bytes of the units' gradients in the compute dtype, which FSDP2 collects before it reduces a unit.

        If the software gathers single matrices, only the largest matrix counts.
        """
        return float(min(sum(unit.common + unit.routed for unit in units), self.most) * self.element)

    @property
    def keeps_whole(self) -> bool:
        """True if whole gradients are kept from a stage's first backward to its last."""
        return self.zero == 1 or (self.zero == 2 and self.holds)


def peak(position: Position, device: str) -> MemoryPeak:
    """Return the memory peak of a pipeline rank: the action and the state of the schedule with the most live bytes."""
    parallel = position.parallel
    row = history_of(parallel.schedule, parallel.pp, position.accumulation, parallel.stages_on_each_rank, position.rank)
    stages = stage_memories(position, device, _loss_is_late(position, row))
    gradients = Gradients(position, stages)
    inside = [max(_moments(position, stages, doing, gradients, device), key=lambda m: m.bytes) for doing in row.doings]
    kept, left = [stage.kept for stage in stages], [stage.left for stage in stages]
    whole = [
        gradients.whole(stage.whole) if gradients.keeps_whole else gradients.shards(stage.whole) for stage in stages
    ]
    shards = [gradients.shards(stage.whole) for stage in stages]
    held = row.alive @ kept + row.left @ left
    summed = (row.begun - row.ended) @ whole + row.ended @ shards
    more = [moment.bytes for moment in inside]
    totals = held + summed + [more[number] for number in row.which]
    at = int(totals.argmax())
    own = inside[row.which[at]]
    moment = replace(
        own,
        activations=own.activations + float(held[at]) + messages(position),
        gradients=own.gradients + float(summed[at]) + gradients.stays,
    )
    return MemoryPeak(moment, own, row.situations[at], stages, gradients.stays)


def _loss_is_late(position: Position, row: RankHistory) -> bool:
    """Return whether the rank computes losses in the backward: ingot does if more than one micro-batch of the last
    stage waits for its backward at a time (parallel/pipeline.py)."""
    last = [number for number, stage in enumerate(position.stages) if stage.last]
    return position.software == INGOT and bool(row.alive[:, last].max(initial=0.0) > 1)


def messages(position: Position) -> float:
    """Return the bytes of three messages between stages: one received, one still to be received, and one being sent."""
    if position.parallel.pp == 1:
        return 0.0
    e = COMPUTE_BYTES[position.train.precision]
    return 3.0 * position.tokens / position.sequence_ranks * position.arch.d_model * e


def _moments(
    position: Position, stages: tuple[StageMemory, ...], doing: MemoryAction, gradients: Gradients, device: str
) -> list[LiveBytes]:
    """Return the live bytes at each place of one action where memory can be largest.

    The bytes are relative to what all micro-batches in flight keep, in which this action's micro-batch counts in
    full; `activations` can therefore be negative.
    """
    stage = stages[doing.stage]
    sending = _sending(stages, doing, gradients)
    if doing.kind == "F":
        return [_forward(position, stage, sending, device)]
    if doing.kind == "W":
        return [LiveBytes("the gradients of weights", backward=stage.matrix, gathered=_gathered(position, stage, -1))]
    found = _at_head(position, stage, doing, gradients, sending, device)
    for at in stage.blocks:
        found += _at_block(position, stage, doing, gradients, at, sending)
    if gradients.zero == 3:
        found += [_unit_done(position, stage, doing, gradients, at) for at in stage.blocks]
    if stage.first:
        found += _at_embedding(position, stage, doing, gradients)
    return found or [LiveBytes(f"the backward of stage {stage.number}, which has no blocks")]


def _forward(position: Position, stage: StageMemory, sending: float, device: str) -> LiveBytes:
    gathered = _gathered_at_end(position, stage)
    if not stage.last or stage.late:
        return LiveBytes(f"the forward of stage {stage.number}", gathered=gathered, gradients=sending)
    logits = memory.logits(position, device).value
    return LiveBytes("the loss", activations=-stage.head, logits=logits, gradients=sending, gathered=gathered)


def _at_head(
    position: Position, stage: StageMemory, doing: MemoryAction, gradients: Gradients, sending: float, device: str
) -> list[LiveBytes]:
    """Return the live bytes at the start of a stage's backward. On the last stage, the head's gradients, which the loss
    computed in the forward or computes now, are then copied to the gradient buffers.
    """
    gathered = _gathered(position, stage, len(stage.units) - 1)
    begins = LiveBytes(f"the backward of stage {stage.number}", gathered=gathered, gradients=sending)
    found = []
    if stage.late:
        found = [replace(begins, place="the loss", logits=memory.logits(position, device).value)]
    if gradients.zero == 3 or not stage.last:
        return [*found, begins]
    own = gradients.whole(stage.outer) if doing.first or not gradients.keeps_whole else 0.0
    made = stage.head if stage.late else 0.0
    return [*found, replace(begins, place="the backward of the head", backward=made, gradients=own + sending)]


def _sending(stages: tuple[StageMemory, ...], doing: MemoryAction, gradients: Gradients) -> float:
    """Return the gradient bytes of the previous backward's last unit, whose reduction (ZeRO-2) still runs until the
    next unit is ready."""
    if gradients.zero != 2 or gradients.holds or doing.before < 0:
        return 0.0
    unit = stages[doing.before].last_unit
    return gradients.whole(unit) + gradients.shards(unit)


def _at_block(
    position: Position,
    stage: StageMemory,
    doing: MemoryAction,
    gradients: Gradients,
    at: BlockBackward,
    sending: float,
) -> list[LiveBytes]:
    """Return the live bytes at two places of a block's backward: its start, and where it reaches attention."""
    own = _gradients_at_block(stage, doing, gradients, at, sending)
    left, gathered = _left(position, doing, at.left), _gathered(position, stage, at.unit)
    # FSDP2 keeps gradients in the compute dtype until the unit is done: at first those of the block's last matrix, then
    # those of its feed-forward.
    last_matrix, computed = (stage.matrix, gradients.computed(at.fed_unit)) if gradients.zero == 3 else (0.0, 0.0)
    begins = LiveBytes(
        f"the backward of block {at.layer}",
        activations=at.before + at.kept - stage.kept,
        backward=at.fed + left,
        gradients=own + last_matrix,
        gathered=gathered,
    )
    attends = LiveBytes(
        f"the backward of attention of block {at.layer}",
        activations=at.before + at.attention - stage.kept,
        backward=at.attended + left,
        gradients=own + computed,
        gathered=gathered,
    )
    return [begins, attends]


def _gradients_at_block(
    stage: StageMemory, doing: MemoryAction, gradients: Gradients, at: BlockBackward, sending: float
) -> float:
    """Return the bytes of gradients at a block's backward: those of its own unit, of the next unit, which is being
    reduced, and the shards of later units."""
    after = stage.units[at.unit + 1 :]
    growing = gradients.shards(*after) if doing.first else 0.0
    if gradients.zero == 3:
        return (
            gradients.whole(*after[:1]) + stage.head + growing
        )  # the head's gradient is reduced at the end of the stage
    outer = [stage.outer] if stage.last else []
    if gradients.keeps_whole and not _sends_at_once(doing, gradients):
        return gradients.whole(*outer, stage.units[at.unit], *after) if doing.first else 0.0
    return gradients.whole(*outer, stage.units[at.unit], *after[:1]) + growing + (0.0 if after else sending)


def _left(position: Position, doing: MemoryAction, left: float) -> float:
    """Return `left`, the bytes kept for W, or 0 if the backward is not split. In a schedule with split backwards, even
    a whole backward (B) runs I and then W."""
    return left if doing.kind == "I" or position.parallel.splits_backward else 0.0


def _sends_at_once(doing: MemoryAction, gradients: Gradients) -> bool:
    """Return True if each unit is reduced immediately, because the stage has one micro-batch in the step. Even ZeRO-1
    then never has all whole gradients at the same time."""
    return doing.first and doing.last and not gradients.holds


def _unit_done(
    position: Position, stage: StageMemory, doing: MemoryAction, gradients: Gradients, at: BlockBackward
) -> LiveBytes:
    """Return the bytes after the backward of a unit's last block under FSDP2: the unit's gradients exist, and those of
    the next unit are being reduced.
    """
    unit, after = stage.units[at.unit], stage.units[at.unit + 1 :]
    own = gradients.computed(unit) + gradients.whole(*after[:1]) + stage.head
    return LiveBytes(
        f"the end of the backward of block {at.layer}",
        activations=-stage.kept + stage.input,
        backward=_left(position, doing, at.left),
        gradients=own + (gradients.shards(*after) if doing.first else 0.0),
        gathered=_gathered(position, stage, at.unit),
    )


def _at_embedding(position: Position, stage: StageMemory, doing: MemoryAction, gradients: Gradients) -> list[LiveBytes]:
    """Return the live bytes at the embedding's backward, which computes its whole gradient in a separate buffer."""
    alive = LiveBytes(
        "the backward of the embedding",
        activations=stage.input - stage.kept,
        backward=stage.embedding + _left(position, doing, stage.left),
        gathered=_gathered(position, stage, -1),
    )
    if gradients.zero == 3:
        shards = gradients.shards(*stage.units) if doing.first else 0.0
        leaving = gradients.computed(stage.outer) + gradients.whole(stage.outer)
        after = replace(alive, backward=alive.backward - stage.embedding, gradients=shards + leaving, gathered=0.0)
        return [replace(alive, gradients=shards + stage.head + gradients.whole(*stage.units[:1])), after]
    if gradients.keeps_whole and not _sends_at_once(doing, gradients):
        return [replace(alive, gradients=gradients.whole(stage.whole) if doing.first else 0.0)]
    own = gradients.whole(stage.outer, *stage.units[:1])
    return [replace(alive, gradients=own + (gradients.shards(*stage.units) if doing.first else 0.0))]


def _gathered(position: Position, stage: StageMemory, unit: int) -> float:
    """Return the bytes of parameters that ZeRO-3 has gathered: those outside blocks, of unit `unit` (-1: none) and of
    the prefetched units; or all parameters of the rank if they are not freed after the forward.
    """
    parallel, e = position.parallel, COMPUTE_BYTES[position.train.precision]
    if parallel.zero != 3:
        return 0.0
    if position.software.gathers_matrices:
        return (1 + parallel.prefetch) * stage.matrix
    if _stay(position):
        return float(position.parameters * e)
    units = stage.units[max(unit - parallel.prefetch, 0) : unit + 1] if unit >= 0 else ()
    return float(e * (stage.outer.common + sum(one.common + one.routed for one in units)))


def _gathered_at_end(position: Position, stage: StageMemory) -> float:
    """Return the bytes of gathered parameters at the end of a forward. FSDP2 keeps the buffer of the last unit even
    after freeing its parameters.
    """
    if position.parallel.zero != 3:
        return 0.0
    if position.software.gathers_matrices:
        return _gathered(position, stage, -1)
    e, units = COMPUTE_BYTES[position.train.precision], stage.units[-1:]
    around = position.parameters if _stay(position) else stage.outer.common
    return float(e * (around + sum(unit.common + unit.routed for unit in units)))


def _stay(position: Position) -> bool:
    """Return True if gathered parameters stay gathered after the forward."""
    return not position.parallel.reshard or position.parallel.unit_blocks == 0
