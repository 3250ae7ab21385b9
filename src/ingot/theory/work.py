"""The work of one optimizer step on one rank, in four quantities from which the planner computes its time.

The quantities are FLOPs of matrix products, FLOPs of attention, bytes moved by everything else, and operations started.
  The planner divides each by its own rate; calibration fits the rates to timed steps.
"""

from dataclasses import dataclass, replace

from ingot.schema.arch import Arch
from ingot.theory import memory
from ingot.theory.context import imbalance
from ingot.theory.flops import mean_keys
from ingot.theory.layout import PipelineStage, Position, attention_matrices
from ingot.theory.params import (
    COMPUTE_BYTES,
    STORED_BYTES,
    block_mlp_parameters,
    expert_parameters,
    kept_gradient_bytes,
    router_parameters,
    shared_parameters,
    value_width,
)
from ingot.theory.saved import block_bytes as saved_bytes
from ingot.theory.saved import stream_norm_bytes
from ingot.theory.update import matrix_update

# A saved activation causes five passes through memory: it is written and read in the forward, and read in the backward;
# its gradient is written and read.
_PASSES_FORWARD, _PASSES_BACKWARD = 2, 3
# Numbers of operations that Python starts, counted in this trainer's step (a test counts them again): per block and per
# chunk of logits (forward and backward together), per micro-batch, per unit of parameters and per step. All experts of
# a block count as one operation; collectives are left out.
_BLOCK_OPERATIONS, _QK_NORM_OPERATIONS, _CHUNK_OPERATIONS = 118, 50, 17
_LATENT_OPERATIONS, _ROUTING_OPERATIONS, _CHOICE_OPERATIONS, _SHARED_OPERATIONS = 62, 61, 8, 20
_CAPACITY_OPERATIONS, _SOFTCAP_OPERATIONS = 27, 8
# Float32 numbers that the softcap reads and writes per logit: 17 on a CPU, one operation after the other; 2 elsewhere,
# where the compiler fuses it and the capped logits are written once and read once.
_SOFTCAP_PASSES = {"cpu": 17}
# Loss terms declare tensors, not operations. Counted in two terms of docs/extend/loss.md (a test counts them again):
# four operations and four passes over the logits per declared tensor; and those of the trainer, which adds the slope.
_TENSOR_OPERATIONS, _TENSOR_PASSES = 4, 4
_TERM_OPERATIONS, _TERM_PASSES, _CLONE_PASSES = 8, 3, 2
_MICRO_BATCH_OPERATIONS, _UNIT_OPERATIONS, _STEP_OPERATIONS = 49, 40, 60
FORWARD_SHARE = 0.4  # share of a block's operations that its forward starts; counted too


@dataclass(frozen=True, kw_only=True)
class Work:
    """An amount of work: FLOPs of matrix products and of attention, bytes moved, operations started."""

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
        """Return this work done `often` times."""
        return Work(
            matmul_flops=often * self.matmul_flops,
            attention_flops=often * self.attention_flops,
            moved_bytes=often * self.moved_bytes,
            operations=often * self.operations,
        )


def step_work(position: Position, device: str = "cpu") -> Work:
    """Return the work of one optimizer step: all micro-batches on all stages of this rank, and the update."""
    total = update_work(position)
    for stage in position.stages:
        for part in stage_work(position, stage, device):
            total += part.times(position.accumulation)
    return total


def stage_work(position: Position, stage: PipelineStage, device: str = "cpu") -> tuple[Work, Work, Work]:
    """Return the work of one micro-batch on one stage: (forward, backward for the inputs, backward for the weights).

    The loss computes its gradients in the forward. Recomputation is part of the backward for the inputs.
    """
    again, sparse_again = position.recomputed(stage), position.recomputed_with_experts(stage)
    sparse, forward = len(stage.expert_layers), ends_work(position, stage, device)
    inputs, weights = Work(), Work()
    for experts, blocks, recomputed in (
        (False, len(stage.layers) - sparse, again - sparse_again),
        (True, sparse, sparse_again),
    ):
        if blocks:
            parts = block_work(position, device, experts)
            forward += parts[0].times(blocks)
            inputs += parts[1].times(blocks) + _again(position, parts[0], experts).times(recomputed)
            weights += parts[2].times(blocks)
    return forward, inputs, weights


