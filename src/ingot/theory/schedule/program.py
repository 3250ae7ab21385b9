"""The step time of a schedule without its timeline: a table is compiled once, then played with any action times.

The planner needs thousands of pipelines that differ only in their times. In a long step most micro-batches take as long
as those before them, so two short steps of different lengths give the time of each further micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ingot.theory.schedule.build import build_table
from ingot.theory.schedule.table import ScheduleTable

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
