"""What a run's experts and context parallelism come to, for people to read: nothing to mend."""

from collections.abc import Iterator

from ingot.planner.context import links_of
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.context import explain_context, imbalance
from ingot.theory.layout import positions, resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_count


def notes(run: RunConfig, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(what it is about, one sentence), of a run without problems."""
    if run.model.is_moe:
        yield "experts", _experts(run)
    if run.parallel.cp > 1:
        yield "context", _context(run, cluster)


def _experts(run: RunConfig) -> str:
    moe, ep = run.model.moe, run.parallel.ep
    total, active = (format_count(count(run.model)) for count in (count_parameters, count_active_parameters))
    shared = f" and {moe.shared_experts} shared" if moe.shared_experts else ""
    where = f"{moe.num_experts // ep} on each of {ep} ranks" if ep > 1 else "all on every rank"
    rows = max(position.assignments for position in positions(run)) * ep / moe.num_experts
    return (
        f"{moe.num_experts} experts, {moe.top_k} to a token{shared}: {total} parameters, {active} active; {where},"
        f" {rows:,.0f} rows of a micro-batch each, if all have the same load"
    )


def _context(run: RunConfig, cluster: Cluster) -> str:
    """What is "auto" is decided as the trainer decides it, by the figures of a fixed machine; what it takes is told of
    `cluster`, as it is of a form that the run names."""
    parallel = resolve_parallel(run)
    uneven = imbalance(parallel, run.train.seq_len, run.model.sliding_window)
    how = "auto, chosen for H100 nodes: " if run.parallel.context == "auto" else ""
    costs = explain_context(run.model, run.train, parallel, links_of(cluster, run.train.precision))
    unknown = "" if cluster.link_bandwidth else f"; {cluster.name} has no known links, those of H100 nodes stand in"
    layout = f"{parallel.context_layout}, " if parallel.ring > 1 else ""
    return f"{how}{costs}{unknown}; {layout}the busiest rank has {uneven:.2f} times the mean of attention"
