"""Warnings and notes about a run before it starts: legal settings that are slow, wasteful or without effect."""

import json
from collections.abc import Iterator
from dataclasses import replace

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.links import LineTime, line_times
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.run.least_recompute import advised
from ingot.planner.run.outlook import Assumptions, device_usd
from ingot.planner.run.scaling import MAX_USEFUL_EPOCHS, compute_optimal_tokens
from ingot.planner.run.storage import data_reading, node_snapshot
from ingot.planner.search.space import links_of
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Outlook, Plan
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest
from ingot.theory.context import explain_context, imbalance
from ingot.theory.failures import DAY_SECONDS, daly_interval, goodput
from ingot.theory.flops import train_flops_6nd, training_seconds
from ingot.theory.layout import Position, layout_problems, positions, resolve_parallel
from ingot.theory.memory import Term
from ingot.theory.params import count_active_parameters, count_parameters, kept_gradient_bytes
from ingot.theory.rules.expert import legal_ep
from ingot.theory.rules.nearest import nearest
from ingot.theory.traffic import step_traffic
from ingot.units import format_bytes, format_count, format_seconds, format_usd

_TIGHT = 0.9
_LARGE_BUBBLE = 0.2
_UINT16_IDS = 65_536
# If a product has fewer rows than this, a GPU takes longer to read the weights than to multiply (H100: 300 FLOP/byte).
_FEW_ROWS = 128
_UNEVEN = 1.1
# The planner warns about a checkpoint interval only if it loses more than this share of wall-clock time.
_RELEVANT_SHARE = 0.01
# Tutorials call _TEXTS_RATE an H100's sustained rate, and then multiply it by an MFU a second time.
_TEXTS_RATE, _TEXTS_DEVICE_PEAK, _TEXTS_MFU = 400e12, 989e12, 0.45


def warnings(
    run: RunConfig,
    cluster: Cluster,
    bill: dict[str, Term],
    seconds: float,
    tokens: int,
    manifest: TokenManifest | None,
    software: Software = INGOT,
) -> Iterator[str]:
    """Yield the warnings of a plan, each one sentence with a remedy. tokens: number of tokens in the training set, 0 if
    unknown."""
    yield from memory_warnings(run, cluster, bill)
    yield from _low_precision(cluster, software)
    yield from _devices(run, cluster)
    yield from _layout(run, cluster, seconds)
    if tokens:
        yield from _passes(run, tokens)
        yield from _compute_optimal(run)
    yield from _rates(run, cluster, seconds, manifest)


def check_warnings(run: RunConfig, cluster: Cluster, seconds: float, manifest: TokenManifest | None) -> Iterator[str]:
    """Yield the warnings of `ingot check`: those on failing and slow runs, without those on memory and model size."""
    if cluster.device == "cpu":
        yield from _devices(run, cluster)
    yield from _layout(run, cluster, seconds)
    if manifest and manifest.tokens:
        yield from _passes(run, manifest.tokens)
    yield from _rates(run, cluster, seconds, manifest)


def _low_precision(cluster: Cluster, software: Software) -> Iterator[str]:
    bits = "4" if software.recipe == "nvfp4" else "8"
    if software.recipe and not cluster.peak_flops.get(f"fp{bits}"):
        name = cluster.device_name or cluster.name
        yield f"{name} has no {bits}-bit matrix products, so {software.recipe} makes nothing faster; remove --fp8"


def _rates(run: RunConfig, cluster: Cluster, seconds: float, manifest: TokenManifest | None) -> Iterator[str]:
    if run.model.vocab_size > _UINT16_IDS and manifest is None:
        yield f"a vocabulary of {run.model.vocab_size:,} ids needs uint32 token shards: 4 bytes per token"
    if not seconds:
        yield f"no {run.train.precision} rate of {cluster.name} is known: run `ingot doctor --bench` to predict time"
    elif not cluster.measured and cluster.device != "tpu":
        yield f"time on {cluster.name} follows from published figures; run `ingot doctor --bench` there to measure it"


