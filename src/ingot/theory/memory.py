"""Memory of one rank of ingot's trainer, term by term, in bytes.

The trainer shards with FSDP2 (ZeRO stage 3): float32 master parameters, gradients and AdamW moments are split over
the data-parallel ranks; whole parameters exist only while they are used, in the compute precision. Below, P is the
number of data-parallel ranks, M the tokens of one micro-batch on one rank, e the bytes of one element in the compute
precision (bf16 2, fp32 4, fp64 8), s those of a stored one (4; fp64 8).

Shape letters: V vocab_size, D d_model, L num_layers, N num_heads, G num_kv_heads, H head_dim, F d_ffn.
"""

import math

from ingot.schema.arch import Arch
from ingot.theory.params import block_parameters, count_parameters
from ingot.theory.term import Term

COMPUTE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
STORED_BYTES = {"bf16": 4, "fp32": 4, "fp64": 8}
# The trainer takes these two from here.
# Below this many parameters the whole model is one unit: one collective per step instead of one per block and pass,
# which on small models cost more than the memory they save. Their parameters stay gathered from forward to backward.
ONE_UNIT_PARAMETERS = 20_000_000
# Float32 logits held at once. A CPU chunk should fit the cache; on a GPU it should be long enough for a full matmul.
LOGITS_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}


def is_one_unit(arch: Arch) -> bool:
    """Small models are gathered as a whole, larger ones block by block."""
    return count_parameters(arch) < ONE_UNIT_PARAMETERS


def weights(arch: Arch, precision: str, ranks: int) -> Term:
    """The master parameters that this rank owns."""
    n, s = count_parameters(arch), STORED_BYTES[precision]
    return Term(n * s / ranks, f"{n:,} parameters x {s} B (master) / {ranks} ranks")


def optimizer(arch: Arch, precision: str, ranks: int) -> Term:
    """AdamW's two moments of the parameters that this rank owns."""
    n, s = count_parameters(arch), STORED_BYTES[precision]
    return Term(2 * n * s / ranks, f"2 moments x {n:,} x {s} B / {ranks} ranks")


def gradients(arch: Arch, precision: str, ranks: int, accumulation: int) -> Term:
    """Gradients at the end of a backward.

    One unit: whole gradients in the compute precision, the float32 buffer that is summed over ranks, and the shard;
    with accumulation the whole sums wait in float32 between micro-batches instead. Several units: the shards, and for
    the two blocks in flight their whole gradients and buffers.
    """
    n, e, s = count_parameters(arch), COMPUTE_BYTES[precision], STORED_BYTES[precision]
    shard = f"{n:,} x {s} B / {ranks} ranks"
    if is_one_unit(arch):
        whole = s if accumulation > 1 else e
        return Term(n * (whole + s + s / ranks), f"{n:,} x ({whole} B whole + {s} B summed over ranks) + {shard}")
    block = block_parameters(arch)
    return Term(n * s / ranks + 2 * block * (e + s), f"{shard} + 2 blocks x {block:,} x ({e} + {s}) B in flight")


def gradients_at_loss(arch: Arch, precision: str, ranks: int, accumulation: int) -> Term:
    """What earlier micro-batches of the step left when the last one reaches its loss."""
    n, s = count_parameters(arch), STORED_BYTES[precision]
    if accumulation == 1:
        return Term(0.0, "none yet: one micro-batch per step")
    if is_one_unit(arch):
        return Term(n * s, f"{n:,} x {s} B, whole sums of earlier micro-batches")
    return Term(n * s / ranks, f"{n:,} x {s} B / {ranks} ranks, sums of earlier micro-batches")


def gathered(arch: Arch, precision: str) -> Term:
    """Whole parameters in the compute precision.

    One unit: all of them. Several: this block and the next one, and the outermost unit (embedding, last norm, head).
    """
    n, e = count_parameters(arch), COMPUTE_BYTES[precision]
    if is_one_unit(arch):
        return Term(n * e, f"{n:,} parameters x {e} B, whole")
    block = block_parameters(arch)
    outer = n - arch.num_layers * block
    return Term((outer + 2 * block) * e, f"(outer unit {outer:,} + 2 blocks x {block:,}) x {e} B")


def norm_activation_bytes(width: int, e: int, device: str) -> float:
    """Saved by one RMSNorm per normed vector. CPU: input and normalised input in >= fp32, and 1/rms. CUDA: one kernel,
    which keeps its input and 1/rms."""
    wide = max(e, 4)
    return 2 * width * wide + wide if device == "cpu" else width * e + 4