def block_work(position: Position, device: str, experts: bool) -> tuple[Work, Work, Work]:
    """Return the work of one block: (forward, backward for the inputs, backward for the weights)."""
    flops = _block_flops(position, experts)
    attention = block_attention_flops(position)
    saved = position.tokens * sum(saved_bytes(position, device, experts=experts).values())
    operations = block_operations(position.arch, experts)
    forward = Work(
        matmul_flops=flops,
        attention_flops=attention,
        moved_bytes=_PASSES_FORWARD * saved,
        operations=FORWARD_SHARE * operations,
    )
    # The backward of flash attention computes QK^T again: 5 products for the forward's 2 (Dao 2023, section 3.1.2).
    inputs = Work(
        matmul_flops=flops,
        attention_flops=2.5 * attention,
        moved_bytes=_PASSES_BACKWARD * saved,
        operations=(1 - FORWARD_SHARE) * operations,
    )
    return forward, inputs, Work(matmul_flops=flops)


def block_operations(arch: Arch, experts: bool) -> float:
    """Return the number of operations that Python starts for one block, forward and backward. The sum over a token's
    top_k experts has one group of operations per expert.
    """
    moe, total = arch.moe, _BLOCK_OPERATIONS
    total += _QK_NORM_OPERATIONS * arch.qk_norm + _LATENT_OPERATIONS * arch.is_mla
    if experts:
        total += _ROUTING_OPERATIONS + _CHOICE_OPERATIONS * moe.top_k
        total += _SHARED_OPERATIONS * (moe.shared_experts > 0) + _CAPACITY_OPERATIONS * (moe.capacity_factor > 0)
    return total


def _again(position: Position, forward: Work, experts: bool) -> Work:
    """Return the work of a recomputed block's second forward (parallel/recompute.py).

    The second forward stops before the last product of a feed-forward, whose result no backward needs. Experts are
    computed to the end, because the gradient of the routing weights needs their results; so is a block whose backward
    has two halves. Systems that recompute the core of attention repeat only the core.
    """
    arch, parallel = position.arch, position.parallel
    of_width = 2.0 * position.tokens * arch.d_model / parallel.tp  # FLOPs per column of a product from or to width D
    o = of_width * arch.num_heads * value_width(arch)
    down = of_width * (arch.moe.shared_experts * arch.moe.d_expert if experts else arch.d_ffn)
    if position.software.core_recompute and parallel.recompute == "selective":
        return replace(forward, matmul_flops=0.0, moved_bytes=0.0)
    if parallel.recompute == "full":
        left_out = 0.0 if experts or parallel.splits_backward else down
        return replace(forward, matmul_flops=forward.matmul_flops - left_out)
    # With tensor parallelism, "selective" repeats the matrices that are divided by rows (o, down): it keeps their sums.
    down_again = down if experts or parallel.splits_backward else 0.0
    products = o + down_again if parallel.tp > 1 else 0.0
    products = max(products, position.software.products_recomputed * forward.matmul_flops)
    return replace(forward, matmul_flops=products, attention_flops=0.0)


def _block_flops(position: Position, experts: bool) -> float:
    """Return the FLOPs of the forward matrix products of one block on this rank.

    Tensor-parallel ranks divide heads and widths; each computes all latents, and routes its own tokens.
    """
    arch, tp, tokens = position.arch, position.parallel.tp, position.tokens
    products = tokens * attention_matrices(arch, tp)
    if not experts:
        return 2.0 * (products + tokens * block_mlp_parameters(arch) / tp)
    routed = tokens / position.sequence_ranks
    rows = position.assignments + routed * arch.moe.has_fallback  # every token passes through the fallback
    products += routed * router_parameters(arch) + rows * expert_parameters(arch)
    return 2.0 * (products + tokens * shared_parameters(arch) / tp)


