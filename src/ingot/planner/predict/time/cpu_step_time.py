"""The time of a step on a CPU, where work and communication do not overlap, and the simulated pipeline of a CPU run."""

from ingot.planner.predict.time.exposed import cpu_collectives
from ingot.planner.predict.time.links import line_times
from ingot.planner.predict.time.stage_time import MeasuredTimer
from ingot.planner.predict.time.timed_step import StepTime
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Communication
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.theory.layout import Position, positions
from ingot.theory.memory import Term
from ingot.theory.schedule import Timeline, simulate
from ingot.theory.traffic import hidden_bytes
from ingot.theory.work import stage_work, step_work
from ingot.units import format_bytes, format_flops, format_seconds


def estimate_cpu_step(run: RunConfig, cluster: Cluster, software: Software) -> StepTime:
    """Return the time of one step on a CPU cluster. The cluster must have a rate for the run's precision."""
    everyone = positions(run, software)
    timer = MeasuredTimer(everyone[0], cluster)
    work = {position.rank: step_work(position, cluster.device) for position in everyone}

    def seconds(position: Position) -> float:
        part = timer.part(work[position.rank])
        return part.busy + part.host

    busiest = max(everyone, key=seconds)
    mine = work[busiest.rank]
    rate = cluster.peak_flops[run.train.precision]
    terms = {
        "matrix products": _at(mine.matmul_flops, rate * cluster.matmul_efficiency, "FLOP"),
        "attention": _at(mine.attention_flops, rate * cluster.attention_efficiency, "FLOP"),
        "everything elementwise": _at(mine.moved_bytes, cluster.memory_bandwidth, "B"),
        "operations": Term(
            mine.operations * cluster.op_seconds,
            f"{mine.operations:,.0f} operations x {cluster.op_seconds * 1e6:.1f} µs",
        ),
        "step": Term(cluster.step_overhead_seconds, "measured once per step: the loop (and unmeasured links)"),
    }
    if run.parallel.world_size > 1 and cluster.link_bandwidth:
        terms["collectives"] = cpu_collectives(busiest, cluster)
    bubble = 0.0
    if run.parallel.pp > 1:
        timeline = cpu_timeline(run, cluster, everyone, known=True)
        bubble = timeline.bubble_fraction
        terms["pipeline bubble"] = Term(timeline.step_time - max(timeline.busy), _waiting(run, everyone, timeline))
    lines = {
        line: Communication(sent_bytes=t.sent, seconds=t.seconds, exposed_seconds=t.seconds, crosses=t.crosses)
        for line, t in line_times(busiest, cluster).items()
    }
    return StepTime(terms, lines, bubble)


def _at(amount: float, rate: float, unit: str) -> Term:
    shown = format_flops(amount) if unit == "FLOP" else format_bytes(amount)
    per = f"{format_flops(rate)}/s" if unit == "FLOP" else f"{format_bytes(rate)}/s"
    return Term(amount / rate, f"{shown} / {per}")


def _waiting(run: RunConfig, everyone: tuple[Position, ...], timeline: Timeline) -> str:
    parallel = everyone[0].parallel
    shape = f"{parallel.schedule}, {parallel.pp} ranks x {parallel.stages_on_each_rank} stages"
    whole, share = format_seconds(timeline.step_time), timeline.bubble_fraction
    return f"{shape}, {run.accumulation} micro-batches, simulated: {whole}, ranks wait {share:.0%}"


def cpu_timeline(run: RunConfig, cluster: Cluster, everyone: tuple[Position, ...], known: bool) -> Timeline:
    """Return the run's simulated pipeline, action by action. known: the cluster has rates; if not, the times are FLOPs
    instead of seconds.
    """
    timer, message = MeasuredTimer(everyone[0], cluster), 0.0
    stages = sorted(((s.number, p, s) for p in everyone for s in p.stages), key=lambda found: found[0])
    if known:
        parts = [timer.stage(position, stage) for _, position, stage in stages]
        times = [[part.busy + part.host for part in three] for three in parts]
        rate, size = cluster.link_bandwidth, hidden_bytes(everyone[0]) / everyone[0].sequence_ranks
        message = size / rate + cluster.link_seconds if rate else 0.0
    else:
        times = [[part.matmul_flops for part in stage_work(p, s, cluster.device)] for _, p, s in stages]
    forward, inputs, weights = (list(part) for part in zip(*times, strict=True))
    return simulate(everyone[0].table, forward=forward, backward_input=inputs, backward_weight=weights, send=message)
