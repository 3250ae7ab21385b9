"""Bytes that one block saves for its backward, per token of this rank, tensor by tensor.

They are counted as in Korthikanti et al. 2022 (section 4), for this trainer's blocks: RMSNorm instead of LayerNorm,
grouped heads or latents, SwiGLU or experts, no dropout, no T x T scores. A region is the part of a block between two
collectives of tensor parallelism (attention, feed-forward, shared experts). Tensor parallelism divides the tensors
inside a region, and with `sequence` also norms, residuals and the rows for experts; the input of a region is whole on
every rank. Context parallelism divides the tokens; Ulysses also repeats key/value heads. Experts are assumed to have
equal loads.

Shape letters: D d_model, N num_heads, G num_kv_heads, H head_dim, F d_ffn or d_expert, E experts, K top_k.
"""

import math

from ingot.plugins.layers import (
    extra_attention_matrices,
    extra_attention_saved,
    feed_forward_of,
    has_one_input,
    norm_saved,
    stream_norms,
)
from ingot.schema.arch import Arch, Moe
from ingot.theory.layout import Position
from ingot.theory.params import COMPUTE_BYTES, value_width

_NUMBER_BYTES = 8


def degrees(position: Position) -> tuple[int, int, int]:
    """Return (e, tp, sequence ranks): bytes of a number, number of ranks that divide tensors inside regions, and number
    of ranks that divide tensors outside regions.
    """
    return COMPUTE_BYTES[position.train.precision], position.parallel.tp, position.sequence_ranks


def norm_bytes(width: int, e: int, device: str) -> float:
    """Return the bytes that one RMSNorm saves per normalized vector of `width` numbers of `e` bytes.

    CPU: input and normalized input in at least fp32, and 1/rms. CUDA: one kernel, which saves its input and 1/rms.
    """
    wide = max(e, 4)
    return 2 * width * wide + wide if device == "cpu" else width * e + 4


def stream_norm_bytes(arch: Arch, e: int, device: str) -> float:
    """Return the bytes that one norm of the residual stream saves per token, of numbers of `e` bytes."""
    saved = norm_saved(arch)
    return norm_bytes(arch.d_model, e, device) if saved is None else saved * arch.d_model * e


def block_bytes(position: Position, device: str = "cpu", *, experts: bool = False) -> dict[str, float]:
    """Return the bytes per token that one block saves, by tensor, without recomputation and with flash attention.

    experts: the block has experts.
    """
    e, tp, cut = degrees(position)
    norm = stream_norm_bytes(position.arch, e, device) / cut
    found = {
        "attention norm": norm,
        **(_latent_bytes if position.arch.is_mla else _attention_bytes)(position, device),
        "mlp norm": norm * (stream_norms(position.arch) - 1),
        **(_expert_bytes(position) if experts else _mlp_bytes(position)),
    }
    gathered_twice = tp > 1 and position.parallel.sequence
    if has_one_input(position.arch) and not gathered_twice:
        found["input of the router" if experts else "input of gate, up"] = 0.0
    return found


