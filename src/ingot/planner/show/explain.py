"""Explanations of a plan by topic, which fill numbers into its formulas, and a run's pipeline as a timeline."""

import textwrap
from collections.abc import Callable, Iterator

from ingot.errors import ConfigError, UsageError
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.predict.time.timed_step import bubble_overhead, bubble_share
from ingot.planner.run.hyperparameters import (
    ProposedValue,
    inference_aware,
    propose_hyperparameters,
    ramp_warning,
    size_in_laws,
)
from ingot.planner.run.plan import PlannedRun
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import positions, resolve_parallel
from ingot.theory.rules.nearest import divisors
from ingot.theory.schedule import NAMES, PUBLISHED, build_table, schedule_problems, simulate, timeline_text
from ingot.units import format_bytes, format_count, format_seconds

_WIDTH = 118
# Kinds of links and networks of a cluster, in words.
_LINKS = {
    "nvswitch": "NVSwitch",
    "pairs": "a slower link for each pair",
    "pcie": "PCIe",
    "torus": "torus",
    "infiniband": "InfiniBand",
    "ethernet": "Ethernet",
    "dcn": "data-center network",
}


def explain(topic: str, planned: PlannedRun) -> list[str]:
    """Return the lines that explain a topic of a plan. topic: one of TOPICS, or "all". Raises UsageError for others."""
    if topic == "all":
        return [line for name in TOPICS for line in ("", name, *explain(name, planned))][1:]
    if topic not in TOPICS:
        raise UsageError(
            "E-TOPIC-UNKNOWN",
            f"cannot explain {topic!r}",
            rule=f"topics are {', '.join(TOPICS)}, all",
            fix="--explain all shows every topic",
            topic=topic,
        )
    lines = TOPICS[topic](planned)
    return [part for line in lines for part in ([line] if len(line) <= _WIDTH else _wrapped(line, 2))]


