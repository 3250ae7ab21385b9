"""What an optimizer costs: the state that it keeps per parameter, and the work and traffic of whole matrices.

Parameters count by kind, with one name standing for each kind: an optimizer treats the matrices inside blocks alike,
and embedding, head and norms on their own (plugins/optimizer.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ingot.plugins.optimizer import OPTIMIZERS
from ingot.schema.arch import Arch
from ingot.schema.run import RunConfig
from ingot.theory.layout import PipelineStage, Position, callback_tensors
from ingot.theory.params import STORED_BYTES, block_norm_parameters, count_parameters, parameters_by_part

BLOCK, EXPERT = "blocks.0.attention.q.weight", "blocks.0.moe.experts.up.weight"


@dataclass(frozen=True)
class MatrixUpdate:
    """The update of whole matrices on one rank in one step, if all workers do equally much. flops: of its matrices.
    sent_bytes: of its pieces and of its results, each once, as two all-to-alls. ranks: that share the matrices."""

    flops: float
    sent_bytes: float
    ranks: int


def common_moments(position: Position) -> float:
    """Return the mean number of state tensors per parameter of this rank, with those of callbacks, routed experts left
    out."""
    found = [pair for stage in position.stages for pair in _kinds(position, stage)]
    total = sum(count for count, _ in found)
    own = sum(count * moments for count, moments in found) / total if total else 0.0
    return own + position.callback_tensors


def expert_moments(position: Position) -> float:
    """Return the number of state tensors per parameter of routed experts, with those of callbacks."""
    return OPTIMIZERS[position.optimizer].moments(EXPERT, 2) + position.callback_tensors


def mean_moments(run: RunConfig) -> float:
    """Return the mean number of state tensors per parameter of a whole model, with those of callbacks."""
    arch, moments = run.model, OPTIMIZERS[run.optim.kind].moments
    names = {"embedding": ("embed.weight", 2), "head": ("head.weight", 2), "norms": ("norm.weight", 1)}
    names |= {"attention": (BLOCK, 2), "mlp": ("blocks.0.mlp.up.weight", 2), "experts": (EXPERT, 2)}
    weighted = sum(count * moments(*names[part]) for part, count in parameters_by_part(arch).items())
    return weighted / count_parameters(arch) + callback_tensors(run)


def _kinds(position: Position, stage: PipelineStage) -> Iterator[tuple[int, float]]:
    """Yield (number of parameters, state tensors of each) of the parts of a stage, routed experts left out."""
    moments = OPTIMIZERS[position.optimizer].moments
    norms = len(stage.layers) * block_norm_parameters(position.arch)
    yield stage.embedding, moments("embed.weight", 2)
    yield stage.head, moments("head.weight", 2)
    yield stage.norm, moments("norm.weight", 1)
    yield norms, moments("blocks.0.attention_norm.weight", 1)
    yield stage.common - stage.outside - norms, moments(BLOCK, 2)


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
    yield width, arch.d_model, count * (arch.ffn_matrices - 1)
    yield arch.d_model, width, count
