"""A check of the collectives of thousands of ranks through the programs of a few.

All ranks at one pipeline position run the same program relative to their coordinates in the mesh: if one of them
exchanges data with its neighbors on the tp axis, all do. Such ranks advance in lockstep, because they wait for the same
events. So the check follows (plays) one rank for all ranks of its pipeline position, and a group that spans other axes
is complete when its followed members have arrived. In a ring, the message that a rank sends is matched with the message
that the rank itself receives, because its neighbor does the same. The traced ranks, which are first and last on each
axis, verify that the programs are the same; if they differ, all these corners are followed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, product

from ingot.rehearse.dryrun.rendezvous import Call, Fault, Image, first_fault
from ingot.theory.traffic import coordinates

# On these axes a rank sends to the rank a fixed distance ahead, cyclically; on other axes to fixed coordinates.
RINGS = ("cp",)


@dataclass(frozen=True)
class Grid:
    """The ranks of a mesh, row-major. sizes: axis -> degree, outermost first.

    cuts: sizes of groups of neighboring ranks that may cover only a part of an axis (ep, a row of Ulysses). Such an
    axis is split into an outer and an inner part, each with its own coordinate. Raises ValueError if cuts do not nest.
    """

    sizes: Mapping[str, int]
    cuts: tuple[int, ...] = ()

    def __post_init__(self):
        borders = sorted({*self._axis_borders, *self.cuts})
        if uneven := [pair for pair in pairwise(borders) if pair[1] % pair[0]]:
            raise ValueError(f"groups of {uneven[0][0]} and of {uneven[0][1]} neighbors do not nest")

    @cached_property
    def _axis_borders(self) -> tuple[int, ...]:
        """The product of the sizes of each axis and all axes inside it; outermost first."""
        sizes = list(self.sizes.values())
        return tuple(math.prod(sizes[i:]) for i in range(len(sizes)))

    @cached_property
    def _parts(self) -> tuple[tuple[str, int], ...]:
        """The (axis, size) of every axis, or of each part of an axis that `cuts` split; outermost first."""
        parts = []
        for (axis, size), border in zip(self.sizes.items(), self._axis_borders, strict=True):
            inner = border // size
            inside = sorted({cut for cut in self.cuts if inner < cut < border}, reverse=True)
            ends = [border, *inside, inner]
            parts += [(axis, outer // inner) for outer, inner in pairwise(ends)]
        return tuple(parts)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return coordinates(rank, tuple(self.sizes.values()))

    def rank(self, coordinates: Sequence[int]) -> int:
        return _number(coordinates, tuple(self.sizes.values()))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    def axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the axes on which the members of `group` differ."""
        places = [self.coordinates(rank) for rank in group]
        return tuple(axis for i, axis in enumerate(self.sizes) if len({place[i] for place in places}) > 1)

    def corners(self, fixed: str) -> list[int]:
        """Return the ranks that are first or last on every axis part, with coordinate 0 on the axis `fixed`; first
        coordinates come before last ones.
        """
        ends = [(0,) if axis == fixed or size == 1 else (0, size - 1) for axis, size in self._parts]
        return [self._rank_at(place) for place in product(*ends)]

    def moved_group(self, group: tuple[int, ...], here: int, there: int) -> tuple[int, ...]:
        """Return the group of rank `there` that corresponds to `group` of rank `here`: it spans the same axis parts.

        Raises ValueError if `there` is not in the result.
        """
        members, place = [self._place(rank) for rank in group], self._place(there)
        spanned = [len({member[i] for member in members}) > 1 for i in range(len(self._parts))]
        moved = tuple(
            self._rank_at([c if s else p for s, c, p in zip(spanned, member, place, strict=True)]) for member in members
        )
        if there not in moved:
            raise ValueError(f"rank {there} is not in the group that corresponds to group {group} of rank {here}")
        return moved

    def moved_peer(self, peer: int, here: int, there: int) -> int:
        """Return the peer of rank `there` that corresponds to the peer `peer` of rank `here`; -1 stays -1."""
        if peer < 0:
            return peer
        places = zip(self.sizes.items(), *(self.coordinates(rank) for rank in (peer, here, there)), strict=True)
        return self.rank(
            [
                (theirs - mine + other) % size if axis in RINGS else other if theirs == mine else theirs
                for (axis, size), theirs, mine, other in places
            ]
        )

    def moved(self, program: Sequence[Call], here: int, there: int) -> list[Call]:
        """Return the program of rank `here` with groups and peers changed to those of rank `there`."""
        groups: dict[tuple[int, ...], tuple[int, ...]] = {}
        peers: dict[int, int] = {}
        for call in program:
            if call.group not in groups:
                groups[call.group] = self.moved_group(call.group, here, there)
            if call.peer not in peers:
                peers[call.peer] = self.moved_peer(call.peer, here, there)
        return [replace(call, group=groups[call.group], peer=peers[call.peer]) for call in program]

    def image(self, rank: int, followed: int) -> Image:
        """Return the Image by which `followed` represents `rank`, which has another index in the same rings."""

        def seen_from(group: tuple[int, ...]) -> tuple[int, ...]:
            return self.moved_group(group, rank, followed)

        def peer_of(peer: int) -> int:
            return self.moved_peer(peer, followed, rank)

        return Image(followed, lru_cache(maxsize=None)(seen_from), lru_cache(maxsize=None)(peer_of))

    def _place(self, rank: int) -> tuple[int, ...]:
        return coordinates(rank, tuple(size for _, size in self._parts))

    def _rank_at(self, place: Sequence[int]) -> int:
        return _number(place, tuple(size for _, size in self._parts))


