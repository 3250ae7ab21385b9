"""A simulation of the recorded collectives of many ranks, which finds mismatches and deadlocks without a device.

The rules are NCCL's at its strictest: a rank executes the calls of one communicator (a group and a channel) in order,
one after the other, and each call together with its partners:

- a collective blocks its rank until every member of the group has issued the same call (operation, dtype and size);
- a message is sent only when its receiver is ready, and later calls of that communicator wait for it;
- `isend` and `irecv` block their communicator but not their rank, which continues until it waits for them. The messages
  of one batch are sent concurrently.

Programs that pass cannot hang because of the order of their calls. (Real NCCL is less strict: it does not block a rank
for an asynchronous collective.) mesh_world.py checks a job of thousands of ranks through a few of them.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SEND, RECV, BARRIER = "send", "recv", "barrier"
ISEND, IRECV = "isend", "irecv"  # posted: the rank continues
SENT, WAIT = "sent", "wait"  # the waits for the end of a posted send, and of a posted receive
MESSAGES = (SEND, RECV, ISEND, IRECV, SENT, WAIT)
_SENDS, _RECEIVES, _POSTED, _WAITS = (SEND, ISEND), (RECV, IRECV), (ISEND, IRECV), (SENT, WAIT)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, send, receive or wait, as one rank issues it.

    group: the global ranks of its process group, in group order. channel: name of the group; calls of different groups
    of the same ranks never match. elements: size of the whole tensor (in a gather or a scatter, of all parts together).
    peer: the global rank of the other side of a send or receive, or the root of a broadcast; else -1.
    ticket: for a wait, the number (from 0) of the awaited send or receive among those of this channel and peer.
    label: the place in the program, for messages; never compared. joined: in the same batch as the message before.
    own: number of elements that stay on their rank, for an all-to-all with unequal parts; else -1. The sizes of such
    calls are not compared, because ranks send different amounts.
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
    """The reason why some ranks cannot continue.

    kind: "mismatch" (members of a group issue different calls), "missing" (a rank has ended while others wait) or
    "deadlock" (ranks wait for each other in a circle). positions: rank -> completed calls, of the ranks involved.
    """

    kind: str
    message: str
    positions: dict[int, int]


@dataclass(frozen=True)
class Image:
    """A followed rank (whose program is played) that represents another rank with the same program.

    seen_from: maps a group of the represented rank to the corresponding group of the followed rank. peer_of: maps a
    peer of the followed rank to the corresponding peer of the represented rank.
    """

    followed: int
    seen_from: Callable[[tuple[int, ...]], tuple[int, ...]]
    peer_of: Callable[[int], int]


def first_fault(
    programs: Mapping[int, Sequence[Call]],
    names: Mapping[int, str] | None = None,
    images: Mapping[int, Image] | None = None,
) -> Fault | None:
    """Play all programs to their end and return the first fault, or None.

    programs: the calls of each followed rank, by global rank. Groups may contain other ranks, which are assumed to
    issue their calls in time. names: how the text of a fault refers to each rank. images: for a rank that has no
    program here but sends to or receives from a followed rank, the followed rank that represents it. Any other rank
    without a program is assumed to be always ready to send or receive.
    """
    return _Play(programs, names or {}, images or {}).run()


_Done = tuple[int, tuple[int, Call]]  # a rank, and a completed call with its place in the program


class _Play:
    def __init__(self, programs: Mapping[int, Sequence[Call]], names: Mapping[int, str], images: Mapping[int, Image]):
        self.programs, self.names, self.images = programs, names, images
        self.at = dict.fromkeys(programs, 0)
        self.issued = dict.fromkeys(programs, 0)  # calls issued so far
        self.ready = deque(programs)
        # (rank, group, channel) -> batches of calls that are issued and not completed, in order; each call is (index in
        # the program, call). Most batches have one call.
        self.queues: dict[tuple, deque[list[tuple[int, Call]]]] = defaultdict(deque)
        # Number of completed messages by (rank, group, channel, peer, True for sends).
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

    def representative(self, rank: int) -> int:
        return self.images[rank].followed if rank in self.images else rank

    def present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Return the members of `group` whose programs are played."""
        if group not in self.members:
            self.members[group] = tuple(rank for rank in group if rank in self.programs)
        return self.members[group]

    def advance(self, rank: int) -> Fault | None:
        """Advance `rank` until a call blocks it; return a fault if one appears."""
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
        """Complete the calls of a communicator that can be completed now, after `rank` has added a call to its queue.
        Return a fault if one appears.
        """
        changed = [rank]
        while changed:
            queue = self.queues[rank := changed.pop(), group, channel]
            if not queue:
                continue
            found = self.exchange(rank, queue[0]) if queue[0][0][1].is_p2p else self.collective(rank, *queue[0][0])
            if isinstance(found, Fault):
                return found
            for other, done in found:
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
        """Return the two sides of a message of `batch` that can be sent now (only that of `rank` if the other rank is
        not followed); [] if there is none, or a fault if the two sides differ.
        """
        for at, call in batch:
            image, other = self.images.get(call.peer), self.representative(call.peer)
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

    def collective(self, rank: int, at: int, call: Call) -> list[_Done] | Fault:
        """Return the calls of all followed members of the group if each has issued this collective; else []. Return a
        fault if one has issued another call.
        """
        matched: list[_Done] = []
        for other in self.present(call.group):
            queue = self.queues[other, call.group, call.channel]
            if not queue or queue[0][0][1].is_p2p:
                return []
            if queue[0][0][1].signature != call.signature:
                return self.different(rank, at, call, other, *queue[0][0])
            matched.append((other, queue[0][0]))
        return matched

    def different(self, rank: int, at: int, call: Call, other: int, other_at: int, theirs: Call) -> Fault:
        lines = f"{self.name(rank)}: {call}, its call {at}", f"{self.name(other)}: {theirs}, its call {other_at}"
        return Fault("mismatch", "\n".join(lines), {rank: self.at[rank], other: self.at[other]})

    def left_over(self) -> Fault | None:
        """Return a fault if a posted message is still pending after all programs have ended."""
        for (rank, _, _), queue in self.queues.items():
            if queue:
                _, call = queue[0][0]
                missed = "receiving the message that" if call.op in _SENDS else "sending the message that"
                does = "sent" if call.op in _SENDS else "expects"
                message = f"{self.name(call.peer)} ends without {missed} {self.name(rank)} {does}: {call}"
                return Fault("missing", message, {r: self.at[r] for r in (self.representative(call.peer), rank)})
        return None

    def explain(self, waiting: list[int]) -> Fault:
        """Return the fault that blocks the waiting ranks: follow who waits for whom, until a rank has ended ("missing")
        or comes up again ("deadlock").
        """
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
        """Return the call that blocks a waiting rank, with its index: its current call, or an earlier call on the same
        communicator.
        """
        at, call = self.at[rank], self.programs[rank][self.at[rank]]
        queue = self.queues[rank, call.group, call.channel]
        return queue[0][0] if queue else (at, call)  # an empty queue: the awaited message was never posted

    def waits_for(self, rank: int) -> int:
        """Return a rank that the waiting `rank` waits for."""
        _, call = self.first_undone(rank)
        if call.is_p2p:
            return self.representative(call.peer)
        for other in self.present(call.group):
            queue = self.queues[other, call.group, call.channel]
            if not queue or queue[0][0][1].is_p2p:
                return other
        raise AssertionError(f"rank {rank} is blocked, but no rank that it waits for was found")

    def waits(self, rank: int) -> str:
        at, call = self.at[rank], self.programs[rank][self.at[rank]]
        before, first = self.first_undone(rank)
        queued = f" queued after {first}, its call {before}," if before != at and call.op not in _WAITS else ""
        other = self.waits_for(rank)
        real = first.peer if first.is_p2p else other
        who = self.name(real) if real == other else f"rank {real}, represented by {self.name(other)}"
        return f"{self.name(rank)}: {call}, its call {at},{queued} waits for {who}"

    def name(self, rank: int) -> str:
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank in self.names else "")
