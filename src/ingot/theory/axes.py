"""The names of the groups that traffic goes over: the mesh axes on which their members differ, joined by "+"."""

from ingot.schema.parallel import Parallel
from ingot.theory.mesh_world import Grid

# Of the ranks that share one copy of the model, outermost first (dist/mesh.py).
_IN_A_COPY = ("dp_shard", "cp", "tp")


def spanned(parallel: Parallel, view: str) -> str:
    """What the groups of a view of dist/mesh.py span: "dp_shard+cp"; "" where they are single ranks.

    ep takes neighbours, expert_shard every ep-th rank. Where ep is neither a divisor nor a multiple of the inner axes,
    groups may differ: it is the first one that is told.
    """
    grid = Grid({axis: getattr(parallel, axis) for axis in _IN_A_COPY})
    columns, ranks = grid.sizes["tp"], range(grid.world_size)
    line = {
        "shard": ranks[::columns] if parallel.reduce != "canonical" else ranks[:: columns * parallel.cp],
        "sequence": ranks[: parallel.cp * columns],
        "ep": ranks[: parallel.ep],
        "expert_shard": ranks[:: parallel.ep],
    }[view]
    return "+".join(grid.axes(line))
