"""The largest moment of one pipeline rank in an optimizer step: what is alive, kind by kind, at the places where a
forward or a backward can be largest, for everything its schedule has under way (theory/flights.py).
"""

import math
from dataclasses import dataclass, replace

from ingot.planner.predict.memory.flights import Doing, Situation, row_of
from ingot.planner.predict.memory.stage_memory import AtBlock, StageMemory, Unit, stage_memories
from ingot.theory import memory
from ingot.theory.layout import Position
from ingot.theory.state import COMPUTE_BYTES, kept_gradient_bytes, sent_gradient_bytes

_NOTHING = Unit(0)


@dataclass(frozen=True)
class Moment:
    """Bytes besides weights, optimizer state and what does not change. place: where in the program."""

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
class Peak:
    """moment: of a whole rank, everything under way included. own: of that, the action's alone, beside what its stages
    have under way, `situation`. stays: gradients whose buffers are never freed."""

    moment: Moment
    own: Moment
    situation: Situation
    stages: tuple[StageMemory, ...]
    stays: float


class Gradients:
    """Bytes of gradients by how far they are: whole ones as they come, and the shards that ranks keep of a sum."""

    def __init__(self, position: Position, stages: tuple[StageMemory, ...]):
        parallel, precision = position.parallel, position.train.precision
        self.zero, self.holds = parallel.zero, parallel.splits_backward
        self.element = COMPUTE_BYTES[precision]
        self.kept, self.sent = kept_gradient_bytes(parallel, precision), sent_gradient_bytes(parallel, precision)
        self.ranks = parallel.shard_ranks
        self.expert_ranks = parallel.expert_ranks
        # Buffers of what a rank divides with nobody stay from step to step, Megatron's all do.
        always = position.software.megatron_state
        self.common_stays = self.zero != 3 and (self.ranks == 1 or always)
        self.routed_stays = self.zero != 3 and (self.expert_ranks == 1 or always)
        # Where no unit of blocks is gathered or reduced at once, but a matrix.
        matrix = max(stage.matrix for stage in stages) / self.element
        self.most = matrix if self.zero == 3 and position.software.gathers_matrices else math.inf
        self.stays = self.kept * (position.common * self.common_stays + position.routed * self.routed_stays)

    def whole(self, *units: Unit) -> float:
        common = 0 if self.common_stays else sum(unit.common for unit in units)
        routed = 0 if self.routed_stays else sum(unit.routed for unit in units)
        return float(min(common + routed, self.most) * (self.sent if self.zero == 3 else self.kept))

    def shards(self, *units: Unit) -> float:
        common = 0 if self.common_stays else sum(unit.common for unit in units) / self.ranks
        routed = 0 if self.routed_stays else sum(unit.routed for unit in units) / self.expert_ranks
        return (common + routed) * self.kept

    def computed(self, *units: Unit) -> float:
        """In the dtype that computes, as FSDP2 gathers them before it sends a unit's."""
        return float(min(sum(unit.common + unit.routed for unit in units), self.most) * self.element)

    @property
    def keeps_whole(self) -> bool:
        """Between a stage's first backward and its last."""
        return self.zero == 1 or (self.zero == 2 and self.holds)


def peak(position: Position, device: str) -> Peak:
    """Of all situations the one with the most bytes."""
    parallel = position.parallel
    row = row_of(parallel.schedule, parallel.pp, position.accumulation, parallel.stages_on_each_rank, position.rank)
    stages = stage_memories(position, device)
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
    return Peak(moment, own, row.situations[at], stages, gradients.stays)


def messages(position: Position) -> float:
    """Hidden states and their gradients between stages: one that comes, one that is expected, one that leaves."""
    if position.parallel.pp == 1:
        return 0.0
    e = COMPUTE_BYTES[position.train.precision]
    return 3.0 * position.tokens / position.sequence_ranks * position.arch.d_model * e


def _moments(
    position: Position, stages: tuple[StageMemory, ...], doing: Doing, gradients: Gradients, device: str
) -> list[Moment]:
    """Where one action can be largest, beside what is kept anyway (which counts this action's micro-batch whole)."""
    stage = stages[doing.stage]
    flying = _flying(stages, doing, gradients)
    if doing.kind == "F":
        return [_forward(position, stage, flying, device)]
    if doing.kind == "W":
        return [Moment("the gradients of weights", backward=stage.matrix, gathered=_gathered(position, stage, -1))]
    found = [_at_head(position, stage, doing, gradients, flying)]
    for at in stage.blocks:
        found += _at_block(position, stage, doing, gradients, at, flying)
    if gradients.zero == 3:
        found += [_unit_done(position, stage, doing, gradients, at) for at in stage.blocks]
    if stage.first:
        found += _at_embedding(position, stage, doing, gradients)
    return found or [Moment(f"the backward of stage {stage.number}, which has no blocks")]


def _forward(position: Position, stage: StageMemory, flying: float, device: str) -> Moment:
    gathered = _gathered_at_end(position, stage)
    if not stage.last:
        return Moment(f"the forward of stage {stage.number}", gathered=gathered, gradients=flying)
    logits = memory.logits(position, device).value
    return Moment("the loss", activations=-stage.head, logits=logits, gradients=flying, gathered=gathered)