def block_activation_bytes(arch: Arch, precision: str, device: str = "cpu") -> dict[str, float]:
    """Saved for the backward by one block per token, by tensor, without recomputation and with flash attention.

    The counting of Korthikanti et al. 2022 (section 4.1), done for this block: RMSNorm instead of LayerNorm, grouped
    heads, SwiGLU, no dropout, and no T x T scores.
    """
    e = COMPUTE_BYTES[precision]
    d, q, kv = arch.d_model, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    heads = arch.num_heads + arch.num_kv_heads
    qk_norm = heads * norm_activation_bytes(arch.head_dim, e, device) if arch.qk_norm else 0
    return {
        "attention norm": norm_activation_bytes(d, e, device),
        "input of q, k, v": d * e,
        "QK-norm": qk_norm,
        "q, k, v": (q + 2 * kv) * e,
        # The CPU kernel's heads-first output is kept beside its copy, token by token, that the o matrix takes.
        "attention out": q * e * (2 if device == "cpu" else 1),
        "log-sum-exp": arch.num_heads * max(e, 4),
        "mlp norm": norm_activation_bytes(d, e, device),
        "input of gate, up": d * e,
        "gate, silu(gate), up, product": 4 * arch.d_ffn * e,
    }


def activations(arch: Arch, precision: str, tokens: int, device: str = "cpu") -> Term:
    """Everything saved between forward and backward of a micro-batch of `tokens` on one rank, logits excluded."""
    e = COMPUTE_BYTES[precision]
    block = sum(block_activation_bytes(arch, precision, device).values())
    # Last norm, its output's gradient (kept by the loss), token and target ids (8 B each).
    outside = norm_activation_bytes(arch.d_model, e, device) + arch.d_model * e + 16
    value = tokens * (arch.num_layers * block + outside)
    return Term(value, f"{tokens:,} tokens x ({arch.num_layers} blocks x {block:,.0f} B + {outside:,.0f} B)")


def backward_buffers(arch: Arch, precision: str, tokens: int, device: str = "cpu") -> Term:
    """Gradients in flight while the last block runs backward: two of the residual stream, three of the feed-forward."""
    e = COMPUTE_BYTES[precision]
    per_token = 2 * arch.d_model * max(e, 4 if device == "cpu" else e) + 3 * arch.d_ffn * e
    return Term(tokens * per_token, f"{tokens:,} tokens x (2 residual + 3 feed-forward gradients: {per_token:,} B)")


def chunk_tokens(vocab_size: int, device: str) -> int:
    """Tokens whose float32 logits fill LOGITS_CHUNK_BYTES, at least 16."""
    return max(LOGITS_CHUNK_BYTES[device] // (4 * vocab_size), 16)


def chunks(arch: Arch, tokens: int, device: str) -> int:
    return math.ceil(tokens / chunk_tokens(arch.vocab_size, device))


def logits(arch: Arch, precision: str, tokens: int, device: str = "cpu") -> Term:
    """One chunk of logits in compute precision, in float32 and with its gradient, and the head's gradient.

    The loss sums the head's gradient in float32 over chunks and keeps it in the compute precision.
    """
    e = COMPUTE_BYTES[precision]
    wide = max(e, 4)
    chunk = min(chunk_tokens(arch.vocab_size, device), tokens)
    head = arch.vocab_size * arch.d_model
    value = chunk * arch.vocab_size * (2 * e + 3 * wide) + head * (wide + e)
    part = f"{chunk:,} of {tokens:,} tokens x {arch.vocab_size:,} x {2 * e + 3 * wide} B"
    return Term(value, f"{part} + head gradient {head:,} x {wide + e} B")


def evaluation_logits(arch: Arch, precision: str, micro_batch: int, seq_len: int) -> Term:
    """Held-out scoring keeps the logits of a whole micro-batch, and widens and normalises them sequence by sequence."""
    e = COMPUTE_BYTES[precision]
    wide = max(e, 4)
    value = seq_len * arch.vocab_size * (micro_batch * e + 2 * wide)
    return Term(value, f"{seq_len:,} tokens x {arch.vocab_size:,} x ({micro_batch} sequences x {e} B + {2 * wide} B)")


def checkpoint_bytes(arch: Arch, precision: str) -> Term:
    """Master parameters and both moments; gradients are not saved."""
    n, s = count_parameters(arch), STORED_BYTES[precision]
    return Term(3 * n * s, f"{n:,} parameters x {3 * s} B (master and two moments)")
