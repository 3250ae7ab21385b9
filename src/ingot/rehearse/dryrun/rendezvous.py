"""Do the collectives of many ranks meet? A simulation of recorded sequences, without a device and without torch.

The rules are those of NCCL where it is strictest: each rank works off what it issues on one communicator (a group and a
channel) in order, one after the other, and each of them only together with its partners:

- a collective holds its rank until every member of the group has come to the same one (operation, dtype and size);
- a message leaves only when its receiver is there for it, and nothing behind it on that communicator goes before;
- `isend` and `irecv` hold their communicator but not their rank, which goes on until it waits for them. Messages of one
  batch leave side by side.

So what passes does not hang for its order. (NCCL does not hold a rank for an asynchronous collective either.)

A world of thousands of ranks is followed through a few of them (theory/mesh_world.py).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SEND, RECV, BARRIER = "send", "recv", "barrier"
ISEND, IRECV = "isend", "irecv"  # posted
SENT, WAIT = "sent", "wait"  # until a posted send, or a posted receive, is done
MESSAGES = (SEND, RECV, ISEND, IRECV, SENT, WAIT)
_SENDS, _RECEIVES, _POSTED, _WAITS = (SEND, ISEND), (RECV, IRECV), (ISEND, IRECV), (SENT, WAIT)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, send or receive, as one rank issues it.

    group: the global ranks of its process group, in group order. channel: which of several groups of the same ranks
    (communicators do not meet each other). elements: of the whole tensor (of all parts together for a gather or a
    scatter). peer: global rank of the other side of a send or receive, or the root of a broadcast; else -1.
    ticket: of a wait: the how-manieth send or receive (from 0) of this channel and peer it waits for.
    label: where in the program it is, for messages; never compared. joined: to the message before it, in one batch.
    own: of an all-to-all of unequal parts, the elements that stay on their rank; else -1. What others put into such a
    one may have another size, so sizes are not compared.
    """

    op: str
    group: tuple[int, ...]
    dtype: str
    elements: int
    channel: str = ""
    peer: int = -1
    label: str = ""
    ticket: int = -1
    joined: bool = False
    own: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.op in MESSAGES

    @property
    def signature(self) -> tuple:
        return self.op, self.dtype, self.elements if self.own < 0 else -1, self.peer

    def __str__(self) -> str:
        other = "" if self.peer < 0 else f" {'to' if self.op in (SEND, ISEND, SENT) else 'from'} rank {self.peer}"
        size = "" if self.op == BARRIER else f" of {self.elements:,} {self.dtype}"
        place = f" [{self.label}]" if self.label else ""
        return f"{self.op}{size}{other}{place}"


@dataclass(frozen=True)
class Fault:
    """Why some ranks cannot go on.

    kind: "mismatch" (members of a group do different things), "missing" (one has ended while others wait) or
    "deadlock" (ranks wait for each other in a circle). positions: of the ranks concerned, how many calls each had done.
    """

    kind: str
    message: str
    positions: dict[int, int]


@dataclass(frozen=True)
class Image:
    """How a followed rank stands for another that does as it does. seen_from: the followed rank's group for one of the
    other's; peer_of: the other's peer for one of the followed rank's."""

    followed: int
    seen_from: Callable[[tuple[int, ...]], tuple[int, ...]]
    peer_of: Callable[[int], int]


def first_fault(
    programs: Mapping[int, Sequence[Call]],
    names: Mapping[int, str] | None = None,
    images: Mapping[int, Image] | None = None,
) -> Fault | None:
    """Play all programs to their end. None, or the first fault.

    programs: the calls of each rank, by global rank; groups may name further ranks, which are then taken to be where
    their fellows are. names: of the ranks, for messages. images: of ranks without a program that messages go to or come
    from; other ranks without one are always ready for a message.
    """
    return _Play(programs, names or {}, images or {}).run()


_Done = tuple[int, tuple[int, Call]]  # a rank, and what it has done at which place in its program


