"""The layouts to which a run can change while it trains: for fewer nodes, and for ranks that need less memory.

Each keeps the global batch, so the samples and the update of every step stay those of the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.config import to_dict
from ingot.planner.predict.memory.peak_memory import rank_memory_bytes, stage_bills
from ingot.planner.search.candidates import Candidate, Evaluator
from ingot.planner.search.moves import LayoutChange, neighbors, overrides_between
from ingot.planner.search.search import search
from ingot.planner.search.space import with_context
from ingot.schema.cluster import Cluster
from ingot.schema.fallbacks import Fallback, Fallbacks, layout_sha256
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT
from ingot.storage import canonical_json, sha256_bytes
from ingot.theory.rules.nearest import divisors

# Searches of layouts for fewer nodes: 5 s each for a model of 405B parameters on 128 nodes of 8 GPUs. The most nodes
# come first: it is likelier that few are lost.
_SEARCHES = 3
_MOST_CHANGES = 8  # for memory: micro-batches are halved several times before recomputation has its turn
_SAVES = 0.05  # of the memory that depends on the layout: what a change has to save to be worth a restart
# Which change goes first if the speed of the machine is unknown: from the one that costs least to those that move data.
_MILDEST = ("micro_batch", "zero", "dp_shard", "recompute", "offload")


def spread(cluster: Cluster, run: RunConfig) -> Cluster:
    """Return the cluster of a run on several nodes, each of which is like those of `cluster`."""
    nodes = run.launch.nodes
    return cluster if nodes == 1 else replace(cluster, nodes=nodes, devices_per_node=run.parallel.world_size // nodes)


def cluster_sha256(cluster: Cluster) -> str:
    """Return the hash of what the layouts depend on. The name may be that of the machine that happens to lead."""
    return sha256_bytes(canonical_json(to_dict(replace(cluster, name=""))).encode())


def plan_fallbacks(run: RunConfig, cluster: Cluster) -> Fallbacks:
    """Return the fallback layouts of a run with a legal layout.

    cluster: its nodes are those of the run; of a run on several nodes (launch.nodes) they count as often as needed.
    """
    given, cluster = cluster_sha256(cluster), spread(cluster, run)
    decided = with_context(run, cluster)[0]
    own = Evaluator(decided, cluster, INGOT).candidate(decided)
    fewer = list(_fewer_nodes(run, cluster, own.memory_bytes))
    return Fallbacks(
        run_sha256=layout_sha256(run),
        cluster_sha256=given,
        own=_entry(run, own, ()),
        available_bytes=round(rank_memory_bytes(cluster, run.parallel.world_size)),
        bills=tuple({kind: round(term.value) for kind, term in bill.items()} for bill in stage_bills(decided, cluster)),
        fewer_nodes=tuple(entry for entry, _ in fewer),
        less_memory=(*_less_memory(run, own, cluster), *_less_on_fewer(run, cluster, [one for _, one in fewer if one])),
    )


def _entry(run: RunConfig, found: Candidate, overrides: tuple[str, ...] | None = None) -> Fallback:
    return Fallback(
        nodes=found.run.launch.nodes,
        ranks=found.run.parallel.world_size,
        overrides=overrides_between(run, found.run) if overrides is None else overrides,
        memory_bytes=round(found.memory_bytes),
        step_seconds=found.step_seconds,
    )


# -- fewer nodes --


def _fewer_nodes(run: RunConfig, cluster: Cluster, own_bytes: float) -> Iterator[tuple[Fallback, Candidate | None]]:
    """Yield an entry and its layout, if there is one, for each number of nodes that the run permits, most nodes first.
    own_bytes: the memory of the run's own layout, which is there."""
    nodes, ranks, searches = run.launch.nodes, run.parallel.world_size, 0
    of_node = ranks // nodes
    fewest = -(-run.launch.min_ranks // of_node) if run.launch.min_ranks else nodes
    for left in range(nodes - 1, fewest - 1, -1):
        here = replace(run, launch=replace(run.launch, nodes=left))
        evaluator = Evaluator(here, replace(cluster, nodes=left), INGOT)
        found = _with_fewer_copies(evaluator, left * of_node, own_bytes)
        searched = searches < _SEARCHES
        if found is None and searched:
            result = search(here, evaluator.cluster, limit=1)
            searches += result.considered > 0
            found = next((one for one in result.best if Evaluator.legal(one.run)), None)
        if found is not None:
            yield _entry(run, found), found
        else:
            other = "" if searched else "; no other layout was searched"
            problem = f"{left * of_node} ranks cannot divide a batch of {run.train.global_batch} and fit{other}"
            yield Fallback(nodes=left, ranks=left * of_node, problem=problem), None


def _with_fewer_copies(evaluator: Evaluator, ranks: int, own_bytes: float) -> Candidate | None:
    """Return the run's own layout with fewer data-parallel ranks and more accumulation, if that is legal and fits."""
    for other in _copies(evaluator.run, ranks):
        if Evaluator.legal(other):
            decided = with_context(other, evaluator.cluster)[0]
            if evaluator.memory_bytes(decided) <= max(own_bytes, evaluator.limit_bytes(decided)):
                return evaluator.candidate(decided)
    return None


def _copies(run: RunConfig, ranks: int) -> Iterator[RunConfig]:
    """Yield the run on `ranks` ranks, with its own pp, cp and tp, and with micro-batches of at most its own size."""
    for parallel in _meshes(run.parallel, ranks):
        of_rank, rest = divmod(run.train.global_batch, parallel.data_ranks)
        sizes = [] if rest else [size for size in reversed(divisors(of_rank)) if size <= run.train.micro_batch]
        for size in sizes:
            yield replace(run, parallel=parallel, train=replace(run.train, micro_batch=size))


def _meshes(own: Parallel, ranks: int) -> Iterator[Parallel]:
    """Yield the layout with fewer copies of the model, with each copy on fewer ranks, and with one copy."""
    data, rest = divmod(ranks, own.pp * own.cp * own.tp)
    if rest or not data:
        return
    if data % own.dp_shard == 0:
        yield replace(own, dp_replicate=data // own.dp_shard)
    if data % own.dp_replicate == 0:
        yield replace(own, dp_shard=data // own.dp_replicate)
    yield replace(own, dp_replicate=1, dp_shard=data)


# -- less memory --


def _less_on_fewer(run: RunConfig, cluster: Cluster, fewer: Sequence[Candidate]) -> Iterator[Fallback]:
    """Yield layouts with less memory for the first of the layouts for fewer nodes; for all, that would take minutes."""
    for found in fewer[:_SEARCHES]:
        yield from _less_memory(run, found, replace(cluster, nodes=found.run.launch.nodes))


def _less_memory(run: RunConfig, first: Candidate, cluster: Cluster) -> Iterator[Fallback]:
    """Yield layouts on the nodes of `first`, each a change of the one before it that saves memory for the least
    time."""
    evaluator, now = Evaluator(first.run, cluster, INGOT), first
    for _ in range(_MOST_CHANGES):
        most = now.memory_bytes - _SAVES * (now.memory_bytes - cluster.runtime_bytes)
        changes = [change for change in neighbors(now, cluster) if change.candidate.memory_bytes <= most]
        if not evaluator.fits(now.run):
            changes = [change for change in changes if change.fits] or changes
        if not changes:
            return
        now = min(changes, key=_cost).candidate
        yield _entry(run, now)


def _cost(change: LayoutChange) -> tuple[float, int, float]:
    rank = _MILDEST.index(change.key) if change.key in _MILDEST else len(_MILDEST)
    return change.candidate.step_seconds, rank, change.candidate.memory_bytes
