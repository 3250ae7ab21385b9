"""What a run's experts and context parallelism come to, for people to read: nothing to mend."""

from collections.abc import Iterator

from ingot.planner.run.money import device_usd
from ingot.planner.search.context import links_of
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.theory.context import explain_context, imbalance
from ingot.theory.flops import train_flops_6nd, training_seconds
from ingot.theory.layout import positions, resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.units import format_count, format_usd


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


# What teaching texts call an H100's sustained rate, and then multiply by an MFU once more.
_TEXTS_RATE, _TEXTS_DEVICE_PEAK, _TEXTS_MFU = 400e12, 989e12, 0.45


def double_discount(plan: Plan, run: RunConfig, parameters: int) -> str:
    """Why time and money in usual texts are too large: a sustained rate has the MFU in it already. For plans of a bare
    number of parameters on devices with an H100's peak, "" for others."""
    peak, devices = plan.cluster.peak_flops.get("bf16", 0.0), run.parallel.world_size
    if peak != _TEXTS_DEVICE_PEAK or plan.cluster.device != "cuda":
        return ""
    flops = train_flops_6nd(parameters, plan.steps * plan.tokens_per_step)
    rate = _TEXTS_RATE * _TEXTS_MFU
    wrong, right = (training_seconds(flops, devices, peak, mfu) for mfu in (rate / peak, _TEXTS_MFU))
    price = run.cost.usd_per_hour or plan.cluster.usd_per_hour
    usd = [format_usd(device_usd(devices, s / 86400, price).value) for s in (wrong, right)] if price else []
    first, second = (f" and {cost}" for cost in usd) if usd else ("", "")
    return (
        f"say {wrong / 86400:,.0f} days{first}: 400 TFLOP/s sustained x {_TEXTS_MFU:.0%} MFU ="
        f" {rate / 1e12:.0f} TFLOP/s."
        f" That discounts twice: 400 of {peak / 1e12:.0f} TFLOP/s are an MFU of {_TEXTS_RATE / peak:.1%} already, and"
        f" {rate / 1e12:.0f} would be one of {rate / peak:.1%}. {_TEXTS_MFU:.0%} of the peak are"
        f" {peak * _TEXTS_MFU / 1e12:.0f} TFLOP/s: {right / 86400:,.1f} days{second}."
    )
