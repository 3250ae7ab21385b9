"""What a user should know before a run starts: things that are legal, and likely to disappoint."""

from collections.abc import Iterator
from dataclasses import replace

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.links import LineTime, line_times
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.run.expert_advice import context_advice, expert_advice, over_network, without_effect
from ingot.planner.run.scaling import MAX_USEFUL_EPOCHS, compute_optimal_tokens
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.schema.tokens import TokenManifest
from ingot.theory.layout import layout_problems, positions, resolve_parallel
from ingot.theory.params import count_active_parameters
from ingot.theory.state import kept_gradient_bytes
from ingot.theory.term import Term
from ingot.theory.traffic import step_traffic
from ingot.units import format_bytes, format_count

_TIGHT = 0.9
_LARGE_BUBBLE = 0.2
_UINT16_IDS = 65_536


def warnings(
    run: RunConfig,
    cluster: Cluster,
    bill: dict[str, Term],
    seconds: float,
    tokens: int,
    manifest: TokenManifest | None,
    software: Software = INGOT,
) -> Iterator[str]:
    """One sentence each, with the way out. tokens: in the training set, 0 when unknown."""
    yield from _memory(run, cluster, bill)
    yield from _recipe(cluster, software)
    yield from _devices(run, cluster)
    yield from _layout(run, cluster, seconds)
    if tokens:
        yield from _passes(run, tokens)
        yield from _compute_optimal(run)
    yield from _rates(run, cluster, seconds, manifest)


def check_warnings(
    run: RunConfig, cluster: Cluster, bill: dict[str, Term], seconds: float, manifest: TokenManifest | None
) -> Iterator[str]:
    """Those that may stop or spoil the run; what the size of model and data implies was said by the plan."""
    yield from _memory(run, cluster, bill)
    if cluster.device == "cpu":
        yield from _devices(run, cluster)
    yield from _layout(run, cluster, seconds)
    if manifest and manifest.tokens:
        yield from _passes(run, manifest.tokens)
    yield from _rates(run, cluster, seconds, manifest)


def _recipe(cluster: Cluster, software: Software) -> Iterator[str]:
    bits = "4" if software.recipe == "nvfp4" else "8"
    if software.recipe and not cluster.peak_flops.get(f"fp{bits}"):
        name = cluster.device_name or cluster.name
        yield f"{name} has no products in {bits} bits: {software.recipe} makes nothing faster there; leave --fp8"


def _rates(run: RunConfig, cluster: Cluster, seconds: float, manifest: TokenManifest | None) -> Iterator[str]:
    if run.model.vocab_size > _UINT16_IDS and manifest is None:
        yield f"a vocabulary of {run.model.vocab_size:,} ids needs uint32 token shards: 4 bytes per token"
    if not seconds:
        yield f"no {run.train.precision} rate of {cluster.name} is known: run `ingot doctor --bench` to predict time"
    elif not cluster.measured and cluster.device != "tpu":
        yield f"time on {cluster.name} follows from published figures; `ingot doctor --bench` there measures it"


def _memory(run: RunConfig, cluster: Cluster, bill: dict[str, Term]) -> Iterator[str]:
    needed = sum(term.value for term in bill.values())
    there = rank_memory_bytes(cluster, run.parallel.world_size)
    largest = max((kind for kind in bill if kind != "runtime"), key=lambda kind: bill[kind].value)
    if largest in ("activations", "logits", "fragmentation"):
        fix = "lower train.micro_batch" if run.train.micro_batch > 1 else "shorten train.seq_len"
    else:
        fix = "use more devices (parallel.dp_shard)" if cluster.device != "cpu" else "use a smaller model"
    if largest == "activations" and run.train.micro_batch == 1 and run.parallel.recompute == "none":
        fix = "recompute them (parallel.recompute)"
    elif largest == "activations" and run.train.micro_batch == 1 and cluster.device != "cpu":
        fix = "cut sequences (parallel.cp), or shorten train.seq_len"
    if needed > there:
        yield f"does not fit: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"
    elif needed > _TIGHT * there:
        yield f"tight: {format_bytes(needed)} per rank of {format_bytes(there)}, mostly {largest}; {fix}"