def _wrapped(line: str, indent: int) -> list[str]:
    rest = " " * indent
    return textwrap.wrap(line, _WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def _aligned(pairs: dict[str, str]) -> Iterator[str]:
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        yield from _wrapped(f"{name:<{width}}  {text}", width + 2)


def _formulas(planned: PlannedRun, *prefixes: str) -> dict[str, str]:
    return {name: formula for name, formula in planned.plan.formulas.items() if name.startswith(prefixes)}


def _memory(planned: PlannedRun) -> Iterator[str]:
    plan, parallel = planned.plan, planned.run.parallel
    pairs = {}
    for kind, size in plan.memory_bytes.items():
        pairs[f"memory.{kind}"] = f"{format_bytes(size):>10} = {plan.formulas.get(f'memory.{kind}', '')}"
    pairs["memory"] = (
        f"{format_bytes(plan.total_memory_bytes):>10} at the peak, of {format_bytes(plan.cluster.memory_bytes)}"
    )
    yield from _aligned(pairs | _formulas(planned, "checkpoint_bytes"))
    for number, stage in enumerate(plan.stage_memory_bytes if parallel.pp > 1 else ()):
        largest = sorted(stage.items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest)
        yield f"pipeline rank {number}: {format_bytes(sum(stage.values()))}: {parts}"
    for moment, size in plan.moments_bytes.items():
        yield f"{moment}: {format_bytes(size)}"


def _time(planned: PlannedRun) -> Iterator[str]:
    plan = planned.plan
    if not plan.step_seconds:
        yield f"no {planned.run.train.precision} rate of {plan.cluster.name} is known: run `ingot doctor --bench`"
        return
    names = (
        "time.",
        "flops_per_token",
        "tokens_per_step",
        "total_flops",
        "mfu",
        "hfu",
        "outlook.days",
        "outlook.goodput",
    )
    pairs = _formulas(planned, *names)
    pairs["step"] = f"{format_seconds(plan.step_seconds)}, the sum of the parts above"
    if plan.step_seconds_high:
        low, high = format_seconds(plan.step_seconds_low), format_seconds(plan.step_seconds_high)
        pairs["band"] = f"{low} to {high}: the range that contains 80% of published runs around their prediction"
    yield from _aligned(pairs)


def _communication(planned: PlannedRun) -> Iterator[str]:
    plan, parallel = planned.plan, planned.run.parallel
    if parallel.world_size == 1:
        yield "one rank exchanges nothing"
        return
    cluster = plan.cluster
    inside, outside = (
        f" ({_LINKS.get(kind, kind)})" if cluster.device != "cpu" else ""
        for kind in (cluster.link_kind, cluster.network_kind)
    )
    yield (
        f"{cluster.name}: {cluster.link_bandwidth / 1e9:,.0f} GB/s between the {cluster.domain} devices of a domain"
        f"{inside}, {cluster.network_bandwidth / 1e9:,.0f} GB/s between domains{outside}, per device in one direction"
    )
    for line, c in plan.communication.items():
        where = "leaves the domain" if c.crosses else "stays in the domain"
        share = f", {c.exposed_seconds / plan.step_seconds:.1%} of a step" if plan.step_seconds else ""
        yield (
            f"{line}: sends {format_bytes(c.sent_bytes)} per rank and step, {where}; {format_seconds(c.seconds)} if"
            f" alone, of which a step waits for {format_seconds(c.exposed_seconds)}{share}"
        )
    yield from _aligned(_formulas(planned, "comms.", "communication."))


def _bubble(planned: PlannedRun) -> Iterator[str]:
    run, plan = planned.run, planned.plan
    parallel = resolve_parallel(run)
    if parallel.pp == 1:
        yield "no pipeline (parallel.pp = 1): no bubble"
        return
    ranks, micro_batches, each = parallel.pp, run.accumulation, parallel.stages_on_each_rank
    share, overhead = bubble_share(ranks, micro_batches, each), bubble_overhead(ranks, micro_batches, each)
    yield f"{parallel.schedule}, {ranks} ranks x {each} stages, {micro_batches} micro-batches"
    timeline = simulated(run, plan.cluster, positions(run))
    yield f"simulated with the planned time of each stage: ranks wait {timeline.bubble_fraction:.1%} of a step"
    filled = f"{ranks - 1}/({each} x {micro_batches} + {ranks - 1})"
    yield f"1F1B of equal stages: (p-1)/(v m + p-1) = {filled} = {share:.1%} of a step"
    yield f"the same relative to useful work: (p-1)/(v m) = {overhead:.1%}"
    if published := PUBLISHED.get(parallel.schedule):
        yield f"published for {parallel.schedule}: a rank idles {published.formula} ({published.source})"
    yield "other schedules with this pipeline and equal stages, F = I = W:"
    for name in PUBLISHED:
        if not any(schedule_problems(name, ranks, micro_batches)):
            idle = simulate(
                build_table(name, ranks, micro_batches), forward=1.0, backward_input=1.0, backward_weight=1.0
            )
            yield f"  {name:<12} {idle.bubble_fraction:6.1%}, keeps {max(idle.peak_in_flight)} micro-batches"
    yield f"twice the micro-batches: {bubble_share(ranks, 2 * micro_batches, each):.1%} for 1F1B"


def _learning_rate(planned: PlannedRun) -> Iterator[str]:
    yield f"optim.lr = {planned.run.optim.lr:g}: {planned.reasons.get('optim.lr', 'from the run file')}"
    yield from _proposals(planned, "learning", "lr", "schedule", "warm", "decay")


def _batch(planned: PlannedRun) -> Iterator[str]:
    run = planned.run
    tokens = run.tokens_per_step
    yield (
        f"{run.train.global_batch:,} sequences x {run.train.seq_len:,} = {format_count(tokens)} tokens:"
        f" {planned.reasons.get('train.global_batch', 'from the run file')}"
    )
    yield (
        f"{run.train.global_batch:,} = micro-batch {run.train.micro_batch} x {run.accumulation} accumulated"
        f" x {run.parallel.data_ranks:,} data-parallel ranks"
    )
    per_rank = run.train.global_batch // run.parallel.data_ranks
    yield f"micro-batches that divide the {per_rank} sequences of a rank: {', '.join(map(str, divisors(per_rank)))}"
    yield from _proposals(planned, "batch", "ramp")
    if warning := ramp_warning(run):
        yield warning


def _size(planned: PlannedRun) -> Iterator[str]:
    """Yield the rules on the model's size, and the sizes that are cheapest to train and to serve 1, 10 and 100 times
    the number of training tokens."""
    run = planned.run
    tokens = run.train.steps * run.tokens_per_step
    yield from _proposals(planned, "optimal", "loss", "experts")
    for times in (1, 10, 100):
        _, proposal = inference_aware(size_in_laws(run.model), tokens, times * tokens)
        yield f"cheapest to train and to serve {format_count(times * tokens)} tokens: {_proposal_text(proposal)}"


def _failures(planned: PlannedRun) -> Iterator[str]:
    whole = {name.removeprefix("outlook."): text for name, text in _formulas(planned, "outlook.").items()}
    if not whole:
        yield "failures are not counted: CPUs have no published failure rate, or the time of a step is unknown"
        return
    yield "M: mean time to failure of the job, w: stall of a checkpoint, t: time between checkpoints, R: restart"
    yield from _aligned(whole)


def _proposals(planned: PlannedRun, *words: str) -> Iterator[str]:
    run, batch = planned.run, planned.run.tokens_per_step
    tokens = run.train.steps * batch
    for proposal in propose_hyperparameters(run.model, tokens, run.train.seq_len, batch_tokens=batch):
        if any(word in proposal.name.lower() for word in words):
            yield f"{proposal.name}: {_proposal_text(proposal)}"


def _proposal_text(proposal: ProposedValue) -> str:
    note = f"; {proposal.note}" if proposal.note else ""
    return f"{proposal.shown}: {proposal.formula} ({proposal.source}{note})"


TOPICS: dict[str, Callable[[PlannedRun], Iterator[str]]] = {
    "mem": _memory,
    "time": _time,
    "comms": _communication,
    "bubble": _bubble,
    "lr": _learning_rate,
    "batch": _batch,
    "size": _size,
    "failures": _failures,
}


def timeline_lines(run: RunConfig, cluster: Cluster, schedule: str = "", width: int = 120) -> list[str]:
    """Return the lines of a timeline: a title, one line per pipeline rank, and the published bubble.

    schedule: "" is the run's own schedule, drawn with the planned times of its stages; another is drawn with F = I = W.
    width: number of columns. Raises ConfigError if the run has no pipeline, or the schedule does not fit the pipeline.
    """
    parallel, own = run.parallel, not schedule or schedule == run.parallel.schedule
    if parallel.pp == 1:
        raise ConfigError(
            "E-PIPELINE-NONE",
            "the run has no pipeline (parallel.pp = 1)",
            rule="a timeline shows at least two pipeline ranks",
            fix="set more pipeline ranks: --set parallel.pp=2",
            pp=parallel.pp,
        )
    name = schedule or parallel.schedule
    if name not in NAMES:
        raise ConfigError(
            "E-SCHEDULE-UNKNOWN",
            f"there is no schedule {name!r}",
            rule=f"schedules are {', '.join(NAMES)}",
            fix="--timeline 1f1b, or another of these",
            schedule=name,
        )
    if problems := list(schedule_problems(name, parallel.pp, run.accumulation)):
        raise ConfigError(
            "E-SCHEDULE-FIT",
            "; ".join(problems),
            rule="a schedule is possible only with certain numbers of ranks and micro-batches",
            fix="change parallel.pp or train.global_batch, or draw another schedule",
            schedule=name,
            pp=parallel.pp,
            micro_batches=run.accumulation,
        )
    if own:
        timeline, times = simulated(run, cluster, positions(run)), "planned times"
    else:
        table = build_table(name, parallel.pp, run.accumulation)
        timeline, times = simulate(table, forward=1.0, backward_input=1.0, backward_weight=1.0), "F = I = W"
    keeps = ", ".join(map(str, timeline.peak_in_flight))
    head = (
        f"{name}, {parallel.pp} ranks, {run.accumulation} micro-batches, {times}: idle {timeline.bubble_fraction:.1%}"
    )
    lines = [head, *timeline_text(timeline, width).split("\n"), f"micro-batches that ranks keep at once: {keeps}"]
    if published := PUBLISHED.get(name):
        lines.append(f"published: idle {published.formula} ({published.source})")
    return lines
