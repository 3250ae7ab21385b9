"""What one pipeline rank has under way at each action of its row: micro-batches between forward and backward, backwards
whose second half is left, and which stages' gradients have begun or ended.

A row of a thousand actions has few different states, and of those fewer still that could be a peak of memory. They are
found once for each schedule and kept.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import ge, le
from typing import NamedTuple

import numpy as np

from ingot.theory.schedule import Action, Kind, Table, build_table

# Micro-batches beyond this many times the ranks repeat what was before: the peaks do not change (only where all
# forwards come first do they grow with their number).
_ROUNDS = 4
_ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")


class Doing(NamedTuple):
    """An action, as far as memory is concerned. stage: among this rank's, in order. first, last: of the backwards of
    its stage in a step. before: the stage of the backward that this rank ended last, -1 if there was none."""

    kind: Kind
    stage: int
    first: bool
    last: bool
    before: int


class Situation(NamedTuple):
    """At one action, itself included. Tuples are by this rank's stages, in order.

    alive: micro-batches that ran forward and not yet backward (B or I). left: those between I and W. begun, ended:
    whether gradients of a stage are there before this action, and whether its last backward is over.
    """

    doing: Doing
    alive: tuple[int, ...]
    left: tuple[int, ...]
    begun: tuple[bool, ...]
    ended: tuple[bool, ...]


@dataclass(frozen=True)
class Row:
    """Of one rank, the situations that could be a peak, and the same as arrays [situation, stage]. doings: those that
    occur; which: for each situation its number among them."""

    situations: tuple[Situation, ...]
    doings: tuple[Doing, ...]
    which: np.ndarray
    alive: np.ndarray
    left: np.ndarray
    begun: np.ndarray
    ended: np.ndarray


def micro_batches_that_matter(schedule: str, pp: int, micro_batches: int) -> int:
    """The smallest number whose peaks are those of `micro_batches`."""
    if pp == 1:
        return min(micro_batches, 3)  # the first, those between, the last
    if schedule in _ALL_FORWARDS_FIRST:
        return micro_batches
    # Interleaved forms want a multiple of pp.
    return min(micro_batches, _ROUNDS * pp)


def row_of(schedule: str, pp: int, micro_batches: int, stages_per_rank: int, rank: int) -> Row:
    return whole_row(schedule, pp, micro_batches_that_matter(schedule, pp, micro_batches), stages_per_rank, rank)


@lru_cache(maxsize=8192)
def whole_row(schedule: str, pp: int, micro_batches: int, stages_per_rank: int, rank: int) -> Row:
    """With all of the micro-batches. A search asks for some ranks of a schedule only."""
    table = _table(schedule, pp, micro_batches, stages_per_rank)
    return _row(_largest(_played(table.rows[rank], table.stages_of(rank))))


@lru_cache(maxsize=64)
def _table(schedule: str, pp: int, micro_batches: int, stages_per_rank: int) -> Table:
    name, each = (schedule, stages_per_rank) if pp > 1 else ("1f1b", 0)
    return build_table(name, pp, micro_batches, each)


def _row(found: tuple[Situation, ...]) -> Row:
    doings = tuple(dict.fromkeys(s.doing for s in found))
    number = {doing: index for index, doing in enumerate(doings)}
    return Row(
        found,
        doings,
        np.array([number[s.doing] for s in found]),
        *(np.array([getattr(s, name) for s in found], dtype=float) for name in ("alive", "left", "begun", "ended")),
    )


def _played(row: tuple[Action, ...], stages: tuple[int, ...]) -> list[Situation]:
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
        doing = Doing(kind, at, first=kind != "F" and not begun[at], last=kind != "F" and is_last, before=before)
        found.append(Situation(doing, tuple(alive), tuple(left), tuple(begun), tuple(ended)))
        if kind in "BI":
            alive[at], begun[at] = alive[at] - 1, True
        left[at] += (kind == "I") - (kind == "W")
        if kind in "BW":
            before, ended[at] = at, number == last_end[action.stage]
    return found


def _largest(found: list[Situation]) -> tuple[Situation, ...]:
    """Without those that hold nothing that another one of the same kind does not hold as well."""
    kept: dict[tuple, list[Situation]] = {}
    for situation in sorted(dict.fromkeys(found), key=_size, reverse=True):
        larger = kept.setdefault((situation.doing.kind, situation.doing.stage, situation.doing.before), [])
        if not any(_holds_all_of(other, situation) for other in larger):
            larger.append(situation)
    return tuple(situation for alike in kept.values() for situation in alike)


def _size(s: Situation) -> tuple[int, int]:
    """Larger than those of all that it could hold all of."""
    return sum(s.alive + s.left), sum(s.begun) - sum(s.ended) - s.doing.first - s.doing.last


def _holds_all_of(one: Situation, other: Situation) -> bool:
    """Gradients that have begun are larger than those of a first backward, those of a last one shrink as it goes on."""
    return (
        one.doing.first <= other.doing.first
        and one.doing.last <= other.doing.last
        and all(map(ge, one.alive, other.alive))
        and all(map(ge, one.left, other.left))
        and all(map(ge, one.begun, other.begun))
        and all(map(le, one.ended, other.ended))
    )
