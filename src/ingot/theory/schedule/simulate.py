"""When a table's actions start and end, given how long each takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ingot.errors import ConfigError
from ingot.theory.schedule.check import check_table
from ingot.theory.schedule.table import Action, Table, peak_in_flight, sent_by


@dataclass(frozen=True)
class Timeline:
    """starts[r][i], ends[r][i]: of action i in row r, in the unit of the given times, from the start of the step."""

    table: Table
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...] = field(repr=False)

    @property
    def step_time(self) -> float:
        """Until the last rank is done: all wait for each other before the optimizer step (norm of the gradient)."""
        return max(ends[-1] for ends in self.ends)

    @property
    def span(self) -> float:
        """The longest time between a rank's first start and last end: what a step costs if ranks need not wait for
        each other after it. Zero-bubble schedules are published in this sense (Qi et al. 2023)."""
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in step_time in which they do nothing."""
        return 1 - sum(self.busy) / (len(self.busy) * self.step_time)

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        return peak_in_flight(self.table)


def simulate(
    table: Table,
    *,
    forward: float | Sequence[float],
    backward_input: float | Sequence[float],
    backward_weight: float | Sequence[float],
    send: float = 0.0,
    overlap_sends: bool = True,
    overlapped: float | None = None,
) -> Timeline:
    """Plays the table: every action starts when its rank is free and what it needs has arrived.

    forward, backward_input, backward_weight: time of one micro-batch on one stage, or a time for each stage; B takes
    the sum of the last two. send: from the end of an action until its result is on another rank; with overlap_sends
    the sender goes on meanwhile. Messages do not share the bandwidth of a link.
    overlapped: time of a forward and a backward that the table runs together (DualPipe's F&B; two stages at a time, so
    given for all); None: one after the other.
    Raises ConfigError where the table cannot be played. About 3 microseconds per action.
    """
    f, i, w = (_per_stage(table, time) for time in (forward, backward_input, backward_weight))
    times = {"F": f, "B": [a + b for a, b in zip(i, w, strict=True)], "I": i, "W": w}
    together = tuple(frozenset(row) for row in table.overlaps) if overlapped is not None else ()
    clock = _Clock(table, send)
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
            time = overlapped if pair and overlapped is not None else times[actions[0].kind][actions[0].stage]
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
            f"the pipeline schedule {table.name!r} cannot be played with its overlaps",
            rule="a forward and a backward that run together must not need each other's results",
            fix="simulate it without a time for overlapped pairs",
        )
    return Timeline(table, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy))


class _Clock:
    """What has been computed when, and which rank waits for what."""

    def __init__(self, table: Table, send: float):
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
        """When all these can start; None if something has not been computed yet (the rank then waits for it)."""
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
        """Notes the end; returns the rank that waited for it, if any."""
        if action.kind == "W":
            return ()
        key = (action.kind == "F", action.stage, action.micro_batch)
        self._done[key] = end
        waiter = self._waiting.pop(key, None)
        return () if waiter is None else (waiter,)

    def sends(self, action: Action) -> bool:
        return sent_by(self._table, action) is not None


def _per_stage(table: Table, time: float | Sequence[float]) -> list[float]:
    if isinstance(time, int | float):
        return [float(time)] * table.stages
    if len(time) != table.stages:
        raise ConfigError(f"{len(time)} times for {table.stages} stages", rule="one time, or one for each stage")
    return [float(t) for t in time]
