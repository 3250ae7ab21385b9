"""Bytes that one rank sends in one optimizer step, by collective; tests compare them with counts of real steps.

Rings: for S bytes of data, each of n ranks sends S·(n-1)/n in a gather or a reduce-scatter, and twice that in an
  all-reduce (Patarasuk & Yuan 2009; Rajbhandari et al. 2020, section 7). Rows that pad a matrix to equal parts are not
  counted, nor are the few scalars of clipping and logging.

P: parameters of this rank's stages without routed experts. e: bytes of a number in the compute precision. g: bytes of a
  gradient while it is reduced. X = B·(T/cp)·D·e: bytes of the hidden states of one micro-batch.

    DDP      all-reduce P·g                                      once per step
    ZeRO-1   reduce-scatter P·g, gather P·e                      once per step
    ZeRO-2   reduce-scatter P·g; gather P·e                      every micro-batch; once per step
    ZeRO-3   reduce-scatter P·g, gather 2·P·e                    every micro-batch; one gather without `reshard`
    HSDP     as ZeRO over dp_shard x cp, and over dp_replicate an all-reduce of the shard's gradients, once per step
             (with parameters on the host, every micro-batch)
    experts  the same for the parameters of the experts on this rank, over the ranks that hold the same experts
    tp       4 gathers and 4 reduce-scatters of X, or 4 all-reduces without `sequence`, every block and micro-batch
             (Korthikanti et al. 2022, section 4.2.2); one of each kind for the embedding and one for the loss. A block
             with experts has 2 of each, and with shared experts 2 more. With `tp_chunks`, those of blocks are so many
             times as many, of the same bytes in all
    cp       as in theory/context.py, every block and micro-batch
    ep       2 all-to-alls forward and 2 backward of K rows of D·e for each token, every block with experts and
             micro-batch (Lepikhin et al. 2020), and one of the numbers of rows. All experts are assumed to have the
             same load; then (ep-1)/ep of the rows go to other ranks
    pp       X forward and X backward, X/tp with `sequence`, every boundary between ranks and micro-batch
    update   2 all-to-alls of whole matrices in the dtype of the masters, over dp_shard x cp x tp, once per step, for
             optimizers that look at them

The axis of a collective is the mesh axes on which the ranks of its group differ, joined by "+".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from ingot.schema.parallel import Parallel
from ingot.theory.context import Volume, ring_bytes, ulysses_bytes
from ingot.theory.layout import PipelineStage, Position, rank_of_stage
from ingot.theory.memory import Share, chunks, shares
from ingot.theory.params import COMPUTE_BYTES, kept_gradient_bytes, sent_gradient_bytes
from ingot.theory.update import matrix_update

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
# A rank sends this number x (n-1)/n of an operation's bytes.
_RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
_NUMBER_BYTES = 8  # bytes of an expert's index, or of a count of rows


@dataclass(frozen=True)
class Traffic:
    """The operations of one kind and purpose in one step: `count` operations over the `ranks` ranks of `axis`.

    bytes: total data of all operations: the output of gathers; the input on each rank, with its own part, of
      reduce-scatters, all-reduces and all-to-alls; the content of messages. axis: several axes are joined by "+".
    """

    kind: Kind
    axis: str
    what: str
    ranks: int
    count: int
    bytes: float

    @property
    def sent(self) -> float:
        """Bytes that each rank sends; collectives except all-to-alls run in a ring."""
        return self.bytes if self.kind == "send" else _RING[self.kind] * self.bytes * (self.ranks - 1) / self.ranks


def step_traffic(position: Position, device: str = "cpu") -> tuple[Traffic, ...]:
    """Return all traffic of this pipeline rank in one optimizer step. device: "cpu", "cuda" or "tpu", which decides
    the number of chunks of the loss.
    """
    found = [*_tensor_parallel(position, device), *_context_parallel(position), *_experts(position)]
    for share, view in zip(shares(position), ("shard", "expert_shard"), strict=False):
        found += _data_parallel(position, share, view)
    found += _pipeline(position)
    if matrices := matrix_update(position):
        axis = spanned(position.parallel, "copy")
        found.append(Traffic("all_to_all", axis, "whole matrices", matrices.ranks, 2, matrices.sent_bytes))
    return tuple(t for t in found if t.count and (t.ranks > 1 or t.kind == "send"))


def sent_by_axis(traffic: tuple[Traffic, ...]) -> dict[str, float]:
    """Return the bytes that a rank sends per step, by axis."""
    axes: dict[str, float] = {}
    for t in traffic:
        axes[t.axis] = axes.get(t.axis, 0.0) + t.sent
    return axes


def _data_parallel(position: Position, share: Share, view: str) -> Iterator[Traffic]:
    """Yield the traffic of one share of the parameters. view: "shard", or "expert_shard" for routed experts: the group
    of ranks (trainer/mesh) that divides the share.
    """
    parallel, precision, often = position.parallel, position.train.precision, position.accumulation
    n, e, g = share.parameters, COMPUTE_BYTES[precision], sent_gradient_bytes(parallel, precision)
    of_experts = view == "expert_shard"
    units = sum(map(position.expert_units if of_experts else position.common_units, position.stages))
    gradients, parameters = (f"{name}{' of experts' * of_experts}" for name in ("gradients", "parameters"))
    ranks, axis, copies = share.ranks, spanned(parallel, view), parallel.dp_replicate
    whole, part = n * g, n * g / ranks
    if parallel.reduce == "canonical":
        exchanges = copies.bit_length() - 1
        yield Traffic("send", "dp_replicate", gradients, copies, exchanges * units, exchanges * whole)
        if not of_experts:  # the tree sums over copies only; cp ranks within a copy have other tokens
            yield Traffic("all_reduce", "cp", gradients, parallel.cp, units, whole)
        yield Traffic("reduce_scatter", axis, gradients, ranks, units, whole)
        yield Traffic("all_gather", axis, parameters, ranks, units, n * e)
        return
    if parallel.zero == 3:
        gathers = (2 if parallel.reshard else 1) * often
        yield Traffic("all_gather", axis, parameters, ranks, gathers * units, gathers * n * e)
        yield Traffic("reduce_scatter", axis, gradients, ranks, often * units, often * whole)
        sums = often if parallel.offload_parameters else 1  # gradients on the host are summed once per micro-batch
        yield Traffic("all_reduce", "dp_replicate", gradients, copies, sums * units, sums * part)
        return
    reduced = often if parallel.zero == 2 else 1
    yield Traffic("reduce_scatter", axis, gradients, ranks, reduced * units, reduced * whole)
    yield Traffic("all_gather", axis, parameters, ranks, units, n * e)
    yield Traffic("all_reduce", "dp_replicate", gradients, copies, units, part)


def _context_parallel(position: Position) -> Iterator[Traffic]:
    """Yield the traffic of context parallelism in the attention of all blocks.

    A recomputed block repeats the traffic of its forward, except that "selective" keeps the result of a ring.
    """
    parallel, arch = position.parallel, position.arch
    if parallel.cp == 1:
        return
    blocks = sum(len(stage.layers) for stage in position.stages) * position.accumulation
    again = sum(map(position.recomputed, position.stages)) * position.accumulation
    ulysses = ulysses_bytes(arch, position.train, parallel)
    ring = ring_bytes(arch, position.train, parallel)
    heads, messages = "heads of attention", "keys and values"
    around = blocks + (again if parallel.recompute == "full" else 0)
    kinds: tuple[tuple[Kind, str, int, Volume, int], ...] = (
        ("all_to_all", heads, parallel.cp // parallel.ring, ulysses, blocks + again),
        ("send", messages, parallel.ring, ring, around),
    )
    for kind, what, ranks, volume, forwards in kinds:
        count = forwards * volume.forward_calls + blocks * volume.backward_calls
        size = forwards * volume.forward + blocks * volume.backward
        yield Traffic(kind, "cp", what, ranks, count, size)


def _experts(position: Position) -> Iterator[Traffic]:
    """Yield the traffic of expert parallelism: tokens to experts and back, and the choices that routers exchange."""
    parallel, moe, train = position.parallel, position.arch.moe, position.train
    blocks = sum(len(stage.expert_layers) for stage in position.stages) * position.accumulation
    again = sum(map(position.recomputed_with_experts, position.stages)) * position.accumulation
    if not blocks:
        return
    axis, size = spanned(parallel, "ep"), row_bytes(position)
    dealt = blocks + (again if parallel.recompute == "full" else 0)  # "selective" keeps the rows that were received
    exchanges = 2 * (blocks + dealt)
    yield Traffic("all_to_all", axis, "rows of experts", parallel.ep, exchanges, exchanges * size)
    counts = _NUMBER_BYTES * moe.num_experts
    yield Traffic("all_to_all", axis, "counts of rows", parallel.ep, dealt, dealt * counts)
    if moe.capacity_factor or moe.sequence_loss:
        choices = _NUMBER_BYTES * train.micro_batch * train.seq_len * moe.top_k
        ranks, times = parallel.cp * parallel.tp, blocks + again
        yield Traffic("all_gather", spanned(parallel, "sequence"), "choices of experts", ranks, times, times * choices)


def row_bytes(position: Position) -> float:
    """Return the input bytes, on this rank, of one all-to-all of one block with experts for one micro-batch."""
    return position.assignments * position.arch.d_model * COMPUTE_BYTES[position.train.precision]


def _tensor_parallel(position: Position, device: str) -> Iterator[Traffic]:
    parallel, often = position.parallel, position.accumulation
    if parallel.tp == 1:
        return
    regions = [regions_of(position, stage) for stage in position.stages]
    forward, backward = sum((r.enters for r in regions), 0), sum((r.leaves for r in regions), 0)
    again_in, again_out = sum((r.entered_again for r in regions), 0), sum((r.left_again for r in regions), 0)
    size = hidden_bytes(position)
    if parallel.sequence:
        both, more = forward + backward, parallel.tp_chunks - 1
        # The embedding and the loss are not divided into chunks.
        whole = sum(stage.first + stage.last for stage in position.stages)
        kinds: tuple[tuple[Kind, int], ...] = (("all_gather", again_in), ("reduce_scatter", again_out))
        for kind, again in kinds:
            times = both + again
            calls = often * (times + more * (times - whole))
            yield Traffic(kind, "tp", "hidden states", parallel.tp, calls, often * times * size)
    else:
        sums = often * (forward + backward + again_out)
        yield Traffic("all_reduce", "tp", "hidden states", parallel.tp, sums, sums * size)
    if any(stage.last for stage in position.stages):
        wide = max(COMPUTE_BYTES[position.train.precision], 4)
        pieces = chunks(position.arch.vocab_size // parallel.tp, position.tokens, device)
        # Three numbers per token: the largest logit alone, then the sum of exponentials and the target's logit.
        numbers = often * position.tokens * 3 * wide
        yield Traffic("all_reduce", "tp", "numbers of the loss", parallel.tp, often * 2 * pieces, numbers)
    partial = sum(stage.partial for stage in position.stages)
    each = kept_gradient_bytes(parallel, position.train.precision) / parallel.shard_ranks
    yield Traffic("all_reduce", "tp", "gradients of shared weights", parallel.tp, 1 if partial else 0, partial * each)


@dataclass(frozen=True)
class Regions:
    """Counts of how often one micro-batch enters and leaves regions of tensor parallelism on a stage: in the forward
    (enters, leaves), and in the second forward of recomputed blocks (entered_again, left_again).
    """

    enters: int
    leaves: int
    entered_again: int
    left_again: int


def regions_of(position: Position, stage: PipelineStage) -> Regions:
    """Return the counts of a stage's regions: attention and feed-forward of each block, the embedding (only left) and
    the loss (only entered). In the feed-forward of a block with experts, only the shared experts are a region.

    The second forward of a fully recomputed block stops at the last tensor that the backward needs, which is before
    the end of the feed-forward but after the shared experts. "selective" keeps the tensors that leave regions, but not
    those that enter them. If "selective" means only the core of attention, recomputation stays inside a region.
    """
    blocks, sparse = len(stage.layers), len(stage.expert_layers)
    again, sparse_again = position.recomputed(stage), position.recomputed_with_experts(stage)
    if position.software.core_recompute and position.parallel.recompute == "selective":
        again = sparse_again = 0
    shared = position.arch.moe.shared_experts > 0
    regions = 2 * (blocks - sparse) + (1 + shared) * sparse
    entered_again = 2 * (again - sparse_again) + (1 + shared) * sparse_again
    left_again = again + shared * sparse_again if position.parallel.recompute == "full" else 0
    return Regions(regions + stage.last, regions + stage.first, entered_again, left_again)


def hidden_bytes(position: Position) -> int:
    """Return the bytes of the hidden states of one micro-batch, in the compute precision."""
    return position.tokens * position.arch.d_model * COMPUTE_BYTES[position.train.precision]


def _pipeline(position: Position) -> Iterator[Traffic]:
    parallel, often, owner = position.parallel, position.accumulation, rank_of_stage(position.parallel)
    ahead = sum(not stage.last and owner[stage.number + 1] != position.rank for stage in position.stages)
    back = sum(not stage.first and owner[stage.number - 1] != position.rank for stage in position.stages)
    size = hidden_bytes(position) / position.sequence_ranks
    yield Traffic("send", "pp", "hidden states", parallel.pp, often * ahead, often * ahead * size)
    yield Traffic("send", "pp", "gradients of hidden states", parallel.pp, often * back, often * back * size)
    ends = owner[0], owner[-1]
    if position.arch.tied_embeddings and ends[0] != ends[1] and position.rank in ends:
        matrix = sum(stage.embedding + stage.head for stage in position.stages) / parallel.shard_ranks
        size = matrix * kept_gradient_bytes(parallel, position.train.precision)
        # Always two ranks: those of the first and the last stage.
        yield Traffic("all_reduce", "pp", "gradients of the tied matrix", 2, 1, size)


# The axes of the ranks that share one copy of the model, outermost first (trainer/mesh).
_IN_A_COPY = ("dp_shard", "cp", "tp")


def spanned(parallel: Parallel, view: str) -> str:
    """Return the mesh axes that the groups of a view (trainer/mesh) span, such as "dp_shard+cp"; "" for single ranks.

    An "ep" group has neighboring ranks, an "expert_shard" group every ep-th rank. If ep is neither a divisor nor a
    multiple of the inner axes, groups may differ; the answer is that of the first group.
    """
    sizes = tuple(getattr(parallel, axis) for axis in _IN_A_COPY)
    return _spanned(sizes, parallel.ep, parallel.reduce == "canonical", view)


@lru_cache(maxsize=65_536)
def _spanned(sizes: tuple[int, ...], ep: int, canonical: bool, view: str) -> str:
    """Do the work of `spanned`. It visits every rank, so results are cached: the planner repeats the same calls."""
    _, cp, columns = sizes
    ranks = range(prod(sizes))
    line = {
        "shard": ranks[:: columns * cp] if canonical else ranks[::columns],
        "sequence": ranks[: cp * columns],
        "ep": ranks[:ep],
        "expert_shard": ranks[::ep],
        "copy": ranks,
    }[view]
    places = [coordinates(rank, sizes) for rank in line]
    return "+".join(axis for i, axis in enumerate(_IN_A_COPY) if len({place[i] for place in places}) > 1)


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of `rank` on each axis of a row-major mesh. sizes: lengths of the axes, outermost first."""
    found = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))
