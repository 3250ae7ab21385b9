"""The least recomputation with which a run fits in memory, from the planner's own bill of the fullest rank."""

from collections.abc import Iterator
from dataclasses import replace

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.units import format_bytes


def least_recompute(run: RunConfig, cluster: Cluster) -> tuple[Parallel, float] | None:
    """Return the layout of `run` with the least recomputation that fits in the memory of a rank, and the bytes that it
    needs there; None if all blocks recomputed as a whole need too much.

    The bill has the fragmentation and the memory of the process that the cluster file names, so these stay free.
    """
    there = rank_memory_bytes(cluster, run.parallel.world_size)
    for parallel in _from_little_to_much(run):
        needed = sum(term.value for term in memory_bill(replace(run, parallel=parallel), cluster).values())
        if needed <= there:
            return parallel, needed
    return None


def advised(run: RunConfig, cluster: Cluster) -> str:
    """Return the advice to recompute activations, with the settings that fit if there are any."""
    fix = "recompute them (parallel.recompute)"
    found = least_recompute(run, cluster)
    if found is None:
        return fix
    parallel, needed = found
    every = f" --set parallel.recompute_every={parallel.recompute_every}" if parallel.recompute_every > 1 else ""
    return f"{fix}: --set parallel.recompute={parallel.recompute}{every} fits with {format_bytes(needed)}"


def _from_little_to_much(run: RunConfig) -> Iterator[Parallel]:
    """Yield layouts that recompute more and more: first selectively, which repeats no expensive operation, then whole
    blocks; of each kind every n-th block, from the first one alone to all. The same number of blocks can be on other
    stages of a pipeline, so each n is tried."""
    for form in ("selective", "full"):
        for every in range(run.model.num_layers, 0, -1):
            yield replace(run.parallel, recompute=form, recompute_every=every)
