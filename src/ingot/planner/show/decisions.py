"""The decisions of a plan in order, each with its reason, its formula and the runner-up, which is another layout that
the search evaluated in full. `ingot plan --explain recipe` prints them."""

import math
from collections.abc import Iterator

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.show.alternatives import Decision, DecisionContext, dense_vs_moe, full_layout_text
from ingot.planner.show.plans import format_days
from ingot.schema.parallel import Parallel
from ingot.theory.failures import DAY_SECONDS
from ingot.theory.flops import train_flops_per_token
from ingot.theory.layout import resolve_parallel
from ingot.theory.params import state_per_parameter
from ingot.theory.update import mean_moments
from ingot.units import format_bytes, format_count, format_seconds, format_usd

# From this sequence length on, context parallelism is a decision of its own, even if it is not used (Llama team 2024,
# section 3.3.2, uses it beyond 8k tokens).
_LONG_SEQUENCE = 16_384


def decisions(context: DecisionContext) -> Iterator[Decision]:
    """Yield the decisions of a plan in order, from the memory that the model needs to the predicted time and cost."""
    yield _bill(context)
    yield _tensor(context)
    yield _pipeline(context)
    yield _data(context)
    if context.run.parallel.cp > 1 or context.run.train.seq_len >= _LONG_SEQUENCE:
        yield _context(context)
    if context.run.model.is_moe:
        yield _experts(context)
    yield _recompute(context)
    yield _batch(context)
    yield _score(context)
    if weighed := dense_vs_moe(context):
        yield weighed


def decision_lines(context: DecisionContext) -> Iterator[str]:
    """Yield the decisions as numbered lines of text."""
    for number, decision in enumerate(decisions(context), 1):
        yield f"{number}. {decision.title}: {decision.chosen}"
        yield f"   {decision.reason}"
        if decision.formula:
            yield f"   = {decision.formula}"
        if decision.runner_up:
            yield f"   {decision.runner_up}"


def _bill(context: DecisionContext) -> Decision:
    plan, run = context.planned.plan, context.run
    alone = Parallel(zero=1)
    each = state_per_parameter(alone, run.train.precision, moments=mean_moments(run))
    state, device = each.total * plan.parameters, rank_memory_bytes(context.cluster, run.parallel.world_size)
    count = math.ceil(state / device)
    needs = "one device can hold it" if count == 1 else f"{count} devices can just hold it, without activations"
    return Decision(
        title="the bill",
        chosen=f"{plan.formulas['total_flops']}; {format_bytes(state)} of state",
        reason=f"weights, gradients and optimizer state before any split; {needs}",
        formula=(
            f"{format_count(plan.parameters)} x ({each.copy:g} weight + {each.gradient:g} gradient"
            f" + {each.master:g} master + {each.moments:g} moments) B = {format_bytes(state)};"
            f" a device has {format_bytes(device)}"
        ),
    )


def _tensor(context: DecisionContext) -> Decision:
    parallel, cluster = context.run.parallel, context.cluster
    if parallel.tp == 1:
        reason = "every layer would wait for its collectives, and the model fits without it"
    elif parallel.tp > cluster.domain:
        reason = f"larger than the {cluster.domain} devices that fast links join, because no other layout fits"
    else:
        reason = f"it communicates in every layer, so it stays within the {cluster.domain} devices that fast links join"
    return Decision(
        title="tensor parallel inside the node",
        chosen=_degree("tp", parallel.tp, ", with the sequence" if parallel.tp > 1 and parallel.sequence else ""),
        reason=reason,
        formula=_line(context, "tp") or _gap(context),
        runner_up=context.runner_up("tp"),
    )


def _gap(context: DecisionContext) -> str:
    """Return as text how much slower the network is than fast links; "" if all devices are in one domain."""
    inside, across = context.cluster.link_bandwidth, context.cluster.network_bandwidth
    if not inside or not across or context.cluster.devices <= context.cluster.domain:
        return ""
    rates = f"{inside / 1e9:,.0f} GB/s inside / {across / 1e9:,.0f} GB/s across"
    return f"{rates} = {inside / across:.0f} times slower across"


def _pipeline(context: DecisionContext) -> Decision:
    run, plan, parallel = context.run, context.planned.plan, context.run.parallel
    if parallel.pp == 1:
        chosen, formula = "none", ""
        reason = "data-parallel ranks are at least as fast here, and no rank waits for the stage of another rank"
    else:
        each, idle = parallel.stages_on_each_rank, parallel.pp - 1
        chosen = f"pp {parallel.pp}, {parallel.schedule}, {each} stages on each rank"
        reason = "a stage sends only activations to the next, less than any other axis, so it may cross nodes"
        share = idle / (each * run.accumulation + idle)
        formula = (
            f"1F1B waits (p-1)/(v m + p-1) = {idle}/({each} x {run.accumulation} + {idle}) = {share:.1%};"
            f" {parallel.schedule} simulated with the times of these stages: {plan.bubble:.1%}"
        )
    return Decision(
        title="pipeline across nodes",
        chosen=chosen,
        reason=reason,
        formula=formula,
        runner_up=context.runner_up("pp") or context.runner_up("schedule", "stages_per_rank"),
    )


