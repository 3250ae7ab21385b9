"""The formulas of a memory bill with their numbers filled in: what is under way on a rank, and what one place of the
program adds to it."""

from ingot.planner.predict.memory.activations import blocks_text
from ingot.planner.predict.memory.peak import Peak, messages
from ingot.theory.layout import Position


def activations_formula(position: Position, peak: Peak, device: str) -> str:
    """Micro-batches under way by stage, what each keeps, and the buffers of the moment."""
    situation, parts = peak.situation, []
    for stage, memory, alive, left in zip(position.stages, peak.stages, situation.alive, situation.left, strict=True):
        named = f" of stage {stage.number}" if position.parallel.pp > 1 else ""
        if alive:
            flying = f"{alive} micro-batch{'es' * (alive > 1)}{named}"
            per_token = blocks_text(position, stage, device)
            parts.append(f"{flying} x {memory.kept:,.0f} B ({position.tokens:,} tokens x ({per_token}))")
        if left:
            parts.append(f"{left} left for W{named} x {memory.left:,.0f} B")
    own = peak.own.activations + peak.own.backward
    if own:
        parts.append(f"{own:+,.0f} B at {peak.own.place}")
    if sent := messages(position):
        parts.append(f"{sent:,.0f} B of messages")
    return " + ".join(parts)


def gradients_formula(position: Position, peak: Peak) -> str:
    """Those of stages whose backwards have begun, and those that the moment adds."""
    parallel, total = position.parallel, peak.moment.gradients
    ranks = f"zero {parallel.zero} over {parallel.shard_ranks}" if parallel.shard_ranks > 1 else "whole"
    held = total - peak.own.gradients
    parts = [f"{held:,.0f} B of {position.parameters:,} parameters, {ranks}"] if held else []
    if peak.own.gradients:
        parts.append(f"{peak.own.gradients:,.0f} B on their way at {peak.own.place}")
    return " + ".join(parts) or f"0 B of {position.parameters:,} parameters yet: {ranks}, at {peak.own.place}"


def gathered_formula(position: Position, peak: Peak) -> str:
    """Of ZeRO-3: what lies outside of blocks, and units of blocks; or matrices alone."""
    stage = peak.stages[peak.situation.doing.stage]
    if position.software.gathers_matrices:
        return f"{1 + position.parallel.prefetch} matrices x {stage.matrix:,.0f} B"
    sizes = sorted({unit.common + unit.routed for unit in stage.units})
    units = " or ".join(f"{size:,}" for size in sizes) or "0"
    if not position.parallel.reshard or position.parallel.unit_blocks == 0:
        return f"{position.parameters:,} parameters whole, and a unit of {units} coming"
    outer = f"outer unit {stage.outer.common:,}"
    return f"{peak.moment.gathered:,.0f} B: {outer} + up to {1 + position.parallel.prefetch} units x {units} parameters"
