"""The names of the groups that traffic goes over: the mesh axes on which their members differ, joined by "+"."""

from functools import lru_cache
from math import prod

from ingot.schema.parallel import Parallel

# Of the ranks that share one copy of the model, outermost first (dist/mesh.py).
_IN_A_COPY = ("dp_shard", "cp", "tp")


def spanned(parallel: Parallel, view: str) -> str:
    """What the groups of a view of dist/mesh.py span: "dp_shard+cp"; "" where they are single ranks.

    ep takes neighbours, expert_shard every ep-th rank. Where ep is neither a divisor nor a multiple of the inner axes,
    groups may differ: it is the first one that is told.
    """
    sizes = tuple(getattr(parallel, axis) for axis in _IN_A_COPY)
    return _spanned(sizes, parallel.ep, parallel.reduce == "canonical", view)


@lru_cache(maxsize=65_536)
def _spanned(sizes: tuple[int, ...], ep: int, canonical: bool, view: str) -> str:
    """Planners ask for it often, and it takes time for every rank."""
    _, cp, columns = sizes
    ranks = range(prod(sizes))
    line = {
        "shard": ranks[:: columns * cp] if canonical else ranks[::columns],
        "sequence": ranks[: cp * columns],
        "ep": ranks[:ep],
        "expert_shard": ranks[::ep],
    }[view]
    places = [coordinates(rank, sizes) for rank in line]
    return "+".join(axis for i, axis in enumerate(_IN_A_COPY) if len({place[i] for place in places}) > 1)


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The place of `rank` on each axis of a row-major mesh. sizes: degrees, outermost axis first."""
    found = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))