class _Play:
    def __init__(self, programs: Mapping[int, Sequence[Call]], names: Mapping[int, str], images: Mapping[int, Image]):
        self.programs, self.names, self.images = programs, names, images
        self.at = dict.fromkeys(programs, 0)
        self.issued = dict.fromkeys(programs, 0)  # so many calls of its program
        self.ready = deque(programs)
        # What a rank has issued on a communicator (rank, group, channel) and not done, with its place in the program:
        # the batches in turn, most of them of one.
        self.queues: dict[tuple, deque[list[tuple[int, Call]]]] = defaultdict(deque)
        # How many are done, by (rank, group, channel, peer, is it a send).
        self.done: dict[tuple, int] = defaultdict(int)
        self.members: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self) -> Fault | None:
        while self.ready:
            if fault := self.advance(self.ready.popleft()):
                return fault
        waiting = [rank for rank in self.programs if self.head(rank) is not None]
        return self.explain(waiting) if waiting else self.left_over()

    def head(self, rank: int) -> Call | None:
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    def stand_in(self, rank: int) -> int:
        return self.images[rank].followed if rank in self.images else rank

    def present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The members of `group` that are followed."""
        if group not in self.members:
            self.members[group] = tuple(rank for rank in group if rank in self.programs)
        return self.members[group]

    def advance(self, rank: int) -> Fault | None:
        """Let `rank` go on until something holds it."""
        while (call := self.head(rank)) is not None:
            at = self.at[rank]
            if call.op in _WAITS:
                if self.done[rank, call.group, call.channel, call.peer, call.op == SENT] <= call.ticket:
                    return None
                self.at[rank] = self.issued[rank] = at + 1
            elif self.issued[rank] == at:
                self.issued[rank] = at + 1
                queue = self.queues[rank, call.group, call.channel]
                if call.joined and queue:
                    queue[-1].append((at, call))
                else:
                    queue.append([(at, call)])
                if call.op in _POSTED:
                    self.at[rank] = at + 1
                if fault := self.work_off(rank, call.group, call.channel):
                    return fault
            else:
                return None
        return None

    def work_off(self, rank: int, group: tuple[int, ...], channel: str) -> Fault | None:
        """Do what can be done on a communicator, now that `rank` has something new at the head of its queue."""
        changed = [rank]
        while changed:
            queue = self.queues[rank := changed.pop(), group, channel]
            if not queue:
                continue
            met = self.exchange(rank, queue[0]) if queue[0][0][1].is_p2p else self.meet(rank, *queue[0][0])
            if isinstance(met, Fault):
                return met
            for other, done in met:
                self.finish(other, *done)
                changed.append(other)
        return None

    def finish(self, rank: int, at: int, call: Call) -> None:
        queue = self.queues[rank, call.group, call.channel]
        queue[0].remove((at, call))
        if not queue[0]:
            queue.popleft()
        self.done[rank, call.group, call.channel, call.peer, call.op in _SENDS] += 1
        if call.op not in _POSTED:
            self.at[rank] += 1
        self.ready.append(rank)

    def exchange(self, rank: int, batch: list[tuple[int, Call]]) -> list[_Done] | Fault:
        """A message of `batch` that can leave: both its sides, or that of `rank` alone if the other is not followed."""
        for at, call in batch:
            image, other = self.images.get(call.peer), self.stand_in(call.peer)
            if other not in self.programs:
                return [(rank, (at, call))]
            group = image.seen_from(call.group) if image else call.group
            queue = self.queues[other, group, call.channel]
            fitting = _RECEIVES if call.op in _SENDS else _SENDS
            for other_at, theirs in queue[0] if queue else ():
                if theirs.op in fitting and (image.peer_of(theirs.peer) if image else theirs.peer) == rank:
                    if (theirs.dtype, theirs.elements) != (call.dtype, call.elements):
                        return self.different(rank, at, call, other, other_at, theirs)
                    return [(rank, (at, call)), (other, (other_at, theirs))]
        return []

    def meet(self, rank: int, at: int, call: Call) -> list[_Done] | Fault:
        """A collective: all followed members, or nobody yet."""
        met: list[_Done] = []
        for other in self.present(call.group):
            queue = self.queues[other, call.group, call.channel]
            if not queue or queue[0][0][1].is_p2p:
                return []
            if queue[0][0][1].signature != call.signature:
                return self.different(rank, at, call, other, *queue[0][0])
            met.append((other, queue[0][0]))
        return met

    def different(self, rank: int, at: int, call: Call, other: int, other_at: int, theirs: Call) -> Fault:
        lines = f"{self.name(rank)}: {call}, its call {at}", f"{self.name(other)}: {theirs}, its call {other_at}"
        return Fault("mismatch", "\n".join(lines), {rank: self.at[rank], other: self.at[other]})

    def left_over(self) -> Fault | None:
        """All programs ended: nothing that was posted may be left."""
        for (rank, _, _), queue in self.queues.items():
            if queue:
                _, call = queue[0][0]
                missed = "receiving what" if call.op in _SENDS else "sending what"
                does = "sent" if call.op in _SENDS else "expects"
                message = f"{self.name(call.peer)} ends without {missed} {self.name(rank)} {does}: {call}"
                return Fault("missing", message, {r: self.at[r] for r in (self.stand_in(call.peer), rank)})
        return None

    def explain(self, waiting: list[int]) -> Fault:
        """Follow who waits for whom from the first waiting rank until somebody has ended or the circle closes."""
        path: list[int] = []
        rank = waiting[0]
        while rank not in path:
            path.append(rank)
            rank = self.waits_for(rank)
            if self.head(rank) is None:
                last = path[-1]
                message = f"{self.waits(last)}, which has ended after {self.at[rank]} calls"
                return Fault("missing", message, {r: self.at[r] for r in (*path, rank)})
        circle = path[path.index(rank) :]
        lines = [self.waits(r) for r in circle]
        return Fault("deadlock", "\n".join(lines), {r: self.at[r] for r in circle})

    def first_undone(self, rank: int) -> tuple[int, Call]:
        """What holds a waiting rank: its call, or what lies before that on the same communicator."""
        at, call = self.at[rank], self.programs[rank][self.at[rank]]
        queue = self.queues[rank, call.group, call.channel]
        return queue[0][0] if queue else (at, call)  # empty: a wait for what was never posted

    def waits_for(self, rank: int) -> int:
        """A rank that keeps `rank` from going on."""
        _, call = self.first_undone(rank)
        if call.is_p2p:
            return self.stand_in(call.peer)
        for other in self.present(call.group):
            queue = self.queues[other, call.group, call.channel]
            if not queue or queue[0][0][1].is_p2p:
                return other
        raise AssertionError(f"rank {rank} waits for nobody")

    def waits(self, rank: int) -> str:
        at, call = self.at[rank], self.programs[rank][self.at[rank]]
        before, first = self.first_undone(rank)
        behind = f" behind {first}, its call {before}," if before != at and call.op not in _WAITS else ""
        other = self.waits_for(rank)
        real = first.peer if first.is_p2p else other
        who = self.name(real) if real == other else f"rank {real}, which does as {self.name(other)} does"
        return f"{self.name(rank)}: {call}, its call {at},{behind} waits for {who}"

    def name(self, rank: int) -> str:
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank in self.names else "")
