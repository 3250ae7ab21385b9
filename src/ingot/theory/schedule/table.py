"""A schedule as a table: rows of actions, the messages that follow from them, and a check that ranks can execute it."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ingot.errors import ConfigError

# F: forward. B: whole backward. I: only the backward for the inputs. W: the backward for the weights, after I.
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank: kind F, B, I or W of one micro-batch on one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class ScheduleTable:
    """A pipeline schedule.

    rows[r]: the actions of pipeline rank r, in order. rank_of_stage[s]: the rank that holds stage s.
    copies: number of copies of the model. Each is a chain of stages / copies stages, with an equal part of the
      micro-batches. It is 2 only for bidirectional DualPipe, whose second copy runs from the last rank to the first.
    overlaps[r]: positions in rows[r] of actions that run at the same time as the next action.
    """

    name: str
    stages: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    copies: int = 1
    overlaps: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def before(self, stage: int) -> int | None:
        """Return the stage whose output this stage reads; None for the first."""
        return stage - 1 if stage % (self.stages // self.copies) else None

    def after(self, stage: int) -> int | None:
        """Return the stage that reads the output of this stage; None for the last."""
        return stage + 1 if (stage + 1) % (self.stages // self.copies) else None

    def source_of(self, action: Action) -> int | None:
        """Return the stage whose result for the same micro-batch this action needs, or None: the previous stage for F,
        the next stage for B and I.
        """
        if action.kind == "W":
            return None
        return self.before(action.stage) if action.kind == "F" else self.after(action.stage)

    def micro_batches_of(self, stage: int) -> range:
        """Return the micro-batches that pass this stage."""
        share = self.micro_batches // self.copies
        first = stage // (self.stages // self.copies) * share
        return range(first, first + share)


class Channel(NamedTuple):
    """A first-in, first-out channel from one rank to another for one kind of message."""

    kind: Literal["activation", "gradient"]
    sender: int
    receiver: int


class Message(NamedTuple):
    """A message for `stage` of the receiving rank: the input of its F, or the gradient of its output for B or I."""

    stage: int
    micro_batch: int


def sent_by(table: ScheduleTable, action: Action) -> tuple[Channel, Message] | None:
    """Return the message that this action sends to another rank, with its channel, or None."""
    if action.kind == "W":
        return None
    reader = table.after(action.stage) if action.kind == "F" else table.before(action.stage)
    return None if reader is None else _message(table, action, action.stage, reader)


def needed_by(table: ScheduleTable, action: Action) -> tuple[Channel, Message] | None:
    """Return the message from another rank that this action needs to start, with its channel, or None."""
    source = table.source_of(action)
    return None if source is None else _message(table, action, source, action.stage)


def _message(table: ScheduleTable, action: Action, source: int, reader: int) -> tuple[Channel, Message] | None:
    sender, receiver = table.rank_of_stage[source], table.rank_of_stage[reader]
    if sender == receiver:
        return None
    kind = "activation" if action.kind == "F" else "gradient"
    return Channel(kind, sender, receiver), Message(reader, action.micro_batch)


def channel_order(table: ScheduleTable) -> dict[Channel, tuple[Message, ...]]:
    """Return the messages of every channel in the order in which they are sent.

    Sends have no tags, so the receiver must post its receives in this order: before an action, all receives up to the
    message that it needs. Sends must not block the sender's later actions. Stages of one rank exchange no messages.
    """
    orders: dict[Channel, list[Message]] = {}
    for row in table.rows:
        for action in row:
            if sent := sent_by(table, action):
                orders.setdefault(sent[0], []).append(sent[1])
    return {channel: tuple(messages) for channel, messages in orders.items()}


def peak_in_flight(table: ScheduleTable) -> tuple[int, ...]:
    """Return, for each rank, the largest number of (stage, micro-batch) pairs whose activations are alive at a time:
    from F to the end of B or W.

    A pair is one stage's activations of one micro-batch: with two stages per rank, those of half of the rank's layers.
    A part of them could be freed after I, but they are counted in full until W.
    """
    peaks = []
    for row in table.rows:
        alive = peak = 0
        for action in row:
            if action.kind == "F":
                alive += 1
                peak = max(peak, alive)
            elif action.kind != "I":
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)


def most_waiting(table: ScheduleTable, stage: int) -> int:
    """Return the largest number of micro-batches of `stage` between F and B, or F and I, at a time."""
    waiting = most = 0
    for action in table.rows[table.rank_of_stage[stage]]:
        if action.stage == stage:
            waiting += (action.kind == "F") - (action.kind in "BI")
            most = max(most, waiting)
    return most


def check_table(table: ScheduleTable) -> None:
    """Raise ConfigError unless ranks can execute the table.

    Every stage must do F, then B or I and W, once for each of its micro-batches, on the rank that holds the stage, and
    no rank may wait forever, with blocking receives on first-in, first-out channels.
    """
    problems = list(_row_problems(table)) or list(_play_problems(table))
    if problems:
        shown = "\n".join(problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else []))
        raise ConfigError(
            "E-SCHEDULE-UNPLAYABLE",
            f"the pipeline schedule {table.name!r} ({table.ranks} ranks, {table.stages} stages, "
            f"{table.micro_batches} micro-batches) cannot be played:\n{shown}",
            rule="every stage does F, then B (or I, then W) once for each micro-batch, after the stages it needs",
            fix="use a table from ingot.theory.schedule.build_table",
            schedule=table.name,
            problems=problems,
        )


def _row_problems(table: ScheduleTable) -> Iterator[str]:
    """Yield the problems of single rows."""
    for rank, row in enumerate(table.rows):
        counts = Counter((action.kind, action.stage, action.micro_batch) for action in row)
        expected = {(stage, m) for stage in table.stages_of(rank) for m in table.micro_batches_of(stage)}
        for kind, stage, m in counts:
            if (stage, m) not in expected:
                yield f"rank {rank}: {kind} of micro-batch {m} on stage {stage} does not belong to this rank"
        for stage, m in sorted(expected):
            done = "".join(kind * counts[kind, stage, m] for kind in "FBIW")
            if done not in ("FB", "FIW"):
                yield f"rank {rank}: micro-batch {m} on stage {stage} has {done or 'no actions'} instead of FB or FIW"
        yield from _order_problems(table, rank)


def _order_problems(table: ScheduleTable, rank: int) -> Iterator[str]:
    """Yield a problem for each action that comes before its input from the same rank."""
    done: set[tuple[str, int, int]] = set()
    for action in table.rows[rank]:
        way, stage, m = action.kind.replace("I", "B"), action.stage, action.micro_batch
        source = table.source_of(action)
        needs = [("B", stage, m)] if way == "W" else [("F", stage, m)] if way == "B" else []
        if source is not None and table.rank_of_stage[source] == rank:
            needs.append((way, source, m))
        if not done.issuperset(needs):
            yield f"rank {rank}: {action} comes before what it needs"
        done.add((way, stage, m))


def _play_problems(table: ScheduleTable) -> Iterator[str]:
    """Yield the ranks that would wait forever, found by playing the rows with first-in, first-out channels."""
    waiting = {channel: deque[Message]() for channel in channel_order(table)}
    held: set[tuple[Channel, Message]] = set()
    left = [deque(row) for row in table.rows]

    def ready(action: Action) -> bool:
        need = needed_by(table, action)
        if need is None:
            return True
        while need not in held and waiting[need[0]]:
            held.add((need[0], waiting[need[0]].popleft()))
        return need in held

    moved = True
    while moved:
        moved = False
        for row in left:
            while row and ready(row[0]):
                if sent := sent_by(table, row.popleft()):
                    waiting[sent[0]].append(sent[1])
                moved = True
    for rank, row in enumerate(left):
        if row:
            yield f"rank {rank} waits forever before {row[0]}"
