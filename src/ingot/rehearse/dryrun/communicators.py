"""The communicators and streams of a layout, and whether an order of hardware queues can lock its ranks.

Each communicator of NCCL runs on a stream of its own, beside the one that computes. A device has few hardware queues
for them (CUDA_DEVICE_MAX_CONNECTIONS), and PyTorch takes streams of a pool, so no program chooses which of its streams
share one. The safe rule is the strictest: with a single queue no rank may wait forever. queues.py checks that, with the
calls that were traced from the real program.

Traces show when a rank waits for a message and not when it waits for a collective, so here it waits for a collective at
once. With one queue that is on the safe side: with fewer waits, each kernel can begin at least as early.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from ingot.rehearse.dryrun.queues import KernelStart, Programs, Stuck, find_stuck, least_room, one_queue
from ingot.rehearse.dryrun.rendezvous import ISEND, RECV, SEND, SENT, WAIT, Call

QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_QUEUES, MOST_QUEUES = 8, 32  # of CUDA, for devices of compute capability 3.5 and later
COMPUTE = "compute"
# FSDP2's own: copies into a gather, gathers, reduce-scatters, sums over copies (FSDPCommContext of torch 2.13).
OF_FSDP = ("FSDP2 copies", "FSDP2 gathers", "FSDP2 reduces", "FSDP2 sums copies")


@dataclass(frozen=True)
class Communicator:
    """A group with several ranks that a rank is in. purpose: its name, as in logs of NCCL ("mesh_tp"). axes: those on
    which its ranks differ ("dp_shard+cp"). calls: operation -> number of calls of this rank in one step.
    """

    purpose: str
    axes: str
    ranks: int
    calls: dict[str, int]


@dataclass(frozen=True)
class StreamCheck:
    """The streams of a layout, and the verdict over the orders of queues.

    communicators: by rank, the first of each pipeline position. streams: by rank, those that a step uses. queues: of a
    device. one_by_one: a device with one queue may run one kernel after another. room: the number of exchanges that a
    device with one queue must be able to run side by side; None if the ranks lock however many it runs. stuck: then the
    kernels that wait for each other.
    """

    communicators: dict[int, list[Communicator]]
    streams: dict[int, list[str]]
    queues: int
    one_by_one: bool
    room: int | None
    stuck: Stuck | None

    @property
    def widest(self) -> int:
        """The rank with the most streams."""
        return max(self.streams, key=lambda rank: (len(self.streams[rank]), -rank))

    @property
    def most(self) -> int:
        return len(self.streams[self.widest])

    @property
    def enough(self) -> int:
        """The number of exchanges side by side with which no queues lock, however they divide the streams: that of a
        rank's communicators, so none waits for the room of another."""
        return max(sum(bool(one.calls) for one in found) for found in self.communicators.values())

    @property
    def shared(self) -> bool:
        """Return whether streams have to share queues."""
        return self.most > self.queues

    def facts(self) -> dict:
        """Return the check as JSON values; communicators are with the ranks of a dry run."""
        return {
            "streams": self.streams,
            "queues": self.queues,
            "one_by_one": self.one_by_one,
            "room": self.room,
            "enough": self.enough,
            "stuck": None if self.stuck is None else list(self.stuck.circle),
        }


def check_streams(
    calls: Mapping[int, Sequence[Call]],
    communicators: Mapping[int, list[Communicator]],
    queues: int = DEFAULT_QUEUES,
    own_streams: Sequence[str] = (),
) -> StreamCheck:
    """Check ranks whose calls match (rendezvous.first_fault).

    calls: of each rank, from the build on. communicators: of each rank. own_streams: of the program, besides the one
    that computes and those of communicators.
    """
    programs = programs_of(calls)
    queue_of = one_queue(programs)
    one_by_one = find_stuck(programs, queue_of, holds=True) is None
    room = 1 if one_by_one else least_room(programs, queue_of)
    streams = {
        rank: [COMPUTE, *own_streams, *(f"{one.purpose} {one.axes}" for one in found if one.calls)]
        for rank, found in communicators.items()
    }
    stuck = find_stuck(programs, queue_of) if room is None else None
    return StreamCheck(dict(communicators), streams, queues, one_by_one, room, stuck)


def programs_of(calls: Mapping[int, Sequence[Call]]) -> Programs:
    """Return the kernels that the calls of each rank start, in order. Ranks without calls count as in time."""
    return {rank: _RankStarts(rank).of(own) for rank, own in calls.items()}


class _RankStarts:
    """The starts of one rank. Its stream COMPUTE waits for what the program waits for, and every exchange waits for
    what was computed before it.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.starts: list[KernelStart] = [KernelStart(COMPUTE)]
        self.computed = 0  # the last start on COMPUTE
        self.numbers: Counter[Hashable] = Counter()
        self.posted: dict[Hashable, int] = {}  # a message -> the start of its kernel

    def of(self, calls: Sequence[Call]) -> list[KernelStart]:
        for call in calls:
            if call.op in (SENT, WAIT):
                self._compute_after(self.posted[self._way(call, call.op == SENT), call.ticket])
            elif call.is_p2p:
                self._message(call)
            else:
                key = call.group, call.channel
                self._exchange(call, ("all", *key, self._next(("all", *key))))
                self._compute_after(len(self.starts) - 1)
        return self.starts

    def _message(self, call: Call) -> None:
        sends = call.op in (SEND, ISEND)
        way = self._way(call, sends)
        number = self._next(way)
        if call.joined:  # in the kernel of the batch
            last = self.starts[-1]
            self.starts[-1] = KernelStart(
                last.stream, last.after, (*last.exchanges, (way, number)), f"{last.text} + {call}"
            )
        else:
            self._exchange(call, (way, number))
        self.posted[way, number] = len(self.starts) - 1
        if call.op in (SEND, RECV):
            self._compute_after(len(self.starts) - 1)

    def _way(self, call: Call, sends: bool) -> Hashable:
        ends = (self.rank, call.peer) if sends else (call.peer, self.rank)
        return ("message", *ends, call.group, call.channel)

    def _next(self, key: Hashable) -> int:
        self.numbers[key] += 1
        return self.numbers[key] - 1

    def _exchange(self, call: Call, key: Hashable) -> None:
        stream = f"communicator {call.channel} of {len(call.group)} ranks"
        self.starts.append(KernelStart(stream, (self.computed,), (key,), str(call)))

    def _compute_after(self, start: int) -> None:
        self.starts.append(KernelStart(COMPUTE, (start,), text=f"work after {self.starts[start].text}"))
        self.computed = len(self.starts) - 1


Made = tuple[str, str, tuple[int, ...], str]  # name, purpose, ranks and axes of a group


def communicators_of(made: Sequence[Made], step: Sequence[Call]) -> list[Communicator]:
    """Return a rank's communicators with several ranks. made: its groups. step: its calls in one step."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for call in step:
        if call.op not in (SENT, WAIT):
            other = f" to {call.peer}" if call.op in (SEND, ISEND) else f" from {call.peer}"
            used[call.channel][call.op + (other if call.is_p2p else "")] += 1
    return [
        Communicator(purpose, axes, len(ranks), dict(used.get(name, {})))
        for name, purpose, ranks, axes in made
        if len(ranks) > 1
    ]
