"""How long one optimizer step takes: the work of a rank divided by the rates of its device."""

from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.term import Term
from ingot.theory.work import Work, step_work
from ingot.units import format_bytes, format_flops, format_seconds


def rank_work(run: RunConfig, device: str) -> Work:
    return step_work(
        run.model,
        precision=run.train.precision,
        seq_len=run.train.seq_len,
        micro_batch=run.train.micro_batch,
        accumulation=run.accumulation,
        ranks=run.parallel.data_ranks,
        device=device,
    )


def step_seconds(run: RunConfig, cluster: Cluster) -> dict[str, Term] | None:
    """Parts that sum to the step's time, or None when the cluster has no rate for the run's precision.

    On a GPU, operations are started ahead of their execution and collectives run beside it, so each counts only by what
    it exceeds the device's own work; one block's gather and one reduction always stand alone. On a CPU everything
    happens in turn, and collectives are part of the measured cost per step.
    """
    rate = cluster.peak_flops.get(run.train.precision, 0.0)
    if rate <= 0 or cluster.memory_bandwidth <= 0:
        return None
    work = rank_work(run, cluster.device)
    terms = {
        "matrix products": _at(work.matmul_flops, rate * cluster.matmul_efficiency, "FLOP"),
        "attention": _at(work.attention_flops, rate * cluster.attention_efficiency, "FLOP"),
        "everything elementwise": _at(work.moved_bytes, cluster.memory_bandwidth, "B"),
    }
    launch = work.operations * cluster.op_seconds
    launch_formula = f"{work.operations:,.0f} operations x {cluster.op_seconds * 1e6:.1f} µs"
    if cluster.device == "cpu":
        terms["operations"] = Term(launch, launch_formula)
        terms["step"] = Term(cluster.step_overhead_seconds, "measured once per step: collectives and the loop")
        return terms
    busy = sum(term.value for term in terms.values())
    terms["launches"] = Term(max(launch - busy, 0.0), f"{launch_formula}, beyond the device's {format_seconds(busy)}")
    terms["collectives"] = _exposed(run, cluster, work, busy)
    return terms


def _at(amount: float, rate: float, unit: str) -> Term:
    shown = format_flops(amount) if unit == "FLOP" else format_bytes(amount)
    per = f"{format_flops(rate)}/s" if unit == "FLOP" else f"{format_bytes(rate)}/s"
    return Term(amount / rate, f"{shown} / {per}")


def _exposed(run: RunConfig, cluster: Cluster, work: Work, busy: float) -> Term:
    """Collectives that computation does not hide: what exceeds it, and always the first gather and last reduction."""
    ranks = run.parallel.data_ranks
    bandwidth = cluster.link_bandwidth if ranks <= cluster.devices_per_node else cluster.network_bandwidth
    if ranks == 1 or bandwidth <= 0:
        return Term(0.0, "one rank" if ranks == 1 else "no bandwidth known")
    total = work.sent_bytes / bandwidth
    alone = total / (run.model.num_layers + 1) / run.accumulation
    value = max(total - busy, alone)
    return Term(
        value, f"{format_bytes(work.sent_bytes)} / {format_bytes(bandwidth)}/s = {format_seconds(total)}, not hidden"
    )
