"""The recipe of a layout, told in the order in which it is decided: each choice with its reason, the formula with its
numbers, and the runner-up, which is another layout that the search evaluated in full."""

import math
from collections.abc import Iterator

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.show.runners_up import Choice, Story, layout_words
from ingot.planner.show.worth import weigh
from ingot.schema.parallel import Parallel
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import resolve_parallel
from ingot.theory.state import state_per_parameter
from ingot.units import format_bytes, format_count, format_seconds, format_usd

# From here on sequences ask for context parallelism, or for a reason why there is none (Llama team 2024, section 3.3.2,
# begin it beyond 8k tokens).
_LONG_SEQUENCE = 16_384


def recipe(story: Story) -> Iterator[Choice]:
    """From the bill to the score."""
    yield _bill(story)
    yield _tensor(story)
    yield _pipeline(story)
    yield _data(story)
    if story.run.parallel.cp > 1 or story.run.train.seq_len >= _LONG_SEQUENCE:
        yield _context(story)
    if story.run.model.is_moe:
        yield _experts(story)
    yield _recompute(story)
    yield _batch(story)
    yield _score(story)
    if weighed := weigh(story):
        yield weighed


def recipe_lines(story: Story) -> Iterator[str]:
    """The recipe for people to read."""
    for number, choice in enumerate(recipe(story), 1):
        yield f"{number}. {choice.title}: {choice.chosen}"
        yield f"   {choice.reason}"
        if choice.formula:
            yield f"   = {choice.formula}"
        if choice.runner_up:
            yield f"   {choice.runner_up}"


def _bill(story: Story) -> Choice:
    plan, run = story.planned.plan, story.run
    alone = Parallel(zero=1)
    each = state_per_parameter(alone, run.train.precision)
    state, device = each.total * plan.parameters, rank_memory_bytes(story.cluster, run.parallel.world_size)
    devices = math.ceil(state / device)
    needs = "one device would hold it" if devices == 1 else f"{devices} devices could just hold it, without activations"
    return Choice(
        title="the bill",
        chosen=f"{plan.formulas['total_flops']}; {format_bytes(state)} of state",
        reason=f"before anything is cut: the state has to be somewhere; {needs}",
        formula=(
            f"{format_count(plan.parameters)} x ({each.copy:g} weight + {each.gradient:g} gradient"
            f" + {each.master:g} master + {each.moments:g} moments) B = {format_bytes(state)};"
            f" a device has {format_bytes(device)}"
        ),
    )


def _tensor(story: Story) -> Choice:
    parallel, cluster = story.run.parallel, story.cluster
    if parallel.tp == 1:
        reason = "its collectives stand in the way of every layer, and nothing has to be cut that far to fit"
    elif parallel.tp > cluster.domain:
        reason = f"it leaves the {cluster.domain} devices that fast links join, because nothing fits otherwise"
    else:
        reason = f"it talks in every layer, so it stays among the {cluster.domain} devices that fast links join"
    return Choice(
        title="tensor parallel inside the node",
        chosen=_degree("tp", parallel.tp, ", with the sequence" if parallel.tp > 1 and parallel.sequence else ""),
        reason=reason,
        formula=_line(story, "tp") or _gap(story),
        runner_up=story.runner_up("tp"),
    )


def _gap(story: Story) -> str:
    """How much slower it is to leave the domain."""
    inside, across = story.cluster.link_bandwidth, story.cluster.network_bandwidth
    if not inside or not across or story.cluster.devices <= story.cluster.domain:
        return ""
    rates = f"{inside / 1e9:,.0f} GB/s inside / {across / 1e9:,.0f} GB/s across"
    return f"{rates} = {inside / across:.0f} times slower beyond"


def _pipeline(story: Story) -> Choice:
    run, plan, parallel = story.run, story.planned.plan, story.run.parallel
    if parallel.pp == 1:
        chosen, formula = "none", ""
        reason = "ranks that share the data are as fast or faster here, and no rank waits for another's stage"
    else:
        each, idle = parallel.stages_on_each_rank, parallel.pp - 1
        chosen = f"pp {parallel.pp}, {parallel.schedule}, {each} stages on each rank"
        reason = "stages send one activation to the next, the least that any axis sends, so they may lie across nodes"
        share = idle / (each * run.accumulation + idle)
        formula = (
            f"1F1B waits (p-1)/(v m + p-1) = {idle}/({each} x {run.accumulation} + {idle}) = {share:.1%};"
            f" {parallel.schedule} simulated with the times of these stages: {plan.bubble:.1%}"
        )
    return Choice(
        title="pipeline across nodes",
        chosen=chosen,
        reason=reason,
        formula=formula,
        runner_up=story.runner_up("pp") or story.runner_up("schedule", "stages_per_rank"),
    )


