"""What a schedule is: rows of actions, and the messages that they imply."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

# F forward; B backward, whole; I backward for the inputs only; W the weights' gradients that I left.
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class Table:
    """rows[r]: the actions of pipeline rank r, in order. rank_of_stage[s]: the rank that holds stage s.

    copies: of the model, each a chain of stages / copies stages with its own equal part of the micro-batches, in
    order; 2 for the bidirectional DualPipe only, whose second copy runs from the last rank to the first.
    overlaps[r]: positions in rows[r] of forwards that are meant to run at the same time as the action after them.
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
        """The stage whose output this one reads; None for the first."""
        return stage - 1 if stage % (self.stages // self.copies) else None

    def after(self, stage: int) -> int | None:
        """The stage that reads the output of this one; None for the last."""
        return stage + 1 if (stage + 1) % (self.stages // self.copies) else None

    def source_of(self, action: Action) -> int | None:
        """The stage whose F (for F) or B or I (for B and I) of the same micro-batch has to come first."""
        if action.kind == "W":
            return None
        return self.before(action.stage) if action.kind == "F" else self.after(action.stage)

    def micro_batches_of(self, stage: int) -> range:
        """The micro-batches that pass this stage."""
        share = self.micro_batches // self.copies
        first = stage // (self.stages // self.copies) * share
        return range(first, first + share)


class Channel(NamedTuple):
    """One direction of one kind of traffic between two ranks, in which messages keep their order."""

    kind: Literal["activation", "gradient"]
    sender: int
    receiver: int


class Message(NamedTuple):
    """stage: the receiving rank's, which needs the message: the input of its F, or its output's gradient for B or I."""

    stage: int
    micro_batch: int


def sent_by(table: Table, action: Action) -> tuple[Channel, Message] | None:
    """The message that another rank needs and that this action produces."""
    if action.kind == "W":
        return None
    reader = table.after(action.stage) if action.kind == "F" else table.before(action.stage)
    return None if reader is None else _message(table, action, action.stage, reader)


def needed_by(table: Table, action: Action) -> tuple[Channel, Message] | None:
    """The message from another rank without which this action cannot start."""
    source = table.source_of(action)
    return None if source is None else _message(table, action, source, action.stage)


def _message(table: Table, action: Action, source: int, reader: int) -> tuple[Channel, Message] | None:
    sender, receiver = table.rank_of_stage[source], table.rank_of_stage[reader]
    if sender == receiver:
        return None
    kind = "activation" if action.kind == "F" else "gradient"
    return Channel(kind, sender, receiver), Message(reader, action.micro_batch)


def channel_order(table: Table) -> dict[Channel, tuple[Message, ...]]:
    """For every channel its messages in the order in which the sender sends them.

    Sends carry no tags, so the receiver has to post its receives in this order: before an action, all up to the one
    that it needs. Sends must not block the sender's later actions. Stages of one rank exchange no messages.
    """
    orders: dict[Channel, list[Message]] = {}
    for row in table.rows:
        for action in row:
            if sent := sent_by(table, action):
                orders.setdefault(sent[0], []).append(sent[1])
    return {channel: tuple(messages) for channel, messages in orders.items()}


def peak_in_flight(table: Table) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) pairs whose activations are alive at once: from F to the end of B or W.

    One unit is one stage's activations of one micro-batch: with two stages per rank, half of the rank's layers. After
    I a part of them could be freed already; they are counted in full until W.
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