def _number(digits: Sequence[int], sizes: tuple[int, ...]) -> int:
    number = 0
    for size, digit in zip(sizes, digits, strict=True):
        number = number * size + digit
    return number


@dataclass(frozen=True)
class WorldCheck:
    """The result of `check_world`. fault: the first fault, or None. followed: number of ranks whose programs were
    played. alike: all traced ranks of the same pipeline position run the same program.
    """

    fault: Fault | None
    alike: bool
    followed: int


def check_world(
    programs: Mapping[int, Sequence[Call]], grid: Grid, names: Mapping[int, str] | None = None, axis: str = "pp"
) -> WorldCheck:
    """Check that all collectives of the whole mesh match, from the programs of some ranks.

    programs: calls by rank, at least for the first rank (0 on all other axes) of every coordinate of `axis`. names:
    texts for ranks, for messages.
    """
    position = list(grid.sizes).index(axis)
    positions = range(grid.sizes[axis])
    bases = {p: grid.rank([p if i == position else 0 for i in range(len(grid.sizes))]) for p in positions}
    alike = all(
        _comparable(grid.moved(program, rank, base)) == _comparable(programs[base])
        for rank, program in programs.items()
        if rank != (base := bases[grid.coordinates(rank)[position]])
    )
    if not alike:
        followed = _corner_programs(programs, grid, axis, positions)
        return WorldCheck(first_fault(followed, names), alike, len(followed))
    followed = {base: programs[base] for base in bases.values()}
    return WorldCheck(first_fault(followed, names, _images(followed, grid)), alike, len(followed))


def _images(programs: Mapping[int, Sequence[Call]], grid: Grid) -> dict[int, Image]:
    """Return an Image, by rank, for each ring neighbor of a followed rank that is not followed itself: the followed
    rank represents its own neighbors.
    """
    others = [i for i, axis in enumerate(grid.sizes) if axis not in RINGS]
    found = {}
    for rank, program in programs.items():
        mine = grid.coordinates(rank)
        for peer in {call.peer for call in program if call.is_p2p} - set(programs):
            theirs = grid.coordinates(peer)
            if all(mine[i] == theirs[i] for i in others):
                found[peer] = grid.image(peer, rank)
    return found


def _comparable(program: Sequence[Call]) -> list[tuple]:
    # Channels are left out, because the names of communicators differ between ranks.
    return [(call.group, call.signature) for call in program]


def _corner_programs(
    programs: Mapping[int, Sequence[Call]], grid: Grid, axis: str, positions: range
) -> dict[int, Sequence[Call]]:
    """Return a program for every corner (Grid.corners) of every pipeline position: its own if that rank was traced,
    else that of the nearest traced rank.
    """
    found: dict[int, Sequence[Call]] = {}
    position = list(grid.sizes).index(axis)
    traced = {rank: grid.coordinates(rank) for rank in programs}
    for index in positions:
        for corner in grid.corners(axis):
            place = [index if i == position else c for i, c in enumerate(grid.coordinates(corner))]
            rank = grid.rank(place)
            near = max(
                (other for other, theirs in traced.items() if theirs[position] == index),
                key=lambda other: (sum(a == b for a, b in zip(traced[other], place, strict=True)), -other),
            )
            found[rank] = _renamed(programs[near] if near == rank else grid.moved(programs[near], near, rank))
    return found


def _renamed(program: Sequence[Call]) -> list[Call]:
    """Replace the names of communicators, which differ between ranks, by their index among groups of the same ranks."""
    known: dict[tuple[int, ...], set[str]] = {}
    for call in program:
        known.setdefault(call.group, set()).add(call.channel)
    order = {group: sorted(names, key=lambda name: (len(name), name)) for group, names in known.items()}
    return [replace(call, channel=str(order[call.group].index(call.channel))) for call in program]