def _devices(run: RunConfig, cluster: Cluster) -> Iterator[str]:
    ranks = run.parallel.world_size
    if cluster.device != "cpu" and ranks > cluster.devices:
        kind = "TPUs" if cluster.device == "tpu" else "GPUs"
        yield f"{ranks} ranks want {ranks} {kind}, {cluster.name} has {cluster.devices}; lower {degrees(run.parallel)}"
    elif cluster.device == "cpu" and cluster.measured and ranks != cluster.devices_per_node:
        yield f"{cluster.name} was measured with {cluster.devices_per_node} ranks, the run has {ranks}; times differ"


def degrees(parallel: Parallel) -> str:
    """The keys of the run file that make the number of ranks."""
    named = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(parallel, name) > 1]
    return " or ".join(f"parallel.{name}" for name in named or ["dp_shard"])


def _layout(run: RunConfig, cluster: Cluster, seconds: float) -> Iterator[str]:
    yield from _canonical(run)
    yield from _without_effect(run)
    everyone = positions(run)
    if run.parallel.pp > 1:
        share = simulated(run, cluster, everyone).bubble_fraction
        if share > _LARGE_BUBBLE:
            found = (
                f"pipeline ranks wait {share:.0%} of a step ({run.parallel.schedule}, {run.accumulation} micro-batches)"
            )
            yield f"{found}; use more micro-batches or another schedule"
    slowest: dict[str, LineTime] = {}
    for position in everyone:
        for line, time in line_times(position, cluster).items():
            slowest[line] = max(slowest.get(line, time), time, key=lambda t: t.sent)
    yield from _slow_links(run, cluster, slowest, seconds)
    yield from context_advice(run, everyone[0].parallel, slowest, cluster)
    yield from expert_advice(run, cluster, max(everyone, key=lambda p: p.routed), slowest)


def _slow_links(run: RunConfig, cluster: Cluster, slowest: dict[str, LineTime], seconds: float) -> Iterator[str]:
    """Lines that talk in every layer should stay inside of a node."""
    domain, zero, parallel = cluster.domain, resolve_parallel(run).zero, run.parallel
    crossing = {line: time for line, time in slowest.items() if time.crosses}
    if "tp" in crossing:
        each = over_network(crossing["tp"])
        yield f"tp = {parallel.tp} spans nodes of {domain}: {each}; use tp of at most {domain}"
    gathers = [crossing[line] for line in ("shard", "expert_shard") if line in crossing]
    took = sum(time.seconds for time in gathers)
    if zero == 3 and parallel.dp_shard > 1 and seconds and took > seconds / 2:  # less hides behind computation
        both = LineTime(sum(time.sent for time in gathers), took, True)
        yield f"zero 3 spans nodes: {over_network(both)}; try {_inside_nodes(run, cluster)}"


def _inside_nodes(run: RunConfig, cluster: Cluster) -> str:
    """A layout that gathers parameters inside of nodes, where one has room for them."""
    parallel = run.parallel
    inside = max(cluster.domain // (parallel.tp * parallel.cp), 1)
    shape = {"dp_shard": inside, "dp_replicate": parallel.data_ranks // inside}
    other = replace(run, parallel=replace(parallel, **shape))
    problem = any(layout_problems(other)) or other.parallel.world_size != parallel.world_size
    if not problem and sum(term.value for term in memory_bill(other, cluster).values()) <= cluster.memory_bytes:
        return ", ".join(f"{axis} = {degree}" for axis, degree in shape.items())
    return "longer micro-batches (train.micro_batch), or parallel.pp or tp"


def _canonical(run: RunConfig) -> Iterator[str]:
    """What the fixed order of sums costs."""
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
        f"canonical sums: {format_bytes(sent)} sent per rank and step, fast ones {format_bytes(otherwise)}; and up to "
        f"{format_bytes(kept)} of buffers for sums"
    )


def _without_effect(run: RunConfig) -> Iterator[str]:
    """Settings that were changed and do nothing in this layout."""
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
    yield from without_effect(run)
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
    """Of experts, those that a token meets count: the fits are of dense models."""
    consumed, parameters = run.train.steps * run.tokens_per_step, count_active_parameters(run.model)
    optimal = compute_optimal_tokens(parameters)
    if consumed < optimal / 2:
        each = "active parameter" if run.model.is_moe else "parameter"
        yield (
            f"{consumed / parameters:.1f} tokens per {each}: a smaller model would reach a lower loss with the same"
            f" compute (about {optimal // parameters}: {format_count(optimal)} tokens; Hoffmann et al. 2022)"
        )