def block_attention_flops(position: Position) -> float:
    """Return the FLOPs of QK^T and PV of one block on this rank, over all keys that tokens attend to.

    Values count with the width of keys, because latent attention pads them. With context parallelism the result is that
    of the rank with the most keys. Kernels also compute the masked keys of a tile, which are not counted.
    """
    arch, parallel, seq_len = position.arch, position.parallel, position.train.seq_len
    width = arch.num_heads * arch.head_dim / parallel.tp
    uneven = imbalance(parallel, seq_len, arch.sliding_window) if parallel.ring > 1 else 1.0
    return 4.0 * position.tokens * width * mean_keys(seq_len, arch.sliding_window) * uneven


def ends_work(position: Position, stage: PipelineStage, device: str) -> Work:
    """Return the work of embedding, last norm, head and loss with its terms for one micro-batch, forward and backward.
    Head and loss count once per head pass (`arch.head_passes`).
    """
    arch, tokens, e = position.arch, position.tokens, COMPUTE_BYTES[position.train.precision]
    total = Work(operations=_MICRO_BATCH_OPERATIONS / position.parallel.stages)
    if not stage.last:
        return total
    vocabulary, wide = arch.vocab_size / position.parallel.tp, max(e, 4)
    chunks = memory.chunks(arch.vocab_size // position.parallel.tp, tokens, device)
    outside = stream_norm_bytes(arch, e, device) / position.sequence_ranks + arch.d_model * e + 16
    # Passes over each logit in the loss: written, widened, reduced (two), shifted, exponentiated, narrowed, read twice.
    moved = tokens * vocabulary * (5 * e + 9 * wide) + vocabulary * arch.d_model * (2 * e + 2 * wide) * chunks
    operations, capped = _CHUNK_OPERATIONS, 0
    if arch.logit_softcap:
        operations += _SOFTCAP_OPERATIONS
        capped = _SOFTCAP_PASSES.get(device, 2)
        moved += tokens * vocabulary * wide * capped
    for tensors in position.term_tensors:
        operations += _TERM_OPERATIONS + _TENSOR_OPERATIONS * tensors + _SOFTCAP_OPERATIONS * (capped > 0)
        again = capped + _CLONE_PASSES if capped else 0  # a term caps the logits once more, and keeps its slope apart
        moved += tokens * vocabulary * wide * (_TERM_PASSES + _TENSOR_PASSES * tensors + again)
    one_pass = Work(
        matmul_flops=6.0 * tokens * vocabulary * arch.d_model, moved_bytes=moved, operations=operations * chunks
    )
    around = Work(moved_bytes=(_PASSES_FORWARD + _PASSES_BACKWARD) * tokens * outside)
    return total + one_pass.times(arch.head_passes) + around


def update_work(position: Position, in_place: bool = False) -> Work:
    """Return the work that is done once per step: parameter gather, gradient reduction, clipping and the update.

    Per parameter whose update this rank computes: master, gradient and moments are read, all but the gradient are
      written, and the gradient is read for its norm. Per parameter of its stages: the gathered copy is written and
      unpacked; the gradient is widened, written and summed. in_place: the whole step is one compiled program, which
      needs no such copies of gathered parameters and of gradients.
    """
    precision, n = position.train.precision, position.parameters
    e, s, g = COMPUTE_BYTES[precision], STORED_BYTES[precision], kept_gradient_bytes(position.parallel, precision)
    units = sum(map(position.units, position.stages))
    numbers = sum(share.parameters / share.ranks * (4 + 2 * share.moments) for share in memory.shares(position))
    matrices = matrix_update(position)
    whole = e + g if in_place else 4 * e + 3 * g
    return Work(
        matmul_flops=matrices.flops if matrices else 0.0,
        moved_bytes=numbers * s + n * whole,
        operations=_STEP_OPERATIONS + _UNIT_OPERATIONS * units,
    )
