"""Bytes that one rank sends in one optimizer step, collective by collective; tests compare them with counted steps.

Rings: of data of S bytes, each of n ranks sends S·(n-1)/n in a gather or a reduce-scatter, and twice that in an
  all-reduce (Patarasuk & Yuan 2009; Rajbhandari et al. 2020, section 7). Rows that pad a matrix to equal parts are left
  out, and so are the few scalars of clipping and logging.

P: parameters of this rank's stages, routed experts left out; e bytes of one in the compute precision, g of a gradient
  on its way; X = B·(T/cp)·D·e: the hidden states of one micro-batch.

    DDP      all-reduce P·g                                      once per step
    ZeRO-1   reduce-scatter P·g, gather P·e                      once per step
    ZeRO-2   reduce-scatter P·g; gather P·e                      every micro-batch; once per step
    ZeRO-3   reduce-scatter P·g, gather 2·P·e                    every micro-batch; one gather without `reshard`
    HSDP     as ZeRO over dp_shard x cp, and over dp_replicate an all-reduce of the shard's gradients, once per step
             (with parameters on the host, every micro-batch)
    experts  the same for the parameters of the experts on this rank, over the ranks that hold the same experts
    tp       4 gathers and 4 reduce-scatters of X, or 4 all-reduces without `sequence`, every block and micro-batch
             (Korthikanti et al. 2022, section 4.2.2); one of each kind for the embedding and one for the loss. A block
             with experts has 2 and 2, and as many again for shared experts
    cp       as in theory/context.py, every block and micro-batch
    ep       2 all-to-alls forward and 2 backward of K rows of D·e for each token, every block with experts and
             micro-batch (Lepikhin et al. 2020), and one of counts. All experts are assumed to have the same
             load; then (ep-1)/ep of the rows leave
    pp       X forward and X backward, X/tp with `sequence`, every boundary between ranks and micro-batch

The axis of a collective is named by the mesh axes on which the members of its group differ, joined by "+".
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

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
# How many times (n-1)/n of an operation's bytes leave a rank.
_RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
_NUMBER_BYTES = 8  # of choices and counts


@dataclass(frozen=True)
class Traffic:
    """The `count` operations of one kind per step over the `ranks` of `axis`, on `bytes` of data all together.

    bytes: what a gather returns; what a reduce-scatter, all-reduce or all-to-all takes on each rank, its own part
      included; what messages send. axis: several axes are joined by "+".
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
    """Return everything that this pipeline rank sends in one optimizer step. device: decides the chunks of the loss."""
    found = [*_tensor_parallel(position, device), *_context_parallel(position), *_experts(position)]
    for share, view in zip(shares(position), ("shard", "expert_shard"), strict=False):
        found += _data_parallel(position, share, view)
    found += _pipeline(position)
    return tuple(t for t in found if t.count and (t.ranks > 1 or t.kind == "send"))


def sent_by_axis(traffic: tuple[Traffic, ...]) -> dict[str, float]:
    """Return the bytes per step by the name of the axes."""
    axes: dict[str, float] = {}
    for t in traffic:
        axes[t.axis] = axes.get(t.axis, 0.0) + t.sent
    return axes


def _data_parallel(position: Position, share: Share, view: str) -> Iterator[Traffic]:
    """Yield the traffic of the parameters that the ranks of a view of the mesh divide."""
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
        if not of_experts:  # the tree does not reach the ranks of one copy, which have other tokens
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
    """Yield the traffic of attention of all blocks.

    A recomputed block repeats the traffic of its forward; with "selective" the result of a ring is kept.
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
    """Yield the traffic of tokens to experts and back, and of what routers exchange."""
    parallel, moe, train = position.parallel, position.arch.moe, position.train
    blocks = sum(len(stage.expert_layers) for stage in position.stages) * position.accumulation
    again = sum(map(position.recomputed_with_experts, position.stages)) * position.accumulation
    if not blocks:
        return
    axis, size = spanned(parallel, "ep"), row_bytes(position)
    dealt = blocks + (again if parallel.recompute == "full" else 0)  # "selective" keeps what all-to-alls bring
    exchanges = 2 * (blocks + dealt)
    yield Traffic("all_to_all", axis, "rows of experts", parallel.ep, exchanges, exchanges * size)
    counts = _NUMBER_BYTES * moe.num_experts
    yield Traffic("all_to_all", axis, "counts of rows", parallel.ep, dealt, dealt * counts)
    if moe.capacity_factor or moe.sequence_loss:
        choices = _NUMBER_BYTES * train.micro_batch * train.seq_len * moe.top_k
        ranks, times = parallel.cp * parallel.tp, blocks + again
        yield Traffic("all_gather", spanned(parallel, "sequence"), "choices of experts", ranks, times, times * choices)


def row_bytes(position: Position) -> float:
    """Return the bytes that one all-to-all of one block with experts takes on this rank for one micro-batch."""
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
        gathers, scatters = often * (forward + backward + again_in), often * (forward + backward + again_out)
        yield Traffic("all_gather", "tp", "hidden states", parallel.tp, gathers, gathers * size)
        yield Traffic("reduce_scatter", "tp", "hidden states", parallel.tp, scatters, scatters * size)
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
    """Counts of one micro-batch entering and leaving regions of tensor parallelism on a stage: in its forward, and
    again in recomputed blocks.
    """

    enters: int
    leaves: int
    entered_again: int
    left_again: int


def regions_of(position: Position, stage: PipelineStage) -> Regions:
    """Return the regions of a stage: attention and feed-forward of each block, the embedding (left only) and the loss
    (entered only).

    In a block with experts, only the shared experts are a region.
    A fully recomputed block stops at the last tensor that its backward needs, which is before the end of the
    feed-forward but after the shared experts. A selectively recomputed block keeps what left a region, but not what
    entered it; where "selective" means the core of attention alone, the recomputation is inside of a region.
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
        # Two ranks, whatever the length of the pipeline.
        yield Traffic("all_reduce", "pp", "gradients of the tied matrix", 2, 1, size)


# The axes of the ranks that share one copy of the model, outermost first (trainer/mesh).
_IN_A_COPY = ("dp_shard", "cp", "tp")


def spanned(parallel: Parallel, view: str) -> str:
    """Return the mesh axes that the groups of a view of trainer/mesh span, like "dp_shard+cp"; "" for single ranks.

    ep takes neighbors, expert_shard every ep-th rank. Where ep is neither a divisor nor a multiple of the inner axes,
    groups may differ; the first group is described.
    """
    sizes = tuple(getattr(parallel, axis) for axis in _IN_A_COPY)
    return _spanned(sizes, parallel.ep, parallel.reduce == "canonical", view)


@lru_cache(maxsize=65_536)
def _spanned(sizes: tuple[int, ...], ep: int, canonical: bool, view: str) -> str:
    """Return `spanned` of plain values: planners ask for the same ones often, and each answer visits every rank."""
    _, cp, columns = sizes
    ranks = range(prod(sizes))
    line = {
        "shard": ranks[:: columns * cp] if canonical else ranks[::columns],
        "sequence": ranks[: cp * columns],
        "ep": ranks[:ep],
        "expert_shard": ranks[::ep],
    }[view]
    places = [coordinates(rank, sizes) for rank in line]
    return "+".join(axis for i, axis in enumerate(_IN_A_COPY) if len({place[i] for place in places}) > 1)


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position of `rank` on each axis of a row-major mesh. sizes: degrees, outermost axis first."""
    found = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        found.append(place)
    return tuple(reversed(found))