def _data(context: DecisionContext) -> Decision:
    run, parallel = context.run, resolve_parallel(context.run)
    each = state_per_parameter(parallel, run.train.precision, moments=mean_moments(run))
    names = {1: "optimizer state is split", 2: "gradients are split too", 3: "parameters are split too (FSDP)"}
    ranks = parallel.shard_ranks
    what = f"zero {parallel.zero}: {names[int(parallel.zero)]}" if ranks > 1 else "DDP: nothing is split"
    copies = (
        f"{parallel.dp_replicate} copies x {parallel.dp_shard} shards" if parallel.dp_replicate > 1 else f"dp {ranks}"
    )
    reason = "the remaining ranks share the batch; as little as possible is split, because splitting causes traffic"
    if parallel.zero == 3:
        reason = "the remaining ranks share the batch; each layer is gathered while the previous layer computes"
    lines = "; ".join(filter(None, (_line(context, line) for line in ("shard", "dp_replicate", "expert_shard"))))
    return Decision(
        title="data parallel over the rest",
        chosen=f"{copies}, {what}",
        reason=reason,
        formula=f"{each.total:.3g} B of state per parameter on a rank, over {ranks} ranks"
        + (f"; {lines}" if lines else ""),
        runner_up=context.runner_up("zero", "dp_replicate"),
    )


def _context(context: DecisionContext) -> Decision:
    parallel, tokens = resolve_parallel(context.run), context.run.train.seq_len
    lines = filter(None, (_line(context, line) for line in ("ring", "ulysses")))
    return Decision(
        title="context parallel",
        chosen=_degree("cp", parallel.cp, f", {parallel.context_form}" if parallel.cp > 1 else ""),
        reason=f"each rank holds {tokens // parallel.cp:,} of the {tokens:,} tokens of each sequence",
        formula="; ".join(lines),
        runner_up=context.runner_up("cp"),
    )


def _experts(context: DecisionContext) -> Decision:
    parallel, moe = context.run.parallel, context.run.model.moe
    return Decision(
        title="expert parallel",
        chosen=_degree("ep", parallel.ep, f": {moe.num_experts // parallel.ep} of {moe.num_experts} experts on a rank"),
        reason="tokens are sent to experts" if parallel.ep > 1 else "every rank has, or gathers, all of its experts",
        formula=_line(context, "ep"),
        runner_up=context.runner_up("ep"),
    )


def _recompute(context: DecisionContext) -> Decision:
    run, plan = context.run, context.planned.plan
    chosen = run.parallel.recompute
    there = rank_memory_bytes(context.cluster, run.parallel.world_size)
    if chosen == "none":
        reason = "all activations fit in memory"
        formula = f"{format_bytes(plan.total_memory_bytes)} of {format_bytes(there)}"
    else:
        kept = context.without_recompute()
        needed = sum(term.value for term in memory_bill(kept, context.cluster, plan.software).values())
        reason = (
            "activations of this micro-batch do not fit without it"
            if needed > there
            else "the larger micro-batch that it allows is faster"
        )
        # For a model given only by its size, plan.mfu counts 6ND, but plan.hfu the FLOPs of the assumed shape.
        model = plan.mfu * train_flops_per_token(run.model, run.train.seq_len) / plan.flops_per_token if plan.mfu else 0
        extra = f"; costs {plan.hfu / model - 1:.1%} more operations (HFU over MFU)" if plan.hfu and model else ""
        formula = f"without it {format_bytes(needed)}, with it {format_bytes(plan.total_memory_bytes)} of"
        formula += f" {format_bytes(there)}{extra}"
    return Decision(
        title="recompute",
        chosen=chosen,
        reason=reason,
        formula=formula,
        runner_up=context.runner_up("recompute"),
    )


def _batch(context: DecisionContext) -> Decision:
    run = context.run
    why = context.planned.reasons.get("train.global_batch", "the run file's")
    return Decision(
        title="global batch",
        chosen=f"{run.train.global_batch:,} sequences = {format_count(run.tokens_per_step)} tokens,"
        f" micro-batches of {run.train.micro_batch}",
        reason=why,
        formula=f"{run.train.global_batch:,} = {run.train.micro_batch} x {run.accumulation:,} accumulated"
        f" x {run.parallel.data_ranks:,} data-parallel ranks",
        runner_up=context.runner_up("micro_batch"),
    )


def _score(context: DecisionContext) -> Decision:
    plan, second = context.planned.plan, context.second()
    if not plan.step_seconds:
        return Decision(title="the score", chosen="unknown", reason=f"no rate of {context.cluster.name} is known")
    days = plan.outlook.days if plan.outlook else plan.total_seconds / DAY_SECONDS
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu else ""
    usd = sum(plan.outlook.usd_by_kind.values()) if plan.outlook else plan.usd
    return Decision(
        title="the score",
        chosen=f"{format_seconds(plan.step_seconds)} per step{mfu}, {format_days(days)}"
        + (f", {format_usd(usd)}" if usd else ""),
        reason=f"{full_layout_text(context.run)}: {context.search_result.considered:,} layouts compared,"
        f" {context.search_result.fitting:,} found to fit",
        formula=plan.formulas.get("mfu", ""),
        runner_up=context.compared(second) if second else "",
    )


def _line(context: DecisionContext, name: str) -> str:
    """Describe the traffic on the line `name` of the mesh; "" if the layout has none there."""
    line, seconds = context.planned.plan.communication.get(name), context.planned.plan.step_seconds
    if not line or not line.sent_bytes:
        return ""
    where = "the network" if line.crosses else "fast links"
    share = f", {line.exposed_seconds / seconds:.1%} of a step exposed" if seconds else ""
    return f"{name} sends {format_bytes(line.sent_bytes)} in {format_seconds(line.seconds)} over {where}{share}"


def _degree(name: str, degree: int, form: str) -> str:
    return f"{name} {degree}{form}" if degree > 1 else "none"
