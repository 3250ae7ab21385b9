"""How long one optimizer step takes: the work of a rank divided by the rates of its device."""

from ingot.planner.exposed import blocking, exposed
from ingot.planner.links import bandwidth_of, line_times
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import Position, positions
from ingot.theory.schedule import Timeline, simulate
from ingot.theory.term import Term
from ingot.theory.traffic import hidden_bytes
from ingot.theory.work import Work, stage_work, step_work
from ingot.units import format_bytes, format_flops, format_seconds


def rank_work(run: RunConfig, device: str) -> Work:
    """Of the pipeline rank that multiplies most."""
    return max((step_work(p, device) for p in positions(run)), key=lambda work: work.matmul_flops)


def step_seconds(run: RunConfig, cluster: Cluster) -> dict[str, Term] | None:
    """Parts that sum to the step's time, or None when the cluster has no rate for the run's precision.

    They are those of the busiest pipeline rank, and the time it waits for others. On a GPU, operations are started
    ahead of their execution and some communication runs beside it, so each counts only by what it exceeds the device's
    own work (planner/exposed.py). On a CPU everything happens in turn, and collectives are part of the measured cost
    per step. Experts are taken to have the same load each.
    """
    if _rate(run, cluster) <= 0 or cluster.memory_bandwidth <= 0:
        return None
    everyone = positions(run)
    work = {position.rank: step_work(position, cluster.device) for position in everyone}
    busiest = max(everyone, key=lambda position: _seconds(run, cluster, work[position.rank]))
    mine = work[busiest.rank]
    terms = _work_terms(run, cluster, mine)
    launch = mine.operations * cluster.op_seconds
    launch_formula = f"{mine.operations:,.0f} operations x {cluster.op_seconds * 1e6:.1f} µs"
    if cluster.device == "cpu":
        terms["operations"] = Term(launch, launch_formula)
        terms["step"] = Term(cluster.step_overhead_seconds, "measured once per step: collectives and the loop")
    else:
        busy = sum(term.value for term in terms.values())
        terms["launches"] = Term(
            max(launch - busy, 0.0), f"{launch_formula}, beyond the device's {format_seconds(busy)}"
        )
        terms |= exposed(busiest, cluster, busy)
    if run.parallel.pp > 1:
        terms["pipeline bubble"] = pipeline_bubble(run, cluster, everyone)
    return terms


def _rate(run: RunConfig, cluster: Cluster) -> float:
    return cluster.peak_flops.get(run.train.precision, 0.0)


def _work_terms(run: RunConfig, cluster: Cluster, work: Work) -> dict[str, Term]:
    rate = _rate(run, cluster)
    return {
        "matrix products": _at(work.matmul_flops, rate * cluster.matmul_efficiency, "FLOP"),
        "attention": _at(work.attention_flops, rate * cluster.attention_efficiency, "FLOP"),
        "everything elementwise": _at(work.moved_bytes, cluster.memory_bandwidth, "B"),
    }


def _at(amount: float, rate: float, unit: str) -> Term:
    shown = format_flops(amount) if unit == "FLOP" else format_bytes(amount)
    per = f"{format_flops(rate)}/s" if unit == "FLOP" else f"{format_bytes(rate)}/s"
    return Term(amount / rate, f"{shown} / {per}")


def _seconds(run: RunConfig, cluster: Cluster, work: Work) -> float:
    """Of work alone, without collectives. On a GPU operations are started ahead, on a CPU in turn."""
    busy, launch = sum(t.value for t in _work_terms(run, cluster, work).values()), work.operations * cluster.op_seconds
    return busy + launch if cluster.device == "cpu" else max(busy, launch)


def pipeline_bubble(run: RunConfig, cluster: Cluster, everyone: tuple[Position, ...]) -> Term:
    """How much longer the simulated schedule takes than the work of its busiest rank."""
    timeline, parallel = simulated(run, cluster, everyone), everyone[0].parallel
    waiting, share = timeline.step_time - max(timeline.busy), timeline.bubble_fraction
    formula = f"{parallel.schedule}, {parallel.pp} ranks x {parallel.stages_on_each_rank} stages, "
    formula += (
        f"{run.accumulation} micro-batches, simulated: {format_seconds(timeline.step_time)}, ranks wait {share:.0%}"
    )
    return Term(waiting, formula)


def simulated(run: RunConfig, cluster: Cluster, everyone: tuple[Position, ...]) -> Timeline:
    """The run's pipeline with the time of each stage, or its matrix products where the cluster has no rate."""
    parallel, known = everyone[0].parallel, _rate(run, cluster) > 0 and cluster.memory_bandwidth > 0
    times: dict[int, list[float]] = {}
    for position in everyone:
        waits = blocking(position, cluster, line_times(position, cluster)) if known and cluster.device != "cpu" else {}
        waiting = sum(term.value for term in waits.values())
        blocks = max(sum(len(stage.layers) for stage in position.stages), 1)
        for stage in position.stages:
            parts = stage_work(position, stage, cluster.device)
            each = [_seconds(run, cluster, part) if known else part.matmul_flops for part in parts]
            if waiting:  # by blocks, and half of it in each direction
                between = waiting / position.accumulation * len(stage.layers) / blocks / 2
                each = [each[0] + between, each[1] + between, each[2]]
            times[stage.number] = each
    forward, inputs, weights = ([times[number][part] for number in sorted(times)] for part in range(3))
    bandwidth = bandwidth_of(parallel, "pp", cluster) if known else 0.0
    send = hidden_bytes(everyone[0]) / everyone[0].sequence_ranks / bandwidth if bandwidth else 0.0
    return simulate(everyone[0].table, forward=forward, backward_input=inputs, backward_weight=weights, send=send)
