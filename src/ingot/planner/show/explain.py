"""Why a plan's numbers are what they are: one topic at a time, each as a formula with its numbers filled in."""

import textwrap
from collections.abc import Callable, Iterator

from ingot.errors import UsageError
from ingot.planner.predict.time.bubble import bubble_overhead, bubble_share
from ingot.planner.predict.time.step_time import simulated
from ingot.planner.run.hyperparameters import Proposal, inference_aware, propose_hyperparameters, size_in_laws
from ingot.planner.run.plan import Planned
from ingot.planner.run.ramp import ramp_warning
from ingot.schema.nearest import divisors
from ingot.theory.layout import positions, resolve_parallel
from ingot.theory.schedule import PUBLISHED, build_table, schedule_problems, simulate
from ingot.units import format_bytes, format_count, format_seconds

_WIDTH = 118


def explain(topic: str, planned: Planned) -> list[str]:
    """topic: one of TOPICS, or "all". Raises UsageError for others."""
    if topic == "all":
        return [line for name in TOPICS for line in ("", name, *explain(name, planned))][1:]
    if topic not in TOPICS:
        raise UsageError(f"cannot explain {topic!r}", rule=f"topics are {', '.join(TOPICS)}, all")
    lines = TOPICS[topic](planned)
    return [part for line in lines for part in ([line] if len(line) <= _WIDTH else _wrapped(line, 2))]


def _wrapped(line: str, indent: int) -> list[str]:
    rest = " " * indent
    return textwrap.wrap(line, _WIDTH, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def _aligned(pairs: dict[str, str]) -> Iterator[str]:
    width = max(map(len, pairs), default=0)
    for name, text in pairs.items():
        yield from _wrapped(f"{name:<{width}}  {text}", width + 2)


def _formulas(planned: Planned, *prefixes: str) -> dict[str, str]:
    return {name: formula for name, formula in planned.plan.formulas.items() if name.startswith(prefixes)}


def _memory(planned: Planned) -> Iterator[str]:
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


def _time(planned: Planned) -> Iterator[str]:
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
        pairs["band"] = f"{low} to {high}: where 80% of published runs lie around their prediction"
    yield from _aligned(pairs)


def _communication(planned: Planned) -> Iterator[str]:
    plan, parallel = planned.plan, planned.run.parallel
    if parallel.world_size == 1:
        yield "one rank exchanges nothing"
        return
    cluster = plan.cluster
    yield (
        f"{cluster.name}: {cluster.link_bandwidth / 1e9:,.0f} GB/s between the {cluster.domain} devices of a domain,"
        f" {cluster.network_bandwidth / 1e9:,.0f} GB/s beyond, of one device in one direction"
    )
    for line, c in plan.communication.items():
        where = "leaves the domain" if c.crosses else "stays in the domain"
        share = f", {c.exposed_seconds / plan.step_seconds:.1%} of a step" if plan.step_seconds else ""
        yield (
            f"{line}: sends {format_bytes(c.sent_bytes)} per rank and step, {where}; {format_seconds(c.seconds)} on its"
            f" own, of which a step waits for {format_seconds(c.exposed_seconds)}{share}"
        )
    yield from _aligned(_formulas(planned, "comms.", "communication."))


def _bubble(planned: Planned) -> Iterator[str]:
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
    yield f"the same over useful work: (p-1)/(v m) = {overhead:.1%}"
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


def _learning_rate(planned: Planned) -> Iterator[str]:
    yield f"optim.lr = {planned.run.optim.lr:g}: {planned.reasons.get('optim.lr', 'from the run file')}"
    yield from _proposals(planned, "learning", "lr", "schedule", "warm", "decay")


def _batch(planned: Planned) -> Iterator[str]:
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


def _size(planned: Planned) -> Iterator[str]:
    """Over-training is judged by what is served: once, ten and a hundred times the tokens of the training."""
    run = planned.run
    tokens = run.train.steps * run.tokens_per_step
    yield from _proposals(planned, "optimal", "loss", "experts")
    for times in (1, 10, 100):
        _, proposal = inference_aware(size_in_laws(run.model), tokens, times * tokens)
        yield f"cheapest to train and to serve {format_count(times * tokens)} tokens: {_told(proposal)}"


def _failures(planned: Planned) -> Iterator[str]:
    whole = {name.removeprefix("outlook."): text for name, text in _formulas(planned, "outlook.").items()}
    if not whole:
        yield "no failures are counted: a CPU has no published rate, or the time of a step is not known"
        return
    yield "M mean time to failure of the job, w stall of a checkpoint, t steps between two, R restart"
    yield from _aligned(whole)


def _proposals(planned: Planned, *words: str) -> Iterator[str]:
    run, batch = planned.run, planned.run.tokens_per_step
    tokens = run.train.steps * batch
    for proposal in propose_hyperparameters(run.model, tokens, run.train.seq_len, batch_tokens=batch):
        if any(word in proposal.name.lower() for word in words):
            yield f"{proposal.name}: {_told(proposal)}"


def _told(proposal: Proposal) -> str:
    note = f"; {proposal.note}" if proposal.note else ""
    return f"{proposal.shown}: {proposal.formula} ({proposal.source}{note})"


TOPICS: dict[str, Callable[[Planned], Iterator[str]]] = {
    "mem": _memory,
    "time": _time,
    "comms": _communication,
    "bubble": _bubble,
    "lr": _learning_rate,
    "batch": _batch,
    "size": _size,
    "failures": _failures,
}
