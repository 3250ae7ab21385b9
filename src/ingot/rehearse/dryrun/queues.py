"""A model checker for streams: can any order of a device's hardware queues make ranks wait for each other forever?

The host of each rank starts kernels on streams. The driver puts each stream into one of a few hardware queues
(CUDA_DEVICE_MAX_CONNECTIONS), so streams that share a queue are ordered although the program does not order them. The
rules of a device here:

- A queue begins its kernels in the order in which the host started them. A kernel begins after the end of the one
  before it on its stream, and of those whose events it waits for; until then, all that follows in its queue waits.
- A kernel that exchanges data with other ranks is resident from its begin until all its partners have begun. At most
  `room` such kernels are resident at once on a rank.
- With `holds`, a queue begins a kernel only after the end of the one before it, also on another stream. CUDA promises
  no more than that: two streams need not make progress side by side.

Without a limit of room nothing that can begin ever loses that ability, so all interleavings end in the same state, and
one of them decides. With a limit, two streams of a rank compete for room, and `find_stuck` tries every winner.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

MOST_STATES = 100_000  # states with a choice that a search visits before it gives up


@dataclass(frozen=True, slots=True)
class KernelStart:
    """A kernel, as the host of one rank starts it. stream: its name. after: earlier starts of the same program, by
    index, whose ends it waits for. exchanges: keys of what it does together with the starts of other ranks that have
    the same key: one collective, or messages; () if it needs no other rank. text: its name for people.
    """

    stream: str
    after: tuple[int, ...] = ()
    exchanges: tuple[Hashable, ...] = ()
    text: str = ""


Programs = Mapping[int, Sequence[KernelStart]]
QueueOf = Mapping[int, Mapping[str, int]]  # rank -> stream -> queue


@dataclass(frozen=True)
class Stuck:
    """A state in which no kernel can begin and some have not ended.

    begun: (rank, index) of the kernels that began, in order, of a shortest way to such a state. circle: lines that
    describe who waits for whom in a circle.
    """

    begun: tuple[tuple[int, int], ...]
    circle: tuple[str, ...]


class Undecided(Exception):
    """A search reached more states than it may visit."""


def one_queue(programs: Programs) -> QueueOf:
    """Return the queues of devices with a single one. They order the most: what does not lock with it and without a
    limit of room does not lock with any other queues."""
    return {rank: {start.stream: 0 for start in program} for rank, program in programs.items()}


def own_queues(programs: Programs) -> QueueOf:
    """Return the queues of devices on which no two streams share one."""
    return {rank: {name: n for n, name in enumerate(streams_of(program))} for rank, program in programs.items()}


def streams_of(program: Sequence[KernelStart]) -> list[str]:
    return list(dict.fromkeys(start.stream for start in program))


def all_queues(programs: Programs, queues: int) -> Iterator[QueueOf]:
    """Yield every way to divide each rank's streams among `queues` queues that all have one, or that have one each."""
    ways = [list(_divisions(streams_of(program), queues)) for program in programs.values()]
    for chosen in product(*ways):
        yield dict(zip(programs, chosen, strict=True))


def _divisions(streams: list[str], queues: int) -> Iterator[dict[str, int]]:
    wanted = min(queues, len(streams))

    def divide(taken: list[int]) -> Iterator[list[int]]:
        used = len(set(taken))
        if len(taken) == len(streams):
            if used == wanted:
                yield taken
            return
        for queue in range(min(used + 1, wanted)):
            yield from divide([*taken, queue])

    for taken in divide([]):
        yield dict(zip(streams, taken, strict=True))


def least_room(programs: Programs, queue_of: QueueOf, most_states: int = MOST_STATES) -> int | None:
    """Return the smallest room with which no order locks; None if they lock with any. Raises Undecided."""
    most = max((len({s.stream for s in program if s.exchanges}) for program in programs.values()), default=0)
    if find_stuck(programs, queue_of) is not None:
        return None
    rooms = range(1, max(most, 1) + 1)  # as many as there are streams is no limit
    for room in rooms:
        if room >= most or find_stuck(programs, queue_of, room=room, most_states=most_states) is None:
            return room
    raise AssertionError("a room for all streams is no limit")


