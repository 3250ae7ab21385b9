"""Bytes that a micro-batch leaves in memory between its forward and its backward, on one rank.

The counting of Korthikanti et al. 2022 (section 4) done for this block: RMSNorm instead of LayerNorm, grouped heads,
SwiGLU, no dropout, no T x T scores. Tensor parallelism cuts what lies inside of a region (heads, feed-forward), and
with `sequence` also norms and residuals; the input of a region is whole on every rank.

Shape letters: D d_model, N num_heads, G num_kv_heads, H head_dim, F d_ffn.
"""

from collections.abc import Mapping

from ingot.theory.layout import Position, Stage
from ingot.theory.state import COMPUTE_BYTES
from ingot.theory.term import Term


def norm_bytes(width: int, e: int, device: str) -> float:
    """Saved by one RMSNorm per normed vector. CPU: input and normalised input in >= fp32, and 1/rms. CUDA: one kernel,
    which keeps its input and 1/rms."""
    wide = max(e, 4)
    return 2 * width * wide + wide if device == "cpu" else width * e + 4


def block_bytes(position: Position, device: str = "cpu") -> dict[str, float]:
    """Saved by one block per token of the micro-batch, by tensor, without recomputation and with flash attention."""
    arch, e, tp, cut = position.arch, *_degrees(position)
    d, q = arch.d_model, arch.num_heads * arch.head_dim / tp
    shared = arch.num_kv_heads % tp > 0  # a rank computes all key/value heads, and its queries use one
    k, v = (1, arch.num_kv_heads) if shared else (arch.num_kv_heads / tp,) * 2
    normed = arch.num_heads / tp + (arch.num_kv_heads if shared else arch.num_kv_heads / tp)
    return {
        "attention norm": norm_bytes(d, e, device) / cut,
        "input of q, k, v": d * e,
        "QK-norm": normed * norm_bytes(arch.head_dim, e, device) if arch.qk_norm else 0,
        "q, k, v": (q + (k + v) * arch.head_dim) * e,
        # The CPU kernel's heads-first output is kept beside its copy, token by token, that the o matrix takes.
        "attention out": q * e * (2 if device == "cpu" else 1),
        "log-sum-exp": arch.num_heads / tp * max(e, 4),
        "mlp norm": norm_bytes(d, e, device) / cut,
        "input of gate, up": d * e,
        "gate, silu(gate), up, product": 4 * arch.d_ffn / tp * e,
    }


def recomputed_block_bytes(position: Position) -> float:
    """Saved by one recomputed block per token: its input; with "selective" also the results of matrix products and
    attention. Of o and down, tensor parallelism keeps the sum over ranks instead (parallel/recompute.py)."""
    arch, e, tp, cut = position.arch, *_degrees(position)
    stream = arch.d_model * e / cut
    if position.parallel.recompute == "full":
        return stream
    q, shared = arch.num_heads * arch.head_dim / tp, arch.num_kv_heads % tp > 0
    kv = 2 * arch.num_kv_heads * arch.head_dim / (1 if shared else tp)
    leaving = 2 * arch.d_model / cut  # o and down, or their sums
    products = q + kv + q + 2 * arch.d_ffn / tp + leaving  # q, k, v; attention; gate, up
    return stream + products * e + arch.num_heads / tp * max(e, 4)


def stage_bytes(position: Position, stage: Stage, device: str = "cpu") -> float:
    """Saved by `stage` for one micro-batch, per token, logits excluded."""
    e, _, cut = _degrees(position)
    recomputed = position.recomputed(stage)
    saved = (len(stage.layers) - recomputed) * sum(block_bytes(position, device).values())
    if recomputed:
        saved += recomputed * recomputed_block_bytes(position)
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
    blocks = sum(len(stage.layers) for stage in position.stages)
    recomputed = sum(position.recomputed(stage) for stage in position.stages)
    each = sum(block_bytes(position, device).values())
    parts = [f"{blocks - recomputed} blocks x {each:,.0f} B"] if blocks > recomputed else []
    parts += [f"{recomputed} recomputed x {recomputed_block_bytes(position):,.0f} B"] if recomputed else []
    return " + ".join(parts) + " + ends"


def _degrees(position: Position) -> tuple[int, int, int]:
    """e; by how many ranks the inside of regions is cut; by how many the rest."""
    return COMPUTE_BYTES[position.train.precision], position.parallel.tp, position.sequence_ranks


def recompute_buffers(position: Position, device: str = "cpu") -> Term:
    """What one recomputed block saves anew while its own backward runs."""
    if not any(position.recomputed(stage) for stage in position.stages):
        return Term(0.0, "nothing is recomputed")
    more = sum(block_bytes(position, device).values()) - recomputed_block_bytes(position)
    return Term(position.tokens * more, f"{position.tokens:,} tokens x {more:,.0f} B of the block recomputed")


def backward_buffers(position: Position, device: str = "cpu") -> Term:
    """Gradients in flight while one block runs backward: two of the residual stream, three of the feed-forward."""
    e, tp, _ = _degrees(position)
    arch = position.arch
    per_token = 2 * arch.d_model * max(e, 4 if device == "cpu" else e) + 3 * arch.d_ffn / tp * e
    formula = f"{position.tokens:,} tokens x (2 residual + 3 feed-forward gradients: {per_token:,.0f} B)"
    return Term(position.tokens * per_token, formula)
