"""Do the collectives of many ranks meet? A simulation of recorded sequences, without a device and without torch.

The rules are stricter than those of NCCL or gloo, so what passes here cannot hang there for its order: a collective
holds its rank until every member of the group has come to the same one (same operation, dtype and size); a send leaves
at once; a posted receive (irecv) costs nothing until it is waited for, which holds its rank until the message has been
sent, as a plain receive does; messages between two ranks on one channel arrive in the order in which they were sent.

A world of thousands of ranks is followed through a few of them (theory/mesh_world.py).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SEND, RECV, BARRIER = "send", "recv", "barrier"
IRECV, WAIT = "irecv", "wait"  # a receive that is posted, and waited for later


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, send or receive, as one rank issues it.

    group: the global ranks of its process group, in group order. channel: which of several groups of the same ranks
    (communicators do not meet each other). elements: of the whole tensor (of all parts together for a gather or a
    scatter). peer: global rank of the other side of a send or receive, or the root of a broadcast; else -1.
    ticket: of a wait: the how-manieth receive (from 0) of this channel and peer it waits for.
    label: where in the program it is, for messages; never compared.
    """

    op: str
    group: tuple[int, ...]
    dtype: str
    elements: int
    channel: str = ""
    peer: int = -1
    label: str = ""
    ticket: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.op in (SEND, RECV, IRECV, WAIT)

    @property
    def signature(self) -> tuple:
        return self.op, self.dtype, self.elements, self.peer

    def __str__(self) -> str:
        other = "" if self.peer < 0 else f" {'to' if self.op == SEND else 'from'} rank {self.peer}"
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


def first_fault(programs: Mapping[int, Sequence[Call]], names: Mapping[int, str] | None = None) -> Fault | None:
    """Play all programs to their end. None, or the first fault.

    programs: the calls of each rank, by global rank; groups may name further ranks, which are then taken to be where
    their fellows are. names: of the ranks, for messages.
    """
    return _Play(programs, names or {}).run()


class _Play:
    def __init__(self, programs: Mapping[int, Sequence[Call]], names: Mapping[int, str]):
        self.programs, self.names = programs, names
        self.at = dict.fromkeys(programs, 0)
        # By (group, channel, sender, receiver): messages sent, and receives posted, in their order.
        self.sent: dict[tuple, list[Call]] = defaultdict(list)
        self.posted: dict[tuple, list[Call]] = defaultdict(list)
        self.members: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self) -> Fault | None:
        ready = deque(self.programs)
        while ready:
            rank = ready.popleft()
            while (call := self.head(rank)) is not None:
                if call.is_p2p:
                    done = self.exchange(rank, call, ready)
                else:
                    done = self.meet(rank, call, ready)
                if isinstance(done, Fault):
                    return done
                if not done:
                    break
        waiting = [rank for rank in self.programs if self.head(rank) is not None]
        return self.explain(waiting) if waiting else self.unread()

    def head(self, rank: int) -> Call | None:
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    def present(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The members of `group` that are followed."""
        if group not in self.members:
            self.members[group] = tuple(rank for rank in group if rank in self.programs)
        return self.members[group]

    def exchange(self, rank: int, call: Call, ready: deque) -> bool | Fault:
        """A send or receive that touches a rank that is not followed always succeeds."""
        if call.peer in self.programs:
            if call.op == SEND:
                self.sent[call.group, call.channel, rank, call.peer].append(call)
                ready.append(call.peer)
            else:
                return self.receive(rank, call, (call.group, call.channel, call.peer, rank))
        self.at[rank] += 1
        return True

    def receive(self, rank: int, call: Call, way: tuple) -> bool | Fault:
        sent, posted = self.sent[way], self.posted[way]
        number = call.ticket if call.op == WAIT else len(posted)
        if call.op != IRECV:
            if number >= len(sent):
                return False
            wanted, message = posted[number] if call.op == WAIT else call, sent[number]
            if (wanted.dtype, wanted.elements) != (message.dtype, message.elements):
                return self.different(rank, wanted, call.peer, message)
        if call.op != WAIT:
            posted.append(call)
        self.at[rank] += 1
        return True

    def meet(self, rank: int, call: Call, ready: deque) -> bool | Fault:
        present = self.present(call.group)
        for other in present:
            theirs = self.head(other)
            if theirs is None or theirs.is_p2p or (theirs.group, theirs.channel) != (call.group, call.channel):
                return False
            if theirs.signature != call.signature:
                return self.different(rank, call, other, theirs)
        for other in present:
            self.at[other] += 1
            if other != rank:
                ready.append(other)
        return True

    def different(self, rank: int, call: Call, other: int, theirs: Call) -> Fault:
        mine, its = f"{self.name(rank)}: {call}, its call {self.at[rank]}", f"{self.name(other)}: {theirs}"
        if not theirs.is_p2p:
            its += f", its call {self.at[other]}"
        return Fault("mismatch", f"{mine}\n{its}", {rank: self.at[rank], other: self.at[other]})

    def unread(self) -> Fault | None:
        """All programs ended: nothing that was sent may be left, and nothing may be waited for in vain."""
        for way in self.sent.keys() | self.posted.keys():
            sent, posted = self.sent[way], self.posted[way]
            _, _, sender, receiver = way
            where = {receiver: self.at[receiver], sender: self.at[sender]}
            if len(sent) > len(posted):
                message = f"{self.name(receiver)} ends without receiving what {self.name(sender)} sent"
                return Fault("missing", f"{message}: {sent[len(posted)]}", where)
            if len(posted) > len(sent):
                message = f"{self.name(sender)} ends without sending what {self.name(receiver)} expects"
                return Fault("missing", f"{message}: {posted[len(sent)]}", where)
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
                message = f"{self.waits(last)} {self.name(rank)}, which has ended after {self.at[rank]} calls"
                return Fault("missing", message, {r: self.at[r] for r in (*path, rank)})
        circle = path[path.index(rank) :]
        lines = [f"{self.waits(r)} {self.name(self.waits_for(r))}" for r in circle]
        return Fault("deadlock", "\n".join(lines), {r: self.at[r] for r in circle})

    def waits_for(self, rank: int) -> int:
        """A rank that keeps `rank` from going on."""
        call = self.programs[rank][self.at[rank]]
        if call.is_p2p:
            return call.peer
        for other in self.present(call.group):
            theirs = self.head(other)
            if theirs is None or theirs.is_p2p or (theirs.group, theirs.channel) != (call.group, call.channel):
                return other
        raise AssertionError(f"rank {rank} waits for nobody")

    def waits(self, rank: int) -> str:
        call = self.programs[rank][self.at[rank]]
        return f"{self.name(rank)}: {call}, its call {self.at[rank]}, waits for"

    def name(self, rank: int) -> str:
        return f"rank {rank}" + (f" ({self.names[rank]})" if rank in self.names else "")