def find_stuck(
    programs: Programs,
    queue_of: QueueOf,
    *,
    room: int | None = None,
    holds: bool = False,
    most_states: int = MOST_STATES,
) -> Stuck | None:
    """Search every order in which the kernels of `programs` can begin for a state where nothing can move.

    room, holds: see the module. An exchange ends when every start of `programs` with its key has begun; other partners
    count as in time, and that partners do the same is for rendezvous.py to check. Returns the stuck state that the
    fewest begins lead to, None if there is none. Raises Undecided after `most_states` states with a choice.
    """
    rules = _Rules(programs, queue_of, room, holds)
    first = _State(rules)
    first.settle()
    seen = {first.key}
    waiting: list[tuple[int, int, _State]] = [(len(first.begun), 0, first)]
    while waiting:
        _, _, state = heapq.heappop(waiting)
        choices = state.able()
        if not choices:
            if state.ended < rules.starts:
                return Stuck(tuple(state.begun), tuple(state.circle()))
            continue
        for rank, queue in choices:
            after = state.copy()
            after.begin(rank, queue)
            after.settle()
            if after.key not in seen:
                if len(seen) >= most_states:
                    raise Undecided
                seen.add(after.key)
                heapq.heappush(waiting, (len(after.begun), len(seen), after))
    return None


class _Rules:
    """The programs as tables: for each (rank, index) of a start, the one before it on its stream and in its queue."""

    def __init__(self, programs: Programs, queue_of: QueueOf, room: int | None, holds: bool):
        self.programs, self.room, self.holds = programs, room, holds
        self.starts = sum(map(len, programs.values()))
        self.queues: dict[int, list[list[int]]] = {}
        self.queue_of = queue_of
        self.on_stream: dict[tuple[int, int], int] = {}
        self.in_queue: dict[tuple[int, int], int] = {}
        self.members: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for rank, program in programs.items():
            queues: dict[int, list[int]] = defaultdict(list)
            latest: dict[str, int] = {}
            for i, start in enumerate(program):
                queue = queues[queue_of[rank][start.stream]]
                self.in_queue[rank, i] = queue[-1] if queue else -1
                self.on_stream[rank, i] = latest.get(start.stream, -1)
                queue.append(i)
                latest[start.stream] = i
                for key in start.exchanges:
                    self.members[key].append((rank, i))
            self.queues[rank] = list(queues.values())


