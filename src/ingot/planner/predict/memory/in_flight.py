"""The work in flight on one pipeline rank at each action of its row of the schedule.

In flight are micro-batches between forward and backward, inputs kept for a delayed W, and gradients of stages whose
backwards have begun. A row of a thousand actions has few different states, and only some of these could be the peak of
memory. They are computed once for each schedule and cached.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import ge, le
from typing import NamedTuple

import numpy as np

from ingot.theory.schedule import Action, Kind, ScheduleTable, build_table

# More micro-batches than this many times the ranks only repeat earlier states, so the peak does not change, except in
# schedules that run all forwards first.
_ROUNDS = 4
_ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")


class MemoryAction(NamedTuple):
    """The properties of an action on which memory depends.

    kind: F, B, I or W. stage: index among this rank's stages. first, last: the action is the first or last backward of
      its stage in a step. before: the stage of the backward that this rank ended last, -1 if there was none.
    """

    kind: Kind
    stage: int
    first: bool
    last: bool
    before: int


class InFlight(NamedTuple):
    """The state of a rank while one action runs. Tuples have one entry per stage of the rank, in order.

    doing: the action. alive: number of micro-batches that ran forward and not yet backward (B or I). left: number of
      micro-batches between I and W. begun: the stage has gradients before this action. ended: its last backward is
      over.
    """

    doing: MemoryAction
    alive: tuple[int, ...]
    left: tuple[int, ...]
    begun: tuple[bool, ...]
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class RankHistory:
    """The states of one rank in which memory could be at its peak.

    doings: the distinct actions. which: [state] the index of each state's action in `doings`. alive, left, begun,
    ended: the fields of the states as arrays [state, stage].
    """

    situations: tuple[InFlight, ...]
    doings: tuple[MemoryAction, ...]
    which: np.ndarray
    alive: np.ndarray
    left: np.ndarray
    begun: np.ndarray
    ended: np.ndarray


def micro_batches_that_matter(schedule: str, pp: int, micro_batches: int) -> int:
    """Return the smallest number of micro-batches that has the same memory peak as `micro_batches`."""
    if pp == 1:
        return min(micro_batches, 3)  # the first, those between, the last
    if schedule in _ALL_FORWARDS_FIRST:
        return micro_batches
    # Interleaved forms need a multiple of pp.
    return min(micro_batches, _ROUNDS * pp)


def history_of(schedule: str, pp: int, micro_batches: int, stages_per_rank: int, rank: int) -> RankHistory:
    """Return the states of a rank in which memory could be at its peak. Micro-batches that only repeat earlier states
    are left out."""
    return full_history(schedule, pp, micro_batches_that_matter(schedule, pp, micro_batches), stages_per_rank, rank)


@lru_cache(maxsize=8192)
def full_history(schedule: str, pp: int, micro_batches: int, stages_per_rank: int, rank: int) -> RankHistory:
    """Return the history of one rank with all `micro_batches`. The result is cached by rank, because a search needs
    only some ranks of a schedule."""
    table = _table(schedule, pp, micro_batches, stages_per_rank)
    return _history(_largest(_played(table.rows[rank], table.stages_of(rank))))


@lru_cache(maxsize=64)
def _table(schedule: str, pp: int, micro_batches: int, stages_per_rank: int) -> ScheduleTable:
    name, each = (schedule, stages_per_rank) if pp > 1 else ("1f1b", 0)
    return build_table(name, pp, micro_batches, each)


def _history(found: tuple[InFlight, ...]) -> RankHistory:
    doings = tuple(dict.fromkeys(s.doing for s in found))
    number = {doing: index for index, doing in enumerate(doings)}
    return RankHistory(
        found,
        doings,
        np.array([number[s.doing] for s in found]),
        *(np.array([getattr(s, name) for s in found], dtype=float) for name in ("alive", "left", "begun", "ended")),
    )


def _played(row: tuple[Action, ...], stages: tuple[int, ...]) -> list[InFlight]:
    place = {stage: index for index, stage in enumerate(stages)}
    alive, left = [0] * len(stages), [0] * len(stages)
    begun, ended = [False] * len(stages), [False] * len(stages)
    last_begin = {action.stage: number for number, action in enumerate(row) if action.kind in "BI"}
    last_end = {action.stage: number for number, action in enumerate(row) if action.kind in "BW"}
    found, before = [], -1
    for number, action in enumerate(row):
        at, kind = place[action.stage], action.kind
        if kind == "F":
            alive[at] += 1
        is_last = number == (last_end if kind == "W" else last_begin)[action.stage]
        doing = MemoryAction(kind, at, first=kind != "F" and not begun[at], last=kind != "F" and is_last, before=before)
        found.append(InFlight(doing, tuple(alive), tuple(left), tuple(begun), tuple(ended)))
        if kind in "BI":
            alive[at], begun[at] = alive[at] - 1, True
        left[at] += (kind == "I") - (kind == "W")
        if kind in "BW":
            before, ended[at] = at, number == last_end[action.stage]
    return found


def _largest(found: list[InFlight]) -> tuple[InFlight, ...]:
    """Return the states without those for which another state of the same kind of action holds at least as much."""
    kept: dict[tuple, list[InFlight]] = {}
    for situation in sorted(dict.fromkeys(found), key=_size, reverse=True):
        larger = kept.setdefault((situation.doing.kind, situation.doing.stage, situation.doing.before), [])
        if not any(_holds_all_of(other, situation) for other in larger):
            larger.append(situation)
    return tuple(situation for alike in kept.values() for situation in alike)


def _size(s: InFlight) -> tuple[int, int]:
    """Return a sort key: a state that holds at least as much as another never has a smaller key."""
    return sum(s.alive + s.left), sum(s.begun) - sum(s.ended) - s.doing.first - s.doing.last


def _holds_all_of(one: InFlight, other: InFlight) -> bool:
    """Return True if `one` holds at least as much as `other` in every respect.

    An action that is a stage's first or last backward counts as holding fewer gradients than one in between.
    """
    return (
        one.doing.first <= other.doing.first
        and one.doing.last <= other.doing.last
        and all(map(ge, one.alive, other.alive))
        and all(map(ge, one.left, other.left))
        and all(map(ge, one.begun, other.begun))
        and all(map(le, one.ended, other.ended))
    )