def _at_head(position: Position, stage: StageMemory, doing: Doing, gradients: Gradients, flying: float) -> Moment:
    """As a backward begins: those that the loss made move to where gradients are kept."""
    gathered = _gathered(position, stage, len(stage.units) - 1)
    if gradients.zero == 3 or not stage.last:
        return Moment(f"the backward of stage {stage.number}", gathered=gathered, gradients=flying)
    own = gradients.whole(stage.outer) if doing.first or not gradients.keeps_whole else 0.0
    return Moment("the backward of the head", gathered=gathered, gradients=own + flying)


def _flying(stages: tuple[StageMemory, ...], doing: Doing, gradients: Gradients) -> float:
    """The last unit of the backward before, which is on its way until the next one is ready."""
    if gradients.zero != 2 or gradients.holds or doing.before < 0:
        return 0.0
    unit = stages[doing.before].last_unit
    return gradients.whole(unit) + gradients.shards(unit)


def _at_block(
    position: Position, stage: StageMemory, doing: Doing, gradients: Gradients, at: AtBlock, flying: float
) -> list[Moment]:
    """As its backward begins, and as it gets to attention."""
    own = _gradients_at_block(stage, doing, gradients, at, flying)
    begins = Moment(
        f"the backward of block {at.layer}",
        activations=at.before + at.kept - stage.kept,
        backward=at.fed + _left(position, doing, at.left),
        gradients=own,
        gathered=_gathered(position, stage, at.unit),
    )
    # FSDP2 has gradients in the dtype that computes until the unit is done: of its last matrix, of the feed-forward.
    computed = gradients.computed(at.fed_unit) if gradients.zero == 3 else 0.0
    if gradients.zero == 3:
        begins = replace(begins, gradients=own + stage.matrix)
    attends = replace(
        begins,
        place=f"the backward of attention of block {at.layer}",
        activations=at.before + at.attention - stage.kept,
        backward=at.attended + _left(position, doing, at.left),
        gradients=own + computed,
    )
    return [begins, attends]


def _gradients_at_block(stage: StageMemory, doing: Doing, gradients: Gradients, at: AtBlock, flying: float) -> float:
    """Its own have a buffer, and those of the unit after it are on their way."""
    behind = stage.units[at.unit + 1 :]
    growing = gradients.shards(*behind) if doing.first else 0.0
    if gradients.zero == 3:
        return gradients.whole(*behind[:1]) + stage.head + growing  # the head's waits for the end of the stage
    outer = [stage.outer] if stage.last else []
    if gradients.keeps_whole and not _sends_at_once(doing, gradients):
        return gradients.whole(*outer, stage.units[at.unit], *behind) if doing.first else 0.0
    return gradients.whole(*outer, stage.units[at.unit], *behind[:1]) + growing + (0.0 if behind else flying)


def _left(position: Position, doing: Doing, left: float) -> float:
    """Where a schedule has backwards in halves, a whole one is both of them, one after the other."""
    return left if doing.kind == "I" or position.parallel.splits_backward else 0.0


def _sends_at_once(doing: Doing, gradients: Gradients) -> bool:
    """ZeRO-1 with one micro-batch never has all of its whole gradients."""
    return doing.first and doing.last and not gradients.holds


def _unit_done(position: Position, stage: StageMemory, doing: Doing, gradients: Gradients, at: AtBlock) -> Moment:
    """FSDP2, as the last block of a unit has run backward: its gradients are there, those of the next unit leave."""
    unit, behind = stage.units[at.unit], stage.units[at.unit + 1 :]
    own = gradients.computed(unit) + gradients.whole(*behind[:1]) + stage.head
    return Moment(
        f"the end of the backward of block {at.layer}",
        activations=-stage.kept + stage.input,
        backward=_left(position, doing, at.left),
        gradients=own + (gradients.shards(*behind) if doing.first else 0.0),
        gathered=_gathered(position, stage, at.unit),
    )


def _at_embedding(position: Position, stage: StageMemory, doing: Doing, gradients: Gradients) -> list[Moment]:
    """The gradient of the embedding comes whole, before it joins others."""
    alive = Moment(
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
    """Parameters that ZeRO-3 has brought together: what lies outside of blocks, this unit (-1: none) and those ahead of
    it. All of the rank's where forwards do not free them."""
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
    """At the end of a forward: FSDP2 keeps the buffer that the last unit came in, its parameters are freed or not."""
    if position.parallel.zero != 3:
        return 0.0
    if position.software.gathers_matrices:
        return _gathered(position, stage, -1)
    e, units = COMPUTE_BYTES[position.train.precision], stage.units[-1:]
    around = position.parameters if _stay(position) else stage.outer.common
    return float(e * (around + sum(unit.common + unit.routed for unit in units)))


def _stay(position: Position) -> bool:
    return not position.parallel.reshard or position.parallel.unit_blocks == 0