def memory_warnings(run: RunConfig, cluster: Cluster, bill: dict[str, Term]) -> Iterator[str]:
    """Yield a warning if a rank needs more memory than there is, or nearly all of it."""
    needed = sum(term.value for term in bill.values())
    there = rank_memory_bytes(cluster, run.parallel.world_size)
    largest = max((kind for kind in bill if kind != "runtime"), key=lambda kind: bill[kind].value)
    if largest in ("activations", "logits", "fragmentation"):
        fix = "lower train.micro_batch" if run.train.micro_batch > 1 else "shorten train.seq_len"
    else:
        fix = "use more devices (parallel.dp_shard)" if cluster.device != "cpu" else "use a smaller model"
    if largest == "activations" and run.train.micro_batch == 1 and run.parallel.recompute == "none":
        fix = advised(run, cluster) if needed > there else "recompute them (parallel.recompute)"
    elif largest == "activations" and run.train.micro_batch == 1 and cluster.device != "cpu":
        fix = "divide sequences (parallel.cp), or shorten train.seq_len"
    if needed > there:
        yield f"does not fit: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"
    elif needed > _TIGHT * there:
        yield f"tight: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"
    if run.checkpoint.mode == "async" and cluster.host_memory_bytes:
        copied, host = node_snapshot(run, cluster).value, cluster.host_memory_bytes
        if copied > host:
            sizes = f"a save in the background copies {format_bytes(copied)} to a host of {format_bytes(host)}"
            yield f'does not fit: {sizes}; set checkpoint.mode = "sync"'


def _devices(run: RunConfig, cluster: Cluster) -> Iterator[str]:
    ranks = run.parallel.world_size
    if cluster.device != "cpu" and ranks > cluster.devices:
        kind = "TPUs" if cluster.device == "tpu" else "GPUs"
        yield f"{ranks} ranks need {ranks} {kind}, {cluster.name} has {cluster.devices}; lower {degrees(run.parallel)}"
    elif cluster.device == "cpu" and cluster.measured and ranks != cluster.devices_per_node:
        yield f"{cluster.name} was measured with {cluster.devices_per_node} ranks, the run has {ranks}; times differ"


def degrees(parallel: Parallel) -> str:
    """Return the keys of the run file whose values multiply to the number of ranks, joined by "or"."""
    named = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(parallel, name) > 1]
    return " or ".join(f"parallel.{name}" for name in named or ["dp_shard"])


def _layout(run: RunConfig, cluster: Cluster, seconds: float) -> Iterator[str]:
    yield from _canonical(run)
    yield from _without_effect(run)
    stages = positions(run)
    if run.parallel.pp > 1:
        share = simulated(run, cluster, stages).bubble_fraction
        if share > _LARGE_BUBBLE:
            found = (
                f"pipeline ranks wait {share:.0%} of a step ({run.parallel.schedule}, {run.accumulation} micro-batches)"
            )
            yield f"{found}; use more micro-batches or another schedule"
    slowest: dict[str, LineTime] = {}
    for position in stages:
        for line, time in line_times(position, cluster).items():
            slowest[line] = max(slowest.get(line, time), time, key=lambda t: t.sent)
    yield from _slow_links(run, cluster, slowest, seconds)
    yield from _context_warnings(run, stages[0].parallel, slowest, cluster)
    yield from _expert_warnings(run, cluster, max(stages, key=lambda p: p.routed), slowest)


def _slow_links(run: RunConfig, cluster: Cluster, slowest: dict[str, LineTime], seconds: float) -> Iterator[str]:
    """Yield warnings if groups of tensor parallelism or ZeRO 3, which communicate in every layer, span nodes."""
    domain, zero, parallel = cluster.domain, resolve_parallel(run).zero, run.parallel
    crossing = {line: time for line, time in slowest.items() if time.crosses}
    if "tp" in crossing:
        each = _over_network(crossing["tp"])
        yield f"tp = {parallel.tp} spans nodes of {domain}: {each}; use tp of at most {domain}"
    gathers = [crossing[line] for line in ("shard", "expert_shard") if line in crossing]
    took = sum(time.seconds for time in gathers)
    if zero == 3 and parallel.dp_shard > 1 and seconds and took > seconds / 2:  # less is hidden by computation
        both = LineTime(sum(time.sent for time in gathers), took, True)
        yield f"zero 3 spans nodes: {_over_network(both)}; try {_inside_nodes(run, cluster)}"