class _State:
    """The kernels that have begun and ended so far. at: for each rank, how many each queue has begun. left: for each
    exchange, the number of starts that have not begun. open: for each resident kernel, the number of its exchanges that
    have not ended. busy: for each rank and stream, the number of kernels with exchanges that have not ended.
    """

    def __init__(self, rules: _Rules):
        self.rules = rules
        self.at = {rank: [0] * len(queues) for rank, queues in rules.queues.items()}
        self.done: set[tuple[int, int]] = set()
        self.left = {key: len(members) for key, members in rules.members.items()}
        self.open: dict[tuple[int, int], int] = {}
        self.begun: list[tuple[int, int]] = []
        self.resident = dict.fromkeys(rules.programs, 0)
        self.busy: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in rules.programs}
        for rank, program in rules.programs.items():
            for start in program:
                if start.exchanges:
                    self.busy[rank][start.stream] += 1

    def copy(self) -> "_State":
        new = object.__new__(_State)
        new.rules, new.begun, new.done = self.rules, self.begun.copy(), self.done.copy()
        new.at = {rank: at.copy() for rank, at in self.at.items()}
        new.left, new.open, new.resident = self.left.copy(), self.open.copy(), self.resident.copy()
        new.busy = {rank: streams.copy() for rank, streams in self.busy.items()}
        return new

    @property
    def key(self) -> tuple:
        """Everything else follows from what has begun."""
        return tuple(tuple(at) for at in self.at.values())

    @property
    def ended(self) -> int:
        return len(self.done)

    def head(self, rank: int, queue: int) -> int | None:
        order, at = self.rules.queues[rank][queue], self.at[rank][queue]
        return order[at] if at < len(order) else None

    def settle(self) -> None:
        """Begin all that can begin and cannot lose its room to another kernel: every way to a stuck state has these
        begins, and they may as well come now."""
        ranks = list(self.rules.programs)
        while ranks:
            rank = ranks.pop()
            for queue in range(len(self.at[rank])):
                while (i := self.head(rank, queue)) is not None and self._can_begin(rank, i) and self._is_free(rank, i):
                    for other in self.begin(rank, queue) - set(ranks):
                        ranks.append(other)

    def able(self) -> list[tuple[int, int]]:
        """Return (rank, queue) of every kernel that can begin."""
        return [
            (rank, queue)
            for rank, at in self.at.items()
            for queue in range(len(at))
            if (i := self.head(rank, queue)) is not None and self._can_begin(rank, i)
        ]

    def begin(self, rank: int, queue: int) -> set[int]:
        """Begin the head of a queue. Returns the ranks on which something ended."""
        i = self.rules.queues[rank][queue][self.at[rank][queue]]
        self.at[rank][queue] += 1
        self.begun.append((rank, i))
        exchanges = self.rules.programs[rank][i].exchanges
        if not exchanges:
            self.done.add((rank, i))
            return {rank}
        self.resident[rank] += 1
        self.open[rank, i] = len(exchanges)
        changed = set()
        for key in exchanges:
            self.left[key] -= 1
            if not self.left[key]:
                for member in self.rules.members[key]:
                    self.open[member] -= 1
                    if not self.open[member]:
                        changed.add(self._end(*member))
        return changed

    def _end(self, rank: int, i: int) -> int:
        self.done.add((rank, i))
        del self.open[rank, i]
        self.resident[rank] -= 1
        busy, stream = self.busy[rank], self.rules.programs[rank][i].stream
        busy[stream] -= 1
        if not busy[stream]:
            del busy[stream]
        return rank

    def _can_begin(self, rank: int, i: int) -> bool:
        return self._waits_for(rank, i) is None

    def _waits_for(self, rank: int, i: int) -> tuple[int, str] | None:
        """Return a kernel of the rank whose end the head `i` of a queue waits for, and why; None if it can begin."""
        rules, start = self.rules, self.rules.programs[rank][i]
        for other in start.after:
            if (rank, other) not in self.done:
                return other, "needs"
        before = rules.on_stream[rank, i]
        if before >= 0 and (rank, before) not in self.done:
            return before, "is on the stream of"
        before = rules.in_queue[rank, i]
        if rules.holds and before >= 0 and (rank, before) not in self.done:
            return before, "is in the queue of"
        if start.exchanges and rules.room is not None and self.resident[rank] >= rules.room:
            return next(j for r, j in self.open if r == rank), "has no room beside"
        return None

    def _is_free(self, rank: int, i: int) -> bool:
        """Return whether no other begin can take the room of `i`: it needs none, or there is enough for all streams, or
        nothing else is at the head of a queue of this rank.

        One whose partners have all begun leaves at once, and still may lose its room before.
        """
        room, start = self.rules.room, self.rules.programs[rank][i]
        return not start.exchanges or room is None or len(self.at[rank]) == 1 or len(self.busy[rank]) <= room

    # -- why nothing moves --

    def circle(self) -> list[str]:
        """Return who waits for whom, a line each, until a kernel comes up again."""
        path: dict[tuple[int, int], str] = {}
        at = min(self.open) if self.open else next(self._heads())
        while at not in path:
            following, why = self._blocker(*at)
            path[at] = f"{self._name(at)} {why} {self._name(following)}"
            at = following
        return list(path.values())[list(path).index(at) :]

    def _heads(self) -> Iterator[tuple[int, int]]:
        for rank, at in self.at.items():
            for queue in range(len(at)):
                if (i := self.head(rank, queue)) is not None:
                    yield rank, i

    def _blocker(self, rank: int, i: int) -> tuple[tuple[int, int], str]:
        if (rank, i) in self.open:  # resident
            key = next(key for key in self.rules.programs[rank][i].exchanges if self.left[key])
            begun = set(self.begun)
            return next(member for member in self.rules.members[key] if member not in begun), "is resident and needs"
        order = self.rules.queues[rank]
        queue = next(q for q, starts in enumerate(order) if i in starts)
        head = self.head(rank, queue)
        assert head is not None
        if head != i:
            return (rank, head), "is in a queue after"
        waits = self._waits_for(rank, i)
        assert waits is not None  # the state is stuck
        return (rank, waits[0]), waits[1]

    def _name(self, member: tuple[int, int]) -> str:
        rank, i = member
        start = self.rules.programs[rank][i]
        return f"rank {rank}: {start.text or start.stream} ({start.stream})"


def way_of(stuck: Stuck, programs: Programs) -> list[str]:
    """Return the begins that lead to a stuck state as lines."""
    starts = [(rank, programs[rank][i]) for rank, i in stuck.begun]
    return [f"rank {rank} begins {start.text or 'work'} ({start.stream})" for rank, start in starts]
