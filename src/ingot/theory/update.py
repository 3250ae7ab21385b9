"""The cost of an optimizer: the state that it keeps per parameter, and the work and traffic of whole matrices.

Parameters count by kind, with one name standing for each kind: an optimizer treats the matrices inside blocks alike,
and embedding, head and norms on their own (plugins/optimizer.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.plugins.layers import extra_attention_matrices, feed_forward_of
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.schema.arch import Arch
from ingot.schema.run import RunConfig
from ingot.theory.layout import BLOCK_NAME, EXPERT_NAME, Position, callback_tensors
from ingot.theory.params import STORED_BYTES, count_parameters, parameters_by_part


@dataclass(frozen=True)
class MatrixUpdate:
    """The update of whole matrices on one rank in one step, if all workers do equally much. flops: of its matrices.
    sent_bytes: of its pieces and of its results, each once, as two all-to-alls. ranks: that share the matrices."""

    flops: float
    sent_bytes: float
    ranks: int


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
    flops, elements = 0.0, 0
    for stage in position.stages:
        for layer in stage.layers:
            for rows, columns, count in _matrices(position.arch, layer):
                flops += count * part.matrix_flops(rows, columns)
                elements += count * rows * columns
    return MatrixUpdate(flops / ranks, 2 * elements * STORED_BYTES[position.train.precision] / ranks, ranks)


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
