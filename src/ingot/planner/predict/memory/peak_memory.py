"""The memory bill of a rank at its peak, by kind; the bills of all pipeline ranks; and the peak of each phase of a run.

The live bytes come from theory/memory.py (state) and peak.py (forward and backward). This module turns them into terms
with formulas, and adds the memory that the allocator loses and that of the process.
"""

from dataclasses import replace

from ingot.planner.predict.memory.activations import blocks_text
from ingot.planner.predict.memory.peak import MemoryPeak, messages, peak
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory import memory
from ingot.theory.layout import Position, positions
from ingot.theory.memory import Term

# Loader, tokenizer, held-out text and checkpoint buffers of a rank: 13 MiB at the start of a quickstart run, 60 MiB at
# its end, both measured. With a GPU they are on the host, not on the device.
_HOST_PARTS_BYTES = 32 * 1024**2


def memory_bill(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> dict[str, Term]:
    """Return the terms of one rank's peak memory, by kind: live tensors, fragmentation, and the process. With a
    pipeline this is the rank that needs the most."""
    position = _fullest(run, cluster.device, software)
    return _with_process(position_bill(position, cluster.device) | _snapshot(position, run, cluster), run, cluster)


def stage_bills(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> tuple[dict[str, Term], ...]:
    """Return the memory bill of each pipeline rank, in order."""
    return tuple(
        _with_process(position_bill(position, cluster.device) | _snapshot(position, run, cluster), run, cluster)
        for position in positions(run, software)
    )


def moments(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> dict[str, Term]:
    """Return the memory peak of each phase of a run, for the rank that needs the most, with fragmentation and process.

    The phases are "initialisation", "first step", "steady state" and "save". The first step needs as much as any other,
    because the trainer allocates both moments of AdamW at its start.
    """
    device = cluster.device
    position = _fullest(run, device, software)
    bill, copy = position_bill(position, device), list(_snapshot(position, run, cluster).values())
    if device == "cpu":
        position = _without_host_offload(position)
    state = [memory.weights(position), memory.optimizer(position)]
    state += [memory.gathered(position)] if position.parallel.zero != 3 else []
    coming = memory.first_units(position)
    between = memory.buffers_that_stay(position)
    parts = {
        "initialisation": [*state, coming],
        "first step": list(bill.values()),
        "steady state": [*bill.values(), *copy],
        "save": [*state, between, coming, *copy],
    }
    return {
        name: _joined(_with_process({str(i): t for i, t in enumerate(terms)}, run, cluster))
        for name, terms in parts.items()
    }


def live_bill(run: RunConfig, device: str, software: Software = INGOT) -> dict[str, Term]:
    """Return the bytes of the tensors alive at the peak, by kind, on the pipeline rank that holds the most."""
    return position_bill(_fullest(run, device, software), device)


def _fullest(run: RunConfig, device: str, software: Software) -> Position:
    """Return the pipeline rank with the most live bytes at its peak."""
    places = positions(run, software)
    return places[0] if len(places) == 1 else max(places, key=lambda p: _live_bytes(p, device))


def _snapshot(position: Position, run: RunConfig, cluster: Cluster) -> dict[str, Term]:
    """Return the copy of its state that a rank keeps from its first save in the background on, as a kind of memory. On
    a GPU it is on the host, not on the device (planner/run/storage.py).
    """
    if run.checkpoint.mode == "sync" or cluster.device != "cpu":
        return {}
    return {"snapshot": memory.snapshots(position, weights_apart=run.checkpoint.weights_apart)}


def position_bill(position: Position, device: str) -> dict[str, Term]:
    """Return the bytes of the tensors that are alive at one pipeline rank's peak, by kind.

    The peak can be at the update, where gradients are converted if they have another dtype. Held-out evaluation needs
    less: it computes logits in the same chunks and saves no activations.
    """
    if device == "cpu":
        position = _without_host_offload(position)
    found = peak(position, device)
    state = {"weights": memory.weights(position), "optimizer": memory.optimizer(position)}
    whole = {} if position.parallel.zero == 3 else {"gathered": memory.gathered(position)}
    updating = memory.gradients_at_update(position)
    if updating.value > found.moment.bytes:
        return {**state, **whole, "gradients": updating}
    gathered = whole or {"gathered": Term(found.moment.gathered, gathered_formula(position, found))}
    logits = {"logits": memory.logits(position, device)} if found.moment.logits else {}
    return {
        **state,
        **gathered,
        "gradients": Term(found.moment.gradients, gradients_formula(position, found)),
        "activations": Term(
            found.moment.activations + found.moment.backward, activations_formula(position, found, device)
        ),
        **logits,
    }


def _live_bytes(position: Position, device: str) -> float:
    """Return the sum of `position_bill`, but faster, because no formulas are written."""
    if device == "cpu":
        position = _without_host_offload(position)
    state = memory.weights(position).value + memory.optimizer(position).value
    whole = 0.0 if position.parallel.zero == 3 else memory.gathered(position).value
    return state + whole + max(peak(position, device).moment.bytes, memory.gradients_at_update(position).value)


def _with_process(bill: dict[str, Term], run: RunConfig, cluster: Cluster) -> dict[str, Term]:
    live = _total(bill)
    if cluster.fragmentation:
        formula = f"{cluster.fragmentation:.0%} of the above: memory that the allocator holds but cannot use"
        bill["fragmentation"] = Term(live * cluster.fragmentation, formula)
    bill["runtime"] = _runtime(run, cluster)
    if cluster.device == "cpu":
        bill["loader and buffers"] = Term(
            _HOST_PARTS_BYTES, "measured: loader, tokenizer, held-out text, checkpoint buffers"
        )
    return bill


def _runtime(run: RunConfig, cluster: Cluster) -> Term:
    source = "measured" if cluster.measured else "assumed"
    formula = f"{source}: interpreter, libraries and device context of one process"
    return Term(cluster.runtime_bytes, formula)


def _without_host_offload(position: Position) -> Position:
    """Return the position without offload to the host, which saves nothing on a CPU."""
    if position.parallel.offload != "cpu":
        return position
    return replace(position, parallel=replace(position.parallel, offload="none", offload_parameters=False))


def _joined(bill: dict[str, Term]) -> Term:
    present = [term for term in bill.values() if term.value]
    return Term(_total(bill), " + ".join(term.formula for term in present))


def _total(bill: dict[str, Term]) -> float:
    return sum(term.value for term in bill.values())


def rank_memory_bytes(cluster: Cluster, ranks: int) -> float:
    """Return the memory in bytes that one rank may use. On CPU, all ranks of a machine share its memory equally."""
    if cluster.device != "cpu":
        return cluster.memory_bytes
    on_one_machine = -(-ranks // cluster.nodes)
    return cluster.memory_bytes / on_one_machine


def activations_formula(position: Position, peak: MemoryPeak, device: str) -> str:
    """Return the formula of activations as text: the micro-batches in flight on each stage with the bytes each keeps,
    and the buffers at the peak.
    """
    situation, parts = peak.situation, []
    stages = zip(position.stages, peak.stages, situation.alive, situation.left, strict=True)
    for stage, bytes_of, alive, left in stages:
        named = f" of stage {stage.number}" if position.parallel.pp > 1 else ""
        if alive:
            batches = f"{alive} micro-batch{'es' * (alive > 1)}{named}"
            per_token = blocks_text(position, stage, device)
            parts.append(f"{batches} x {bytes_of.kept:,.0f} B ({position.tokens:,} tokens x ({per_token}))")
        if left:
            parts.append(f"{left} left for W{named} x {bytes_of.left:,.0f} B")
    own = peak.own.activations + peak.own.backward
    if own:
        parts.append(f"{own:+,.0f} B at {peak.own.place}")
    if sent := messages(position):
        parts.append(f"{sent:,.0f} B of messages")
    return " + ".join(parts)


def gradients_formula(position: Position, peak: MemoryPeak) -> str:
    """Return the formula of gradients as text: accumulated ones, and those that the action at the peak adds."""
    parallel, total = position.parallel, peak.moment.gradients
    ranks = f"zero {parallel.zero} over {parallel.shard_ranks}" if parallel.shard_ranks > 1 else "whole"
    held = total - peak.own.gradients
    parts = [f"{held:,.0f} B of {position.parameters:,} parameters, {ranks}"] if held else []
    if peak.own.gradients:
        parts.append(f"{peak.own.gradients:,.0f} B being computed or reduced at {peak.own.place}")
    return " + ".join(parts) or f"0 B of {position.parameters:,} parameters yet: {ranks}, at {peak.own.place}"


def gathered_formula(position: Position, peak: MemoryPeak) -> str:
    """Return the formula of ZeRO-3's gathered parameters as text: the parameters outside blocks and units of blocks, or
    single matrices.
    """
    stage = peak.stages[peak.situation.doing.stage]
    if position.software.gathers_matrices:
        return f"{1 + position.parallel.prefetch} matrices x {stage.matrix:,.0f} B"
    sizes = sorted({unit.common + unit.routed for unit in stage.units})
    units = " or ".join(f"{size:,}" for size in sizes) or "0"
    if not position.parallel.reshard or position.parallel.unit_blocks == 0:
        return f"all {position.parameters:,} parameters, and the buffer of a unit with {units}"
    outer = f"outer unit {stage.outer.common:,}"
    return f"{peak.moment.gathered:,.0f} B: {outer} + up to {1 + position.parallel.prefetch} units x {units} parameters"
