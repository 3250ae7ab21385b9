"""A world of thousands of ranks, followed through a few of them.

All ranks at one pipeline position run the same program, told relative to their place in the mesh: where one of them
talks to the ranks beside it on the tp axis, so does every other. Such ranks move in lockstep, for whatever one of them
waits for comes to all of them at the same time. So one rank for each pipeline position stands for all, and a group that
spans other axes is complete when its followed members are there. Whether they do run the same program is looked at, on
the ranks that are first and last on each axis; where they differ, all those corners are followed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ingot.theory.rendezvous import Call, Fault, first_fault


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh, row-major. sizes: axis -> degree, outermost first."""

    sizes: Mapping[str, int]

    def coordinates(self, rank: int) -> tuple[int, ...]:
        found = []
        for size in reversed(tuple(self.sizes.values())):
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(reversed(found))

    def rank(self, coordinates: Sequence[int]) -> int:
        rank = 0
        for size, coordinate in zip(self.sizes.values(), coordinates, strict=True):
            rank = rank * size + coordinate
        return rank

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """The axes on which members of `group` differ."""
        places = [self.coordinates(rank) for rank in group]
        return tuple(axis for i, axis in enumerate(self.sizes) if len({place[i] for place in places}) > 1)

    def corners(self, fixed: str) -> list[tuple[int, ...]]:
        """Coordinates that are first or last on every axis but `fixed`, at coordinate 0 of that; first ones first."""
        ends = [(0,) if axis == fixed or size == 1 else (0, size - 1) for axis, size in self.sizes.items()]
        return list(product(*ends))

    def moved_group(self, group: tuple[int, ...], here: int, there: int) -> tuple[int, ...]:
        """What `group` of rank `here` is for rank `there`: the same on the axes it spans, `there`'s place on others.

        Raises ValueError if `there` has no place in it.
        """
        spanned, place = self.axes(group), self.coordinates(there)
        moved = tuple(
            self.rank([c if axis in spanned else p for axis, c, p in zip(self.sizes, member, place, strict=True)])
            for member in map(self.coordinates, group)
        )
        if there not in moved:
            raise ValueError(f"rank {there} has no part in what is group {group} for rank {here}")
        return moved

    def moved(self, program: Sequence[Call], here: int, there: int) -> list[Call]:
        """The program that rank `here` runs, as rank `there` runs it."""
        groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        peers: dict[int, int] = {-1: -1}
        mine, place = self.coordinates(here), self.coordinates(there)
        for call in program:
            if call.group not in groups:
                groups[call.group] = self.moved_group(call.group, here, there)
            if call.peer not in peers:
                theirs = self.coordinates(call.peer)
                peers[call.peer] = self.rank([p if m == t else t for m, t, p in zip(mine, theirs, place, strict=True)])
        return [replace(call, group=groups[call.group], peer=peers[call.peer]) for call in program]


@dataclass(frozen=True)
class WorldCheck:
    """fault: the first one found. alike: every looked-at rank of each pipeline position runs the same program.

    followed: how many ranks stood for the world.
    """

    fault: Fault | None
    alike: bool
    followed: int


def check_world(
    programs: Mapping[int, Sequence[Call]], grid: Grid, names: Mapping[int, str] | None = None, axis: str = "pp"
) -> WorldCheck:
    """Does every collective of the whole mesh meet? Judged from the programs of some ranks.

    programs: at least that of the first rank (0 on all other axes) for every coordinate of `axis`.
    """
    position = list(grid.sizes).index(axis)
    stations = range(grid.sizes[axis])
    bases = {p: grid.rank([p if i == position else 0 for i in range(len(grid.sizes))]) for p in stations}
    alike = all(
        _comparable(grid.moved(program, rank, base)) == _comparable(programs[base])
        for rank, program in programs.items()
        if rank != (base := bases[grid.coordinates(rank)[position]])
    )
    if alike:
        followed = {base: programs[base] for base in bases.values()}
    else:
        followed = _corner_programs(programs, grid, position, stations)
    return WorldCheck(first_fault(followed, names), alike, len(followed))


def _comparable(program: Sequence[Call]) -> list[tuple]:
    # Names of communicators differ from rank to rank: the position among those of the same ranks is what counts.
    return [(call.group, call.signature) for call in program]


def _corner_programs(
    programs: Mapping[int, Sequence[Call]], grid: Grid, position: int, stations: range
) -> dict[int, Sequence[Call]]:
    """A program for every corner of every station: its own if it was traced, else that of the nearest traced one."""
    found: dict[int, Sequence[Call]] = {}
    traced = {rank: grid.coordinates(rank) for rank in programs}
    for station in stations:
        for corner in grid.corners(list(grid.sizes)[position]):
            place = [station if i == position else c for i, c in enumerate(corner)]
            rank = grid.rank(place)
            near = max(
                (other for other, theirs in traced.items() if theirs[position] == station),
                key=lambda other: (sum(a == b for a, b in zip(traced[other], place, strict=True)), -other),
            )
            found[rank] = programs[near] if near == rank else grid.moved(programs[near], near, rank)
    return found