def _inside_nodes(run: RunConfig, cluster: Cluster) -> str:
    """Return the data-parallel degrees with which parameters are gathered inside a node; other advice if that layout is
    not legal or does not fit."""
    parallel = run.parallel
    inside = max(cluster.domain // (parallel.tp * parallel.cp), 1)
    shape = {"dp_shard": inside, "dp_replicate": parallel.data_ranks // inside}
    other = replace(run, parallel=replace(parallel, **shape))
    problem = any(layout_problems(other)) or other.parallel.world_size != parallel.world_size
    if not problem and sum(term.value for term in memory_bill(other, cluster).values()) <= cluster.memory_bytes:
        return ", ".join(f"{axis} = {degree}" for axis, degree in shape.items())
    return "longer micro-batches (train.micro_batch), or parallel.pp or tp"


def _canonical(run: RunConfig) -> Iterator[str]:
    """Yield a warning about the traffic and memory of canonical gradient sums, whose order does not depend on the
    layout."""
    parallel = run.parallel
    if parallel.reduce != "canonical":
        return
    fast = replace(run, parallel=replace(parallel, reduce="fast", virtual_ranks=0))
    sent, otherwise = (
        max(sum(t.sent for t in step_traffic(place, "cpu") if t.axis == "dp_replicate") for place in positions(r))
        for r in (run, fast)
    )
    levels = (parallel.virtual_ranks // parallel.dp_replicate).bit_length()
    gradient = max(
        place.parameters * kept_gradient_bytes(place.parallel, run.train.precision) for place in positions(run)
    )
    kept = levels * gradient if parallel.virtual_ranks > parallel.dp_replicate else gradient
    yield (
        f"canonical sums: a rank sends {format_bytes(sent)} per step, with fast sums {format_bytes(otherwise)}; and "
        f"needs up to {format_bytes(kept)} of buffers for them"
    )


def _without_effect(run: RunConfig) -> Iterator[str]:
    """Yield warnings about settings that were changed but have no effect in this run."""
    parallel, default, zero = run.parallel, Parallel(), resolve_parallel(run).zero
    if parallel.tp == 1 and not parallel.sequence:
        yield "parallel.sequence = false has no effect: there is no tensor parallelism (tp = 1)"
    if zero != 3 and parallel.reshard != default.reshard:
        yield f"parallel.reshard = false has no effect with zero {zero}, which keeps parameters whole"
    if parallel.token_ranks == 1:
        for name in ("unit_layers", "prefetch"):
            if getattr(parallel, name) != getattr(default, name):
                yield f"parallel.{name} = {getattr(parallel, name)} has no effect with one data-parallel rank"
    elif parallel.prefetch != default.prefetch and (
        (parallel.shard_ranks == 1 and zero != 3) or parallel.unit_layers == 0
    ):
        yield f"parallel.prefetch = {parallel.prefetch} has no effect: no units are gathered one after the other"
    if parallel.shard_ranks == 1 and parallel.zero == 2:
        yield "parallel.zero = 2 splits nothing: parallel.dp_shard is 1, all ranks hold whole gradients"
    yield from _model_without_effect(run)
    if run.train.tf32 and run.train.precision != "fp32":
        yield f"train.tf32 = true has no effect with precision {run.train.precision!r}: it is about fp32 products"


def _passes(run: RunConfig, tokens: int) -> Iterator[str]:
    consumed = run.train.steps * run.tokens_per_step
    passes = consumed / tokens
    if passes > MAX_USEFUL_EPOCHS:
        yield (
            f"{passes:.1f} passes over the data: beyond {MAX_USEFUL_EPOCHS} repetition brings little"
            f" (Muennighoff et al. 2023); lower train.steps to {MAX_USEFUL_EPOCHS * tokens // run.tokens_per_step:,}"
        )


def _compute_optimal(run: RunConfig) -> Iterator[str]:
    """Yield a warning about too few tokens for the model's size. Only active parameters count, because the scaling laws
    are fitted on dense models."""
    consumed, parameters = run.train.steps * run.tokens_per_step, count_active_parameters(run.model)
    optimal = compute_optimal_tokens(parameters)
    if consumed < optimal / 2:
        each = "active parameter" if run.model.is_moe else "parameter"
        yield (
            f"{consumed / parameters:.1f} tokens per {each}: a smaller model would reach a lower loss with the same"
            f" compute (about {optimal // parameters}: {format_count(optimal)} tokens; Hoffmann et al. 2022)"
        )


def _expert_warnings(run: RunConfig, cluster: Cluster, position: Position, times: dict[str, LineTime]) -> Iterator[str]:
    """Yield warnings about experts. position: the pipeline rank with the most expert parameters. times: traffic of the
    slowest rank, by line of the mesh."""
    if not run.model.is_moe:
        return
    moe, parallel = run.model.moe, run.parallel
    if not (moe.bias_rate or moe.sequence_loss or moe.global_loss):
        yield (
            "nothing balances the experts, and a few of them may take all tokens: set model.moe.global_loss = 0.01,"
            " or model.moe.bias_rate = 0.001 (Wang et al. 2024)"
        )
    if "ep" in times and times["ep"].crosses:
        legal = [ep for ep in legal_ep(moe.num_experts, parallel) if ep <= cluster.domain]
        each = _over_network(times["ep"])
        yield f"ep = {parallel.ep} spans nodes of {cluster.domain}: {each}; use ep of at most {max(legal)}"
    if moe.groups > 1 and parallel.ep > 1 and moe.groups % parallel.ep and parallel.ep % moe.groups:
        whole = [ep for ep in legal_ep(moe.num_experts, parallel) if moe.groups % ep == 0 or ep % moe.groups == 0]
        found = f"model.moe.groups = {moe.groups} and parallel.ep = {parallel.ep} divide experts in different places"
        why = "so choosing few groups does not send a token to few ranks"
        yield f"{found}, {why}; use ep = {nearest(parallel.ep, whole)}"
    if run.train.compile == "on":
        found, kept = 'train.compile = "on" leaves experts uncompiled', parallel.recompute == "selective"
        also = ", and all of the blocks that are recomputed selectively" if kept else ""
        yield f"{found}{also}, because the host has to read each expert's number of rows"
    rows = position.assignments * parallel.ep / moe.num_experts
    if cluster.device == "cuda" and rows < _FEW_ROWS:
        found = f"an expert multiplies {rows:.0f} rows of a micro-batch at once, too few to keep a GPU busy"
        yield f"{found}; raise train.micro_batch or parallel.ep"


def _context_warnings(
    run: RunConfig, parallel: Parallel, times: dict[str, LineTime], cluster: Cluster
) -> Iterator[str]:
    """Yield warnings about context parallelism. parallel: the layout without "auto" values. times: traffic of the
    slowest rank, by line of the mesh."""
    if parallel.cp == 1:
        return
    if "ulysses" in times and times["ulysses"].crosses:
        inside = max(cluster.domain // parallel.tp, 1)
        sides = [u for u in range(2, parallel.ulysses) if parallel.cp % u == parallel.ulysses % u == 0 and u <= inside]
        use = f'context = "usp" with ulysses = {max(sides)}' if sides else 'context = "ring"'
        yield f"Ulysses sends attention heads between nodes: {_over_network(times['ulysses'])}; use {use}"
    uneven = imbalance(parallel, run.train.seq_len, run.model.sliding_window)
    if uneven > _UNEVEN:
        found = f"context_layout = {parallel.context_layout!r} gives one rank {uneven:.2f} times the mean attention"
        yield f'{found} work, and all other ranks wait; use "zigzag"'


def _model_without_effect(run: RunConfig) -> Iterator[str]:
    """Yield warnings about settings of the model that have no effect with the run's sequence length."""
    moe, train, window = run.model.moe, run.train, run.model.sliding_window
    if window >= train.seq_len:
        yield f"model.sliding_window = {window} hides nothing in training: train.seq_len is {train.seq_len}"
    if moe.capacity_factor and moe.capacity(train.seq_len) >= train.seq_len:
        found = f"model.moe.capacity_factor = {moe.capacity_factor:g} drops nothing: an expert may take whole sequences"
        yield f"{found}; use less than {moe.num_experts / moe.top_k:g}, or remove it"


def _over_network(time: LineTime) -> str:
    took = f" ({format_seconds(time.seconds)})" if time.seconds else ""
    return f"{format_bytes(time.sent)} per rank and step{took} over the network"


def outlook_warnings(
    run: RunConfig, step_seconds: float, found: Outlook, assumptions: Assumptions | None
) -> Iterator[str]:
    """Yield warnings about slow storage, and about checkpoints that are too frequent or too far apart.

    step_seconds: predicted step time, without waiting for storage.
    """
    given = assumptions or Assumptions()
    reading = data_reading(run, step_seconds, given.storage_read_bytes_per_second)
    if reading.is_limit:
        yield f"the run takes {reading.share:,.1f} times as long as its steps: {reading.formula}"
    interval_is_given = given.checkpoint_every_steps or given.checkpoint_every_seconds
    if interval_is_given and found.failures and not given.in_background(run):
        yield from _interval(step_seconds * max(reading.share, 1.0), run, found)


def loses_time(found: Outlook, best: Outlook) -> bool:
    """Return True if the goodput of `found` is more than 1 percentage point below that of `best`."""
    return best.goodput - found.goodput > _RELEVANT_SHARE


def _interval(step_seconds: float, run: RunConfig, found: Outlook) -> Iterator[str]:
    mttf = found.days * DAY_SECONDS / found.failures
    stall, every = found.checkpoint_stall_seconds, found.checkpoint_every_seconds
    steps = max(min(round(daly_interval(mttf, stall) / step_seconds), run.train.steps), 1)
    now = goodput(mttf, stall, every, found.restart_seconds).value
    # Saves of the weights alone take their share at any interval.
    best = goodput(mttf, stall, steps * step_seconds, found.restart_seconds).value * min(found.goodput / now, 1.0)
    if best - found.goodput > _RELEVANT_SHARE:
        ((key, value),) = run.checkpoint.with_steps(steps).items()
        yield (
            f"with a failure every {format_seconds(mttf)}, a checkpoint every {format_seconds(every)} leaves a goodput"
            f" of {found.goodput:.1%}: {key} = {json.dumps(value)} gives {best:.1%} (Daly 2006)"
        )


def notes(run: RunConfig, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield (subject, sentence) pairs that describe the experts and the context parallelism of a legal run."""
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
        f"{moe.num_experts} experts, {moe.top_k} per token{shared}: {total} parameters, {active} active; {where},"
        f" {rows:,.0f} rows of a micro-batch each, if all have the same load"
    )


def _context(run: RunConfig, cluster: Cluster) -> str:
    """Describe the form of context parallelism and its cost on `cluster`. "auto" is replaced by the form that the
    trainer would choose, which assumes the links of H100 nodes."""
    parallel = resolve_parallel(run)
    uneven = imbalance(parallel, run.train.seq_len, run.model.sliding_window)
    how = "auto, chosen for H100 nodes: " if run.parallel.context == "auto" else ""
    costs = explain_context(run.model, run.train, parallel, links_of(cluster, run.train.precision))
    unknown = "" if cluster.link_bandwidth else f"; the links of {cluster.name} are unknown, H100 nodes' are assumed"
    layout = f"{parallel.context_layout}, " if parallel.ring > 1 else ""
    return f"{how}{costs}{unknown}; {layout}the busiest rank has {uneven:.2f} times the mean attention work"


def double_discount(plan: Plan, run: RunConfig, parameters: int) -> str:
    """Explain why common texts predict too many days and dollars: they multiply a sustained rate by an MFU.

    parameters: the size of a model given only by its size. Return "" for devices whose peak is not that of an H100.
    """
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
