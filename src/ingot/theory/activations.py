"""Bytes that micro-batches leave in memory between their forward and their backward, on one rank. What one block
leaves per token is in theory/saved.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.theory.layout import Position, Stage
from ingot.theory.saved import block_bytes, degrees, norm_bytes, recomputed_block_bytes
from ingot.theory.term import Term


@dataclass(frozen=True)
class Blocks:
    """Blocks of one kind on a stage: how many keep all, and how many are recomputed; bytes per token of either."""

    kept: int
    recomputed: int
    kept_bytes: float
    recomputed_bytes: float
    what: str

    @property
    def total(self) -> float:
        return self.kept * self.kept_bytes + self.recomputed * self.recomputed_bytes


def blocks_of(position: Position, stage: Stage, device: str) -> list[Blocks]:
    """By kind: those without experts, and those with some."""
    again, sparse_again = position.recomputed(stage), position.recomputed_with_experts(stage)
    sparse = len(stage.expert_layers)
    counts = {False: (len(stage.layers) - sparse, again - sparse_again), True: (sparse, sparse_again)}
    return [
        Blocks(
            kept=blocks - recomputed,
            recomputed=recomputed,
            kept_bytes=sum(block_bytes(position, device, experts=experts).values()),
            recomputed_bytes=recomputed_block_bytes(position, experts=experts) if recomputed else 0.0,
            what=" with experts" if experts else "",
        )
        for experts, (blocks, recomputed) in counts.items()
        if blocks
    ]


def stage_bytes(position: Position, stage: Stage, device: str = "cpu") -> float:
    """Saved by `stage` for one micro-batch, per token, logits excluded."""
    e, _, cut = degrees(position)
    saved = sum(blocks.total for blocks in blocks_of(position, stage, device))
    if stage.first:
        saved += 8  # token ids
    if stage.last:  # last norm, its output's gradient (which the loss computes ahead), target ids
        saved += norm_bytes(position.arch.d_model, e, device) / cut + position.arch.d_model * e + 8
    return saved


def in_flight(position: Position, bytes_of: Mapping[int, float], at_loss: float = 0.0) -> float:
    """The most bytes alive at once while this rank plays its row of the table.

    bytes_of: by stage number, of one micro-batch from its forward to the end of its backward (of W where it is split).
    at_loss: alive only while the last stage runs forward.
    """
    if position.parallel.pp == 1:
        return sum(bytes_of.values()) + at_loss
    last = position.parallel.stages - 1
    alive = peak = 0.0
    for action in position.table.rows[position.rank]:
        if action.kind == "F":
            alive += bytes_of[action.stage]
            peak = max(peak, alive + (at_loss if action.stage == last else 0))
        elif action.kind != "I":
            alive -= bytes_of[action.stage]
    return peak


def activations(position: Position, device: str = "cpu") -> Term:
    """Of all micro-batches that are in flight at once."""
    per_token = {stage.number: stage_bytes(position, stage, device) for stage in position.stages}
    tokens, one = position.tokens, sum(per_token.values())
    value = tokens * in_flight(position, per_token)
    formula = f"{tokens:,} tokens x {one:,.0f} B ({_blocks(position, device)})"
    if position.parallel.pp > 1:
        formula += f" x {value / (tokens * one):.3g} micro-batches in flight on pipeline rank {position.rank}"
    return Term(value, formula)


def _blocks(position: Position, device: str) -> str:
    parts: dict[str, int] = {}
    for found in (blocks for stage in position.stages for blocks in blocks_of(position, stage, device)):
        for count, how, each in (
            (found.kept, "", found.kept_bytes),
            (found.recomputed, " recomputed", found.recomputed_bytes),
        ):
            kind = f"{how} blocks{found.what} x {each:,.0f} B"
            parts[kind] = parts.get(kind, 0) + count
    return " + ".join([*(f"{count}{kind}" for kind, count in parts.items() if count), "ends"])


def recompute_buffers(position: Position, device: str = "cpu") -> Term:
    """What one recomputed block saves anew while its own backward runs."""
    kinds = [blocks for stage in position.stages for blocks in blocks_of(position, stage, device) if blocks.recomputed]
    if not kinds:
        return Term(0.0, "nothing is recomputed")
    more = max(blocks.kept_bytes - blocks.recomputed_bytes for blocks in kinds)
    return Term(position.tokens * more, f"{position.tokens:,} tokens x {more:,.0f} B of the block recomputed")


def backward_buffers(position: Position, device: str = "cpu") -> Term:
    """Gradients in flight while one block runs backward: two of the residual stream, three of the feed-forward, or of
    experts and with them two of their rows."""
    e, tp, _ = degrees(position)
    arch, rows = position.arch, position.assignments / position.tokens
    dense = 3 * arch.d_ffn / tp * e
    sparse = rows * (3 * arch.moe.d_expert + 2 * arch.d_model) * e
    kinds = {blocks.what for stage in position.stages for blocks in blocks_of(position, stage, device)}
    inside = max((sparse if kind else dense for kind in kinds), default=0.0)
    per_token = 2 * arch.d_model * max(e, 4 if device == "cpu" else e) + inside
    formula = f"{position.tokens:,} tokens x (2 residual + gradients inside of the widest block: {per_token:,.0f} B)"
    return Term(position.tokens * per_token, formula)
