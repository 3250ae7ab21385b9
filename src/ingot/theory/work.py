"""The work of one optimizer step on one rank: what a step's time is made of.

Four quantities that a device does at four different rates: matrix products, attention, bytes moved by everything else,
and operations started. The planner divides them by rates; calibration fits the rates to timed steps.
"""

from dataclasses import dataclass, replace

from ingot.theory import activations, memory
from ingot.theory.layout import Position, Stage
from ingot.theory.state import COMPUTE_BYTES, STORED_BYTES, kept_gradient_bytes

# A saved activation passes through memory five times: written and read forward; read backward, and its gradient
# written and read once.
_PASSES_FORWARD, _PASSES_BACKWARD = 2, 3
# Operations that Python starts, counted on this trainer's step (a test counts again): per block and per chunk of
# logits, forward and backward together, and once per micro-batch, per unit of parameters and per step.
_BLOCK_OPERATIONS, _QK_NORM_OPERATIONS, _CHUNK_OPERATIONS = 136, 50, 17
_MICRO_BATCH_OPERATIONS, _UNIT_OPERATIONS, _STEP_OPERATIONS = 49, 40, 60
_FORWARD_SHARE = 0.4  # of a block's operations, also counted


@dataclass(frozen=True, kw_only=True)
class Work:
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            matmul_flops=self.matmul_flops + other.matmul_flops,
            attention_flops=self.attention_flops + other.attention_flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            operations=self.operations + other.operations,
        )

    def times(self, often: float) -> "Work":
        return Work(
            matmul_flops=often * self.matmul_flops,
            attention_flops=often * self.attention_flops,
            moved_bytes=often * self.moved_bytes,
            operations=often * self.operations,
        )


def step_work(position: Position, device: str = "cpu") -> Work:
    """Of one optimizer step: every micro-batch on every stage of this rank, and the update."""
    total = update_work(position)
    for stage in position.stages:
        for part in stage_work(position, stage, device):
            total += part.times(position.accumulation)
    return total


def stage_work(position: Position, stage: Stage, device: str = "cpu") -> tuple[Work, Work, Work]:
    """Of one micro-batch on one stage: forward, backward for the inputs, backward for the weights.

    The loss computes its gradients in the forward. What is recomputed counts with the backward for the inputs.
    """
    tokens, blocks, recomputed = position.tokens, len(stage.layers), position.recomputed(stage)
    flops, attention = _block_flops(position, stage), _attention_flops(position)
    saved = tokens * sum(activations.block_bytes(position, device).values())
    operations = _BLOCK_OPERATIONS + (_QK_NORM_OPERATIONS if position.arch.qk_norm else 0)
    forward = Work(
        matmul_flops=flops,
        attention_flops=attention,
        moved_bytes=_PASSES_FORWARD * saved,
        operations=_FORWARD_SHARE * operations,
    )
    # Flash attention runs QK^T once more backward: 5 products for the 2 forward (Dao 2023, section 3.1.2).
    inputs = Work(
        matmul_flops=flops,
        attention_flops=2.5 * attention,
        moved_bytes=_PASSES_BACKWARD * saved,
        operations=(1 - _FORWARD_SHARE) * operations,
    )
    again = _again(position, forward, flops).times(recomputed)
    ends = _ends_work(position, stage, device)
    return forward.times(blocks) + ends, inputs.times(blocks) + again, Work(matmul_flops=blocks * flops)


def _again(position: Position, forward: Work, flops: float) -> Work:
    """Second forward of one recomputed block (parallel/recompute.py), which stops before the last product.

    A backward in two halves asks for the last product's input only after the product, which is then run for nothing.
    """
    arch, parallel = position.arch, position.parallel
    of_width = 2.0 * position.tokens * arch.d_model / parallel.tp  # of a product from or to D, per column
    o, down = of_width * arch.num_heads * arch.head_dim, of_width * arch.d_ffn
    down_again = down if parallel.splits_backward else 0.0
    if parallel.recompute == "full":
        return replace(forward, matmul_flops=flops - down + down_again)
    # Selective: only what is cut by rows is not kept.
    products = o + down_again if parallel.tp > 1 else 0.0
    return replace(forward, matmul_flops=products, attention_flops=0.0)


def _block_flops(position: Position, stage: Stage) -> float:
    """Forward matrix products of one block on this rank."""
    norms = 2 * position.arch.d_model + (2 * position.arch.head_dim if position.arch.qk_norm else 0)
    return 2.0 * position.tokens * (stage.block - norms)


def _attention_flops(position: Position) -> float:
    """QK^T and PV of one block on this rank: 2 products, and a causal token sees half of the sequence."""
    arch = position.arch
    width = arch.num_heads * arch.head_dim / position.parallel.tp
    return 2.0 * position.tokens * width * position.train.seq_len


def _ends_work(position: Position, stage: Stage, device: str) -> Work:
    """Embedding, last norm, head and loss of one micro-batch."""
    arch, tokens, e = position.arch, position.tokens, COMPUTE_BYTES[position.train.precision]
    total = Work(operations=_MICRO_BATCH_OPERATIONS / position.parallel.stages)
    if not stage.last:
        return total
    vocabulary, wide = arch.vocab_size / position.parallel.tp, max(e, 4)
    chunks = memory.chunks(arch.vocab_size // position.parallel.tp, tokens, device)
    outside = activations.norm_bytes(arch.d_model, e, device) / position.sequence_ranks + arch.d_model * e + 16
    # The loss, per logit: product written, widened, reduced (two passes), shifted, exponentiated, narrowed, read twice.
    moved = tokens * vocabulary * (5 * e + 9 * wide) + vocabulary * arch.d_model * (2 * e + 2 * wide) * chunks
    return total + Work(
        matmul_flops=6.0 * tokens * vocabulary * arch.d_model,
        moved_bytes=moved + (_PASSES_FORWARD + _PASSES_BACKWARD) * tokens * outside,
        operations=_CHUNK_OPERATIONS * chunks,
    )


def update_work(position: Position) -> Work:
    """Gather, gradient reduction, clip and AdamW, once per step.

    Per owned parameter: master, gradient and moments read, three of them written, gradient read for its norm.
    Per whole parameter: gathered copy written and unpacked, gradient widened, written and summed.
    """
    precision, n = position.train.precision, position.parameters
    e, s, g = COMPUTE_BYTES[precision], STORED_BYTES[precision], kept_gradient_bytes(position.parallel, precision)
    units = sum(map(position.units, position.stages))
    return Work(
        moved_bytes=n / position.parallel.dp_shard * 8 * s + n * (4 * e + 3 * g),
        operations=_STEP_OPERATIONS + _UNIT_OPERATIONS * units,
    )