def _key_value_heads(position: Position) -> tuple[float, float]:
    """Return the number of (key heads, value heads) that a rank saves per token."""
    groups, (_, tp, _), ulysses = position.arch.num_kv_heads, degrees(position), max(position.parallel.ulysses, 1)
    shared = groups % tp > 0  # a rank computes all key/value heads, and its queries use one of them
    if position.parallel.cp > 1:  # heads are copied for sending, and repeated for Ulysses
        dealt = math.lcm(1 if shared else groups // tp, ulysses)
        # In a grid, the ring sends a copy of those heads that the all-to-all delivered.
        return (2 * dealt, 2 * dealt) if 1 < ulysses < position.parallel.cp else (dealt, dealt)
    return (1, groups) if shared else (groups / tp, groups / tp)


def _attention_bytes(position: Position, device: str) -> dict[str, float]:
    arch, (e, tp, _) = position.arch, degrees(position)
    heads, (k, v) = arch.num_heads / tp, _key_value_heads(position)
    normed = heads + (arch.num_kv_heads if arch.num_kv_heads % tp else arch.num_kv_heads / tp)
    return {
        "input of q, k, v": arch.d_model * e,
        "QK-norm": normed * norm_bytes(arch.head_dim, e, device) if arch.qk_norm else 0,
        "q, k, v": (heads + k + v) * arch.head_dim * e,
        # Saved twice: in the layout of queries, heads first, and as the token-by-token copy that the o matrix reads.
        "attention out": 2 * heads * arch.head_dim * e,
        "log-sum-exp": heads * max(e, 4),
        "extra of attention": extra_attention_saved(arch) / tp * e,
    }


def _latent_bytes(position: Position, device: str) -> dict[str, float]:
    """Return the bytes that latent attention saves; it pads value heads and their results to H (model/attention.py)."""
    arch, (e, tp, _) = position.arch, degrees(position)
    mla, heads = arch.mla, arch.num_heads / tp
    latents = [width for width in (mla.q_rank, mla.kv_rank) if width]
    return {
        "input of down matrices": arch.d_model * e,
        "latent norms": sum(norm_bytes(width, e, device) for width in latents),
        "input of up matrices": sum(latents) * e,
        "q, k, v": 3 * heads * arch.head_dim * e,
        "attention out": heads * (arch.head_dim + mla.v_dim) * e,
        "log-sum-exp": heads * max(e, 4),
    }


def _mlp_bytes(position: Position) -> dict[str, float]:
    arch, (e, tp, _) = position.arch, degrees(position)
    inside = feed_forward_of(arch).saved
    return {"input of gate, up": arch.d_model * e, "gate, silu(gate), up, product": inside * arch.d_ffn / tp * e}


def _expert_bytes(position: Position) -> dict[str, float]:
    """Return the bytes per token that model/routing.py and model/experts.py save, by tensor."""
    arch, moe, (e, tp, cut) = position.arch, position.arch.moe, degrees(position)
    wide, rows = max(e, 4), position.assignments / position.tokens
    chosen = moe.top_k / cut
    saved = {
        "input of the router": arch.d_model * e / cut,
        "scores": _scores(moe) * moe.num_experts * wide / cut,
        # Per choice: index of the score, index of the row, weight before and after scaling. Per row: its token.
        "choices and weights": chosen * (2 * _NUMBER_BYTES + 2 * wide) + rows * _NUMBER_BYTES,
        "order of rows": rows * 2 * _NUMBER_BYTES if position.parallel.ep > 1 else 0,
        "rows of experts": rows * arch.d_model * e,
        "gate, silu(gate), up, product of experts": rows * 4 * moe.d_expert * e,
        "what experts made": rows * arch.d_model * e,
    }
    if moe.shared_experts:  # with tensor parallelism their input is gathered, else it is the router's input
        saved["input of shared experts"] = arch.d_model * e if tp > 1 else 0
        saved["gate, silu(gate), up, product, shared"] = 4 * moe.shared_experts * moe.d_expert / tp * e
    if moe.has_fallback:
        # Its input is the router's. Of each token, what it made and the weight of that.
        saved["gate, silu(gate), up, product, what the fallback made"] = (4 * moe.d_expert + arch.d_model) * e / cut
        saved["weights of the fallback"] = wide / cut
    return saved


def _scores(moe: Moe) -> int:
    """Return how many numbers per token and expert are saved for the backward of the router's scores.

    If all scores have a gradient, probabilities and the inputs of sigmoids are saved; if only the chosen scores have a
    gradient, only the inputs are saved.
    """
    balanced = moe.sequence_loss > 0 or moe.global_loss > 0
    sigmoid = 2 + (not moe.normalize) if moe.scores == "sigmoid" else 0
    softmax = balanced or (moe.scores == "softmax" and not moe.normalize)
    return sigmoid + softmax + (moe.z_loss > 0)


def recomputed_block_bytes(position: Position, *, experts: bool = False) -> float:
    """Return the bytes per token that one recomputed block saves: its input; with "selective" also the results of
    matrix products and attention.

    With tensor parallelism the results of o and down are saved after their sum over ranks (parallel/recompute.py).
    """
    arch, (e, tp, cut) = position.arch, degrees(position)
    stream = arch.d_model * e / cut
    if position.parallel.recompute == "full":
        return stream
    heads, kept = arch.num_heads / tp, 1 - position.software.products_recomputed
    attention = heads * arch.head_dim * e + heads * max(e, 4)
    products = products_for_attention(position) * e + stream  # and o, or its sum
    before_down = (feed_forward_of(arch).matrices - 1) * arch.d_ffn  # gate, up
    fed = _expert_products(position) if experts else before_down / tp * e + stream  # and down, or its sum
    return stream + attention + kept * (products + fed)


def products_for_attention(position: Position) -> float:
    """Return how many numbers per token the matrices before attention produce: q, k and v, or those of latents, and
    the matrices that a plug-in's attention adds."""
    arch, tp = position.arch, position.parallel.tp
    queries = arch.num_heads * arch.head_dim / tp
    if arch.is_mla:
        mla = arch.mla
        down = mla.q_rank + mla.kv_rank + mla.rope_dim
        return down + queries + arch.num_heads * (mla.nope_dim + value_width(arch)) / tp
    extra = sum(rows for rows, _ in extra_attention_matrices(arch)) / tp
    return queries + 2 * arch.num_kv_heads * arch.head_dim / (1 if arch.num_kv_heads % tp else tp) + extra


def _expert_products(position: Position) -> float:
    """Return the bytes per token of the results of the router, the experts' matrices and the all-to-alls."""
    arch, moe, (e, tp, cut) = position.arch, position.arch.moe, degrees(position)
    rows = position.assignments / position.tokens
    made = moe.num_experts * max(e, 4) / cut + rows * (2 * moe.d_expert + arch.d_model) * e
    if position.parallel.ep > 1:  # the rows that each of the two all-to-alls delivers
        made += 2 * rows * arch.d_model * e
    if moe.shared_experts:
        made += 2 * moe.shared_experts * moe.d_expert / tp * e + arch.d_model * e / cut
    return made
