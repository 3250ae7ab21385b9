"""The simulation of a table: start and end of each action from given action times, the timeline as text, and the step
time alone for thousands of pipelines that differ only in their times.

To get the step time alone, a table is compiled once and played with any action times. In a long step most micro-batches
take as long as those before them, so two short steps of different lengths give the time of each further micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ingot.errors import ConfigError
from ingot.theory.schedule.build import build_table
from ingot.theory.schedule.table import Action, ScheduleTable, check_table, peak_in_flight, sent_by


@dataclass(frozen=True)
class Timeline:
    """The simulated times of a table. starts[r][i], ends[r][i]: start and end of action i of rank r, measured from the
    start of the step in the unit of the given times. busy[r]: the time in which rank r works.
    """

    table: ScheduleTable
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...] = field(repr=False)

    @property
    def step_time(self) -> float:
        """The time until the last rank is done. The other ranks wait for this rank before the optimizer step, which
        needs the norm of the whole gradient.
        """
        return max(ends[-1] for ends in self.ends)

    @property
    def span(self) -> float:
        """The longest time between the first start and the last end of a rank. This is the time of a step if ranks do
        not wait for each other after it; zero-bubble schedules are published with this time (Qi et al. 2023).
        """
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """The share of step_time in which a rank is idle, averaged over ranks."""
        return 1 - sum(self.busy) / (len(self.busy) * self.step_time)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        return peak_in_flight(self.table)


def simulate(
    table: ScheduleTable,
    *,
    forward: float | Sequence[float],
    backward_input: float | Sequence[float],
    backward_weight: float | Sequence[float],
    send: float = 0.0,
    overlap_sends: bool = True,
    overlapped: float | Callable[[Action, Action], float] | None = None,
) -> Timeline:
    """Play the table: every action starts when its rank is free and its input has arrived.

    forward, backward_input, backward_weight: the time of one micro-batch on one stage, or one time per stage; B takes
      the sum of the last two.
    send: time from the end of an action until its result is on another rank; with overlap_sends the sender continues
      at once. Every message has the full bandwidth of its link.
    overlapped: the time of a forward and a backward that the table runs together (DualPipe's F&B): the same for all
      pairs, or a function of the two (see `pair_seconds`); None: they run one after the other.
    Raises ConfigError if the table cannot be played. Simulating one action takes about 3 microseconds.
    """
    f, i, w = (_per_stage(table, time) for time in (forward, backward_input, backward_weight))
    times = {"F": f, "B": [a + b for a, b in zip(i, w, strict=True)], "I": i, "W": w}
    together = tuple(frozenset(row) for row in table.overlaps) if overlapped is not None else ()
    clock = _Playback(table, send)
    starts: list[list[float]] = [[] for _ in table.rows]
    ends: list[list[float]] = [[] for _ in table.rows]
    busy = [0.0] * table.ranks
    runnable = list(range(table.ranks))
    while runnable:
        rank = runnable.pop()
        row, free = table.rows[rank], clock.free[rank]
        while (position := len(ends[rank])) < len(row):
            pair = bool(together) and position in together[rank]
            actions = row[position : position + 2] if pair else (row[position],)
            start = clock.ready(rank, actions, free)
            if start is None:
                break
            if pair and overlapped is not None:
                time = overlapped(*actions) if callable(overlapped) else overlapped
            else:
                time = times[actions[0].kind][actions[0].stage]
            free = start + time
            busy[rank] += time
            for action in actions:
                starts[rank].append(start)
                ends[rank].append(start + time)
                runnable += clock.finish(action, start + time)
                if not overlap_sends and clock.sends(action):
                    free += send
        clock.free[rank] = free
    if any(len(done) < len(row) for done, row in zip(ends, table.rows, strict=True)):
        check_table(table)
        raise ConfigError(
            "E-SCHEDULE-OVERLAP",
            f"the pipeline schedule {table.name!r} cannot be played with its overlaps",
            rule="a forward and a backward that run together must not need each other's results",
            fix="simulate the table without a time for overlapped pairs",
            schedule=table.name,
        )
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy))


class _Playback:
    """The state of a simulation: the time at which each result is ready, and the rank that waits for each result."""

    def __init__(self, table: ScheduleTable, send: float):
        self.free = [0.0] * table.ranks
        ranks, stages = table.rank_of_stage, range(table.stages)
        self._source = {True: [table.before(s) for s in stages], False: [table.after(s) for s in stages]}
        self._delay = {
            way: [send if source is not None and ranks[source] != ranks[s] else 0.0 for s, source in enumerate(sources)]
            for way, sources in self._source.items()
        }
        self._done: dict[tuple[bool, int, int], float] = {}
        self._waiting: dict[tuple[bool, int, int], int] = {}
        self._table = table

    def ready(self, rank: int, actions: tuple[Action, ...], free: float) -> float | None:
        """Return the time when all `actions` of `rank` can start. None: an input has not been computed yet; `finish`
        returns this rank when that input is done. free: the time from which the rank is free.
        """
        for action in actions:
            if action.kind == "W":
                continue
            forward = action.kind == "F"
            source = self._source[forward][action.stage]
            if source is None:
                continue
            key = (forward, source, action.micro_batch)
            done = self._done.get(key)
            if done is None:
                self._waiting[key] = rank
                return None
            free = max(free, done + self._delay[forward][action.stage])
        return free

    def finish(self, action: Action, end: float) -> tuple[int, ...]:
        """Record the end of an action, and return the rank that waited for it, if any."""
        if action.kind == "W":
            return ()
        key = (action.kind == "F", action.stage, action.micro_batch)
        self._done[key] = end
        waiter = self._waiting.pop(key, None)
        return () if waiter is None else (waiter,)

    def sends(self, action: Action) -> bool:
        return sent_by(self._table, action) is not None


def _per_stage(table: ScheduleTable, time: float | Sequence[float]) -> list[float]:
    if isinstance(time, int | float):
        return [float(time)] * table.stages
    if len(time) != table.stages:
        raise ConfigError(
            "E-SCHEDULE-TIMES",
            f"{len(time)} times were given for {table.stages} stages",
            rule="there is one time for all stages, or one time for each stage",
            fix=f"give one number, or {table.stages} numbers",
            times=len(time),
            stages=table.stages,
        )
    return [float(t) for t in time]


_IDLE, _BUSY = ".", "-"


def timeline_text(timeline: Timeline | ScheduleTable, width: int = 120) -> str:
    """Return the timeline as text, with one line of at most `width` columns per rank.

    F0, B0, I0, W0 mark the column where an action starts; dashes show how long it lasts, dots that the rank is idle;
    F4&b1 are two actions that run together. Every second stage of a rank is in lower case. Numbers that do not fit are
    left out. A ScheduleTable is first simulated with F = I = W.
    """
    if isinstance(timeline, ScheduleTable):
        timeline = simulate(timeline, forward=1.0, backward_input=1.0, backward_weight=1.0)
    names = [f"rank {rank}" for rank in range(timeline.table.ranks)]
    margin = max(map(len, names)) + 1
    scale = _columns_per_time(timeline, max(width - margin, 1))
    lines = [_line(timeline, rank, scale) for rank in range(timeline.table.ranks)]
    return "\n".join(f"{name:<{margin}}{line}" for name, line in zip(names, lines, strict=True))


def _columns_per_time(timeline: Timeline, columns: int) -> float:
    """Return the number of columns per unit of time: the largest that fits. If there is room, the shortest action has a
    whole number of columns, so that equal actions look equal.
    """
    scale = columns / timeline.step_time
    times = [
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    shortest = min(time for time in times if time > 0)
    # Sums of times are off by rounding: 2.9999999 columns are 3.
    return int(scale * shortest + 1e-6) / shortest if scale * shortest >= 2 else scale


def _line(timeline: Timeline, rank: int, scale: float) -> str:
    local = {stage: index for index, stage in enumerate(timeline.table.stages_of(rank))}
    cells = [_IDLE] * max(round(timeline.step_time * scale), 1)
    pair = ""
    for action, start, end, after in zip(
        timeline.table.rows[rank],
        timeline.starts[rank],
        timeline.ends[rank],
        (*timeline.starts[rank][1:], None),
        strict=True,
    ):
        kind = action.kind.lower() if local[action.stage] % 2 else action.kind
        label = f"{pair}{kind}{action.micro_batch}"
        if start == after and end > start:  # the next action runs at the same time
            pair = f"{label}&"
            continue
        first = min(round(start * scale), len(cells) - 1)
        size = max(round(end * scale) - first, 1)
        short = pair[:1] or kind
        cells[first : first + size] = (label if len(label) <= size else short).ljust(size, _BUSY)
        pair = ""
    return "".join(cells)


# -- step times without a timeline --


Times = tuple[Sequence[float], Sequence[float], Sequence[float]]  # F, I and W of every stage

_KINDS = "FBIW"
# Schedules whose ranks check the norm of the gradient only after the update, so that they do not wait for each other
# before the next step (Qi et al. 2023, section 4).
_APART = ("zb_h2", "zb_2p")
# Number of rounds of `pp` micro-batches that are really played; the time of the others is extrapolated.
_PLAYED = 4


@dataclass(frozen=True)
class Program:
    """A compiled table.

    rows: one entry per action, in an order in which all can be played: (its rank, the index of its time, which is kind
      x stages + stage, the position in `rows` of the action whose result it needs or -1, True if that action is on
      another rank).
    waits: ranks wait for each other at the end of a step.
    """

    ranks: int
    stages: int
    rows: tuple[tuple[int, int, int, bool], ...]
    waits: bool = True

    def play(self, times: Times, send: float = 0.0) -> float:
        """Return the step_time of theory/schedule/simulate.py, or its span if ranks do not wait for each other at the
        end. send: seconds of a message between ranks.
        """
        forward, inputs, weights = times
        both = [i + w for i, w in zip(inputs, weights, strict=True)]
        seconds = [*forward, *both, *inputs, *weights]
        free = [0.0] * self.ranks
        ends: list[float] = []
        done = ends.append
        for rank, slot, source, far in self.rows:
            start = free[rank]
            if source >= 0:
                ready = ends[source] + send if far else ends[source]
                if ready > start:
                    start = ready
            start += seconds[slot]
            free[rank] = start
            done(start)
        if self.waits:
            return max(free)
        return max(end - begin for end, begin in zip(free, self._begins(ends, seconds), strict=True))

    def _begins(self, ends: list[float], seconds: list[float]) -> list[float]:
        """Return the start time of each rank."""
        first = {rank: i for i, (rank, *_) in reversed(list(enumerate(self.rows)))}
        return [ends[first[rank]] - seconds[self.rows[first[rank]][1]] for rank in range(self.ranks)]


def compile_table(table: ScheduleTable) -> Program:
    """Compile a table into a Program. The table must be playable (`check_table`)."""
    stages, owner = table.stages, table.rank_of_stage
    sources = {"F": [table.before(s) for s in range(stages)], "B": [table.after(s) for s in range(stages)]}
    sources["I"] = sources["B"]
    done: dict[tuple[bool, int, int], int] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    next_action, runnable, rows = [0] * table.ranks, list(range(table.ranks)), []
    while runnable:
        rank = runnable.pop()
        row = table.rows[rank]
        position = next_action[rank]
        while position < len(row):
            action = row[position]
            kind, stage, m = action.kind, action.stage, action.micro_batch
            slot, source = _KINDS.index(kind) * stages + stage, None if kind == "W" else sources[kind][stage]
            needed = -1
            if source is not None:
                key = (kind == "F", source, m)
                needed = done.get(key, -1)
                if needed < 0:
                    waiting[key] = rank
                    break
            if kind != "W":
                key = (kind == "F", stage, m)
                done[key] = len(rows)
                if (waiter := waiting.pop(key, None)) is not None:
                    runnable.append(waiter)
            rows.append((rank, slot, needed, source is not None and owner[source] != rank))
            position += 1
        next_action[rank] = position
    return Program(table.ranks, stages, tuple(rows), table.name not in _APART)


@lru_cache(maxsize=128)
def program(name: str, pp: int, micro_batches: int, stages_per_rank: int = 0) -> Program:
    return compile_table(build_table(name, pp, micro_batches, stages_per_rank))


def pipeline_seconds(
    name: str, pp: int, micro_batches: int, stages_per_rank: int, times: Times, send: float = 0.0
) -> float:
    """Return the step_time of `simulate`, or the span for zb_h2 and zb_2p.

    After some rounds of `pp` micro-batches, each further round is assumed to take as long as the last: this is exact
    for equal stages, and within 2% for others (a test compares).
    """
    period = pp if name != "dualpipe" or pp % 2 == 0 else 2 * pp
    long = (_PLAYED if name != "zb_2p" else 2 * _PLAYED) * period
    if name == "looped_bfs" or micro_batches <= long + period:
        return program(name, pp, micro_batches, stages_per_rank).play(times, send)
    long += (micro_batches - long) % period
    played = program(name, pp, long, stages_per_rank).play(times, send)
    shorter = program(name, pp, long - period, stages_per_rank).play(times, send)
    return played + (micro_batches - long) / period * (played - shorter)
