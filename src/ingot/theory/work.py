"""The work of one optimizer step on one rank: what a step's time is made of.

Four quantities that a device does at four different rates: matrix products, attention, bytes moved by everything else,
and operations started. The planner divides them by rates; calibration fits the rates to timed steps.
"""

from dataclasses import dataclass

from ingot.schema.arch import Arch
from ingot.theory import memory
from ingot.theory.flops import (
    TRAIN_TO_FORWARD,
    forward_attention_flops_per_token,
    forward_matmul_flops_per_token,
)
from ingot.theory.params import count_parameters

# How often a saved activation passes through memory: written and read forward, read backward, and its gradient
# written and read once.
_PASSES = 5
# Operations that Python starts, counted on this trainer's step (a test counts again): per block and per chunk of
# logits, forward and backward together, and once per micro-batch and per step.
_BLOCK_OPERATIONS, _QK_NORM_OPERATIONS, _CHUNK_OPERATIONS = 136, 50, 17
_MICRO_BATCH_OPERATIONS, _UNIT_OPERATIONS, _STEP_OPERATIONS = 49, 40, 60


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one optimizer step on one rank. sent_bytes: by each rank into collectives, in one direction."""

    matmul_flops: float
    attention_flops: float
    moved_bytes: float
    operations: float
    sent_bytes: float


def step_work(
    arch: Arch, *, precision: str, seq_len: int, micro_batch: int, accumulation: int, ranks: int, device: str = "cpu"
) -> Work:
    tokens = micro_batch * seq_len
    in_step = tokens * accumulation
    micro = micro_batch_moved_bytes(arch, precision, tokens, device)
    return Work(
        matmul_flops=in_step * TRAIN_TO_FORWARD * forward_matmul_flops_per_token(arch),
        # Flash attention runs QK^T once more backward: 7 products instead of 6 (Dao 2023, section 3.1.2).
        attention_flops=in_step * 3.5 * forward_attention_flops_per_token(arch, seq_len),
        moved_bytes=accumulation * micro + update_moved_bytes(arch, precision, ranks),
        operations=accumulation * micro_batch_operations(arch, tokens, device) + step_operations(arch),
        sent_bytes=collective_bytes(arch, precision, ranks, accumulation),
    )


def micro_batch_moved_bytes(arch: Arch, precision: str, tokens: int, device: str) -> float:
    """Bytes through memory for everything but matrix products, forward and backward of one micro-batch."""
    e = memory.COMPUTE_BYTES[precision]
    wide = max(e, 4)
    saved = memory.activations(arch, precision, tokens, device).value
    # The loss, per logit: product written, widened, reduced (two passes), shifted, exponentiated, narrowed, read twice.
    logits = tokens * arch.vocab_size * (5 * e + 9 * wide)
    head = arch.vocab_size * arch.d_model * (2 * e + 2 * wide) * memory.chunks(arch, tokens, device)
    return _PASSES * saved + logits + head


def update_moved_bytes(arch: Arch, precision: str, ranks: int) -> float:
    """Gather, gradient reduction, clip and AdamW: once per step.

    Per owned parameter: master, gradient and moments read, three of them written, gradient read for its norm.
    Per whole parameter: gathered copy written and unpacked, gradient widened, written and summed.
    """
    n, e, s = count_parameters(arch), memory.COMPUTE_BYTES[precision], memory.STORED_BYTES[precision]
    return n / ranks * 8 * s + n * (4 * e + 3 * s)


def micro_batch_operations(arch: Arch, tokens: int, device: str) -> float:
    per_block = _BLOCK_OPERATIONS + (_QK_NORM_OPERATIONS if arch.qk_norm else 0)
    return (
        arch.num_layers * per_block + _CHUNK_OPERATIONS * memory.chunks(arch, tokens, device) + _MICRO_BATCH_OPERATIONS
    )


def step_operations(arch: Arch) -> float:
    units = 1 if memory.is_one_unit(arch) else arch.num_layers + 1
    return _STEP_OPERATIONS + _UNIT_OPERATIONS * units


def collective_bytes(arch: Arch, precision: str, ranks: int, accumulation: int) -> float:
    """A ring moves (P-1)/P of the data per rank for a gather and for a reduce-scatter (Rajbhandari et al. 2020, 7.2).

    One unit: gathered and reduced once per step. Several: gathered for forward and for backward and reduced, in every
    micro-batch, because nothing whole is kept in between.
    """
    n, e, s = count_parameters(arch), memory.COMPUTE_BYTES[precision], memory.STORED_BYTES[precision]
    share = (ranks - 1) / ranks
    if memory.is_one_unit(arch):
        return share * n * (e + s)
    return share * n * accumulation * (2 * e + s)
