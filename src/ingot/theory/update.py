"""The cost of an optimizer: the state that it keeps per parameter, and the work, traffic and memory of whole matrices.

Parameters count by kind, with one name standing for each kind: an optimizer treats the matrices inside blocks alike,
and embedding, head and norms on their own (plugins/optimizer.py).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.plugins.layers import extra_attention_matrices, feed_forward_of
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.schema.arch import Arch
from ingot.schema.run import RunConfig
from ingot.theory.layout import BLOCK_NAME, EXPERT_NAME, Position, callback_tensors
from ingot.theory.params import STORED_BYTES, count_parameters, parameters_by_part

# The matrices of one worker in a round: 256 MiB in float32, or one larger matrix. The trainer reads this constant too.
ROUND_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class MatrixUpdate:
    """The update of whole matrices on one rank in one step, if all workers do equally much. flops: of its matrices.
    sent_bytes: of its pieces and of its results, each once, as two all-to-alls. ranks: that share the matrices.
    elements: of the rank's parts of all matrices. round_elements: numbers that exist at the peak of a round."""

    flops: float
    sent_bytes: float
    ranks: int
    elements: float
    round_elements: float


def mean_moments(run: RunConfig) -> float:
    """Return the mean number of state tensors per parameter of a whole model, with those of callbacks."""
    arch, moments = run.model, OPTIMIZERS[run.optim.kind].moments
    names = {"embedding": ("embed.weight", 2), "head": ("head.weight", 2), "norms": ("norm.weight", 1)}
    names |= {"attention": (BLOCK_NAME, 2), "mlp": ("blocks.0.mlp.up.weight", 2), "experts": (EXPERT_NAME, 2)}
    weighted = sum(count * moments(*names[part]) for part, count in parameters_by_part(arch).items())
    return weighted / count_parameters(arch) + callback_tensors(run)


def matrix_update(position: Position) -> MatrixUpdate | None:
    """Return the update of whole matrices on this rank; None if the optimizer has no such rules."""
    part, parallel = OPTIMIZERS[position.optimizer], position.parallel
    if not part.whole_matrices:
        return None
    ranks = parallel.dp_shard * parallel.cp * parallel.tp
    matrices: Counter[tuple[int, int]] = Counter()
    for stage in position.stages:
        for layer in stage.layers:
            for rows, columns, count in _matrices(position.arch, layer):
                matrices[rows, columns] += count
    flops = sum(count * part.matrix_flops(*shape) for shape, count in matrices.items())
    elements = sum(count * rows * columns for (rows, columns), count in matrices.items()) / ranks
    return MatrixUpdate(
        flops=flops / ranks,
        sent_bytes=2 * elements * STORED_BYTES[position.train.precision],
        ranks=ranks,
        elements=elements,
        round_elements=_round_elements(matrices, ranks, part.matrix_tensors),
    )


def _round_elements(matrices: Counter[tuple[int, int]], ranks: int, made: int) -> float:
    """Return the most numbers that a worker holds at a time in a round (`Matrices` of trainer/optim).

    matrices: their number by (rows, columns). made: tensors of a matrix' size that exist in the call that computes its
    update, the update included. Two phases are candidates:
      computing: all matrices of the round, the updates of those before, and what the call for one matrix makes. A round
        begins with its largest matrices; the bound is that of a round of one size, or of the end of a mixed round.
      exchanging: what is sent, its copy in the order of receivers, and what arrives, each as much as a round.
    """
    alike: Counter[int] = Counter()  # most matrices of one size are a shape and its transpose
    for (rows, columns), count in matrices.items():
        alike[rows * columns] += count
    if not alike:
        return 0.0
    largest, mean = max(alike), sum(size * count for size, count in alike.items()) / ranks
    # A worker may have one matrix more than another; with at least as many workers as matrices, each has at most one.
    most = largest if ranks >= alike.total() else mean + (largest if ranks > 1 else 0)
    whole = max(largest, min(ROUND_ELEMENTS, most))
    found = [2 * whole + (made - 1) * min(alike), 3 * whole if ranks > 1 else 0]
    for size, count in alike.items():
        together = max(min(ROUND_ELEMENTS // size, -(-count // ranks)), 1)
        found.append((2 * together - 1 + made) * size)
    return float(max(found))


def _matrices(arch: Arch, layer: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rows, columns, number) of the matrices of one block, without the router, which is never large."""
    d, moe = arch.d_model, arch.moe
    yield from ((rows, columns, 1) for rows, columns in extra_attention_matrices(arch))
    if arch.is_mla:
        mla, heads = arch.mla, arch.num_heads
        yield mla.kv_rank + mla.rope_dim, d, 1
        yield heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, 1
        yield d, heads * mla.v_dim, 1
        yield heads * arch.head_dim, mla.q_rank or d, 1
        yield from [(mla.q_rank, d, 1)] if mla.q_rank else []
    else:
        yield arch.num_heads * arch.head_dim, d, 1
        yield arch.num_kv_heads * arch.head_dim, d, 2
        yield d, arch.num_heads * arch.head_dim, 1
    if not arch.has_experts(layer):
        yield from _feed_forward(arch, arch.d_ffn, 1)
        return
    yield from _feed_forward(arch, moe.d_expert, moe.num_experts)
    if moe.shared_experts:
        yield from _feed_forward(arch, moe.shared_experts * moe.d_expert, 1)
    if moe.has_fallback:
        yield from _feed_forward(arch, moe.d_expert, 1)


def _feed_forward(arch: Arch, width: int, count: int) -> Iterator[tuple[int, int, int]]:
    yield width, arch.d_model, count * (feed_forward_of(arch).matrices - 1)
    yield arch.d_model, width, count
