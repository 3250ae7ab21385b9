"""The layouts that a mixture of experts allows, and the rules of expert settings that depend on the sequence length.

    ep         divides the experts, and the ranks that share one copy of the model: dp_shard x cp x tp
    tp         only with sequence parallelism, so that each rank has its own tokens to send
    capacity   at least one token of a sequence for each expert

Groups of experts (model.moe.groups) limit the ranks that a token is sent to: if ep divides groups, or groups divides
ep, a token's experts are on at most top_groups / groups of the ep ranks (rounded up). Otherwise groups straddle ranks:
the model is the same, but nothing is limited, so the planner only advises against it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.theory.rules.nearest import divisors, nearest

Problems = Iterator[tuple[str, str]]


def expert_rules(run: RunConfig) -> Problems:
    """Yield (dotted key of the run file, problem and fix) for each broken rule. Degrees must be at least 1."""
    arch, parallel = run.model, run.parallel
    if not arch.is_moe:
        if parallel.ep > 1:
            found = f"{parallel.ep} ranks for experts, but the model has none (model.moe.num_experts = 0)"
            yield "parallel.ep", f"{found}; remove it, or give the model experts"
        return
    yield from _degree_rules(arch.moe.num_experts, parallel)
    if parallel.tp > 1 and not parallel.sequence:
        why = f"experts see the tokens of one rank, and tp = {parallel.tp} without it gives every rank all tokens"
        yield "parallel.sequence", f"is false: {why}; set it to true, or tp = 1"
    yield from _capacity_rule(run)


def legal_ep(experts: int, parallel: Parallel) -> list[int]:
    """Return the legal degrees of expert parallelism.

    They divide the experts and the ranks that share one copy of the model, and satisfy `_takes_parts`.
    """
    found = divisors(math.gcd(experts, parallel.dp_shard * parallel.cp * parallel.tp))
    return [ep for ep in found if _takes_parts(ep, parallel)]


def _takes_parts(ep: int, parallel: Parallel) -> bool:
    """Return whether ep divides or is a multiple of both tp and tp x cp, so that each group of ep neighboring ranks is
    a part of one line of an axis, or consists of whole lines.

    Otherwise the groups would differ in the axes that they span.
    """
    inner = parallel.tp, parallel.tp * parallel.cp
    return all(ep % size == 0 or size % ep == 0 for size in inner)


def _degree_rules(experts: int, parallel: Parallel) -> Problems:
    ep, ranks = parallel.ep, parallel.dp_shard * parallel.cp * parallel.tp
    near = nearest(ep, legal_ep(experts, parallel)) or "1"
    if experts % ep:
        yield "parallel.ep", f"{ep} does not divide model.moe.num_experts={experts}; nearest: {near}"
    if ranks % ep:
        axes = [f"{axis} {getattr(parallel, axis)}" for axis in ("dp_shard", "cp", "tp")]
        of = f"the {ranks} ranks that share a copy of the model ({' x '.join(axes)})"
        yield "parallel.ep", f"{ep} does not divide {of}; nearest: {near}, or {_more_room(experts, parallel)}"
    elif not _takes_parts(ep, parallel):
        rule = "ep divides tp, or is tp times a divisor of cp, or tp x cp times a divisor of dp_shard"
        found = f"groups of {ep} neighbors straddle tp {parallel.tp} and cp {parallel.cp}"
        yield "parallel.ep", f"{found}: {rule}; nearest: {near}"


def _more_room(experts: int, parallel: Parallel) -> str:
    """Return, as text, which other degrees would have to be raised to allow this ep."""
    if parallel.reduce == "canonical":
        return "raise cp or tp (a canonical sum keeps dp_shard = 1); raising dp_replicate or pp does not help"
    times = parallel.ep // math.gcd(parallel.ep, parallel.dp_shard * parallel.cp * parallel.tp)
    shards = replace(parallel, dp_shard=parallel.dp_shard * times)
    example = ""
    if parallel.dp_replicate % times == 0 and parallel.ep in legal_ep(experts, shards):
        example = f", for example dp_shard = {shards.dp_shard} with dp_replicate = {parallel.dp_replicate // times}"
    return f"raise dp_shard, cp or tp{example}; raising dp_replicate or pp does not help"


def _capacity_rule(run: RunConfig) -> Problems:
    """Yield a problem if the capacity is below one token per expert; rounding up would silently make it one token."""
    moe, seq_len = run.model.moe, run.train.seq_len
    if moe.top_k < 1 or moe.capacity_factor <= 0:
        return
    tokens = moe.capacity_factor * moe.top_k * seq_len / moe.num_experts
    if tokens < 1:
        least = moe.num_experts / (moe.top_k * seq_len)
        found = f"{moe.capacity_factor:g} x top_k {moe.top_k} x seq_len {seq_len} / {moe.num_experts} experts"
        use = f"use at least {math.ceil(least * 1e4) / 1e4:g}, or 0 for no limit"
        yield "model.moe.capacity_factor", f"{found} = {tokens:.2g}, less than one token of a sequence; {use}"
