"""The names of the groups that traffic goes over: the mesh axes on which their members differ, joined by "+"."""

from functools import lru_cache

from ingot.schema.parallel import Parallel
from ingot.theory.mesh_world import Grid

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
    grid = Grid(dict(zip(_IN_A_COPY, sizes, strict=True)))
    cp, columns, ranks = grid.sizes["cp"], grid.sizes["tp"], range(grid.world_size)
    line = {
        "shard": ranks[:: columns * cp] if canonical else ranks[::columns],
        "sequence": ranks[: cp * columns],
        "ep": ranks[:ep],
        "expert_shard": ranks[::ep],
    }[view]
    return "+".join(grid.axes(line))