def _data(story: Story) -> Choice:
    run, parallel = story.run, resolve_parallel(story.run)
    each = state_per_parameter(parallel, run.train.precision)
    names = {1: "optimizer state is split", 2: "gradients are split too", 3: "parameters are split too (FSDP)"}
    ranks = parallel.shard_ranks
    what = f"zero {parallel.zero}: {names[int(parallel.zero)]}" if ranks > 1 else "DDP: nothing is split"
    copies = (
        f"{parallel.dp_replicate} copies x {parallel.dp_shard} shards" if parallel.dp_replicate > 1 else f"dp {ranks}"
    )
    reason = "the ranks that are left share the batch; the least is split that fits, because splitting is sending"
    if parallel.zero == 3:
        reason = "the ranks that are left share the batch, and each layer is gathered while the one before it computes"
    lines = "; ".join(filter(None, (_line(story, line) for line in ("shard", "dp_replicate", "expert_shard"))))
    return Choice(
        title="data parallel over the rest",
        chosen=f"{copies}, {what}",
        reason=reason,
        formula=f"{each.total:.3g} B of state per parameter on a rank, over {ranks} ranks"
        + (f"; {lines}" if lines else ""),
        runner_up=story.runner_up("zero", "dp_replicate"),
    )


def _context(story: Story) -> Choice:
    parallel, tokens = resolve_parallel(story.run), story.run.train.seq_len
    lines = filter(None, (_line(story, line) for line in ("ring", "ulysses")))
    return Choice(
        title="context parallel",
        chosen=_degree("cp", parallel.cp, f", {parallel.context_form}" if parallel.cp > 1 else ""),
        reason=f"a rank keeps {tokens // parallel.cp:,} of the {tokens:,} tokens of each sequence",
        formula="; ".join(lines),
        runner_up=story.runner_up("cp"),
    )


def _experts(story: Story) -> Choice:
    parallel, moe = story.run.parallel, story.run.model.moe
    return Choice(
        title="expert parallel",
        chosen=_degree("ep", parallel.ep, f": {moe.num_experts // parallel.ep} of {moe.num_experts} experts on a rank"),
        reason="tokens travel to experts" if parallel.ep > 1 else "every rank has, or gathers, all experts it needs",
        formula=_line(story, "ep"),
        runner_up=story.runner_up("ep"),
    )


def _recompute(story: Story) -> Choice:
    run, plan = story.run, story.planned.plan
    chosen = run.parallel.recompute
    there = rank_memory_bytes(story.cluster, run.parallel.world_size)
    if chosen == "none":
        reason = "activations fit as they are"
        formula = f"{format_bytes(plan.total_memory_bytes)} of {format_bytes(there)}"
    else:
        kept = story.without_recompute()
        needed = sum(term.value for term in memory_bill(kept, story.cluster, plan.software).values())
        reason = (
            "activations of this micro-batch do not fit without it" if needed > there else "a larger micro-batch pays"
        )
        # A plan of a bare size counts 6ND; what is recomputed is of the shape that stands in.
        model = plan.mfu * train_flops_per_token(run.model, run.train.seq_len) / plan.flops_per_token if plan.mfu else 0
        extra = f"; costs {plan.hfu / model - 1:.1%} more operations (HFU over MFU)" if plan.hfu and model else ""
        formula = f"without it {format_bytes(needed)}, with it {format_bytes(plan.total_memory_bytes)} of"
        formula += f" {format_bytes(there)}{extra}"
    return Choice(
        title="recompute",
        chosen=chosen,
        reason=reason,
        formula=formula,
        runner_up=story.runner_up("recompute"),
    )


def _batch(story: Story) -> Choice:
    run = story.run
    why = story.planned.reasons.get("train.global_batch", "the run file's")
    return Choice(
        title="global batch",
        chosen=f"{run.train.global_batch:,} sequences = {format_count(run.tokens_per_step)} tokens,"
        f" micro-batches of {run.train.micro_batch}",
        reason=why,
        formula=f"{run.train.global_batch:,} = {run.train.micro_batch} x {run.accumulation:,} accumulated"
        f" x {run.parallel.data_ranks:,} data-parallel ranks",
        runner_up=story.runner_up("micro_batch"),
    )


def _score(story: Story) -> Choice:
    plan, second = story.planned.plan, story.second()
    if not plan.step_seconds:
        return Choice(title="the score", chosen="unknown", reason=f"no rate of {story.cluster.name} is known")
    days = plan.outlook.days if plan.outlook else plan.total_seconds / 86400
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu else ""
    usd = sum(plan.outlook.usd_by_kind.values()) if plan.outlook else plan.usd
    return Choice(
        title="the score",
        chosen=f"{format_seconds(plan.step_seconds)} per step{mfu}, {days:.1f} days"
        + (f", {format_usd(usd)}" if usd else ""),
        reason=f"{layout_words(story.run)}: {story.found.considered:,} layouts compared,"
        f" {story.found.fitting:,} seen to fit",
        formula=plan.formulas.get("mfu", ""),
        runner_up=story.beside(second) if second else "",
    )


def _line(story: Story, name: str) -> str:
    """What a line of the mesh sends, "" where there is none."""
    line, seconds = story.planned.plan.communication.get(name), story.planned.plan.step_seconds
    if not line or not line.sent_bytes:
        return ""
    where = "the network" if line.crosses else "fast links"
    share = f", {line.exposed_seconds / seconds:.1%} of a step exposed" if seconds else ""
    return f"{name} sends {format_bytes(line.sent_bytes)} in {format_seconds(line.seconds)} over {where}{share}"


def _degree(name: str, degree: int, form: str) -> str:
    return f"{name} {degree}{form}" if degree > 1 else "none"
