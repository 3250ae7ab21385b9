"""The seconds of one micro-batch on one stage by kind of work: forward, backward for inputs, backward for weights.

All blocks with experts are alike, and so are all blocks without, so one block of each is timed and multiplied.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ingot.planner.predict.time.constants import Constants
from ingot.planner.predict.time.efficiency import (
    Product,
    Rates,
    attention_seconds,
    block_products,
    cast_seconds,
    head_product,
    moved_seconds,
    product_seconds,
    rates_of,
    repeated_products,
)
from ingot.planner.predict.time.links import counted_as
from ingot.plugins.layers import feed_forward_of
from ingot.schema.cluster import Cluster
from ingot.theory import work
from ingot.theory.layout import PipelineStage, Position
from ingot.theory.params import COMPUTE_BYTES, kept_gradient_bytes, value_width

PRODUCTS, ATTENTION, MOVED, CASTS = "matrix products", "attention", "everything elementwise", "low-precision casts"
ROUTING, LAUNCHES = "rows of experts", "launches"
KINDS = (PRODUCTS, ATTENTION, MOVED, CASTS, ROUTING, LAUNCHES)

# The share of operations that the host still has to launch if a compiler or hand-written kernels fuse operations.
_JOINED = {"eager": 1.0, "compiled": 0.6, "tuned": 0.6}
_IN_GRAPHS = 0.02
_LOSS_BYTES = {"eager": 1.0, "compiled": 0.6, "tuned": 0.5}
# Passes over the scores [T, T] of unfused attention: softmax reads and writes one such matrix; its gradient reads two
# and writes one.
_SCORE_PASSES, _SCORE_GRADIENT_PASSES = 2, 3
# Passes of dropout over the scores, the same in forward and backward: one read, one write, and a mask of one byte.
_DROPOUT_PASSES = 2.5

# Number of operations that quantize the inputs of an expert's two products; block scales need more than the default, 4.
_CAST_OPERATIONS = {"mxfp8": 8, "nvfp4": 8}

Seconds = dict[str, float]


@dataclass(frozen=True)
class WorkTime:
    """The time of a block or stage in one direction. device: device seconds by kind of work. host: seconds that the
    host takes to launch the work.
    """

    device: Seconds
    host: float = 0.0

    def plus(self, other: "WorkTime", times: float = 1.0) -> "WorkTime":
        """Return the sum of this time and `times` times the other."""
        device = dict(self.device)
        for kind, seconds in other.device.items():
            device[kind] = device.get(kind, 0.0) + times * seconds
        return WorkTime(device, self.host + times * other.host)

    @property
    def busy(self) -> float:
        """The device's seconds of all kinds together."""
        return sum(self.device.values())

    @property
    def seconds(self) -> float:
        """The seconds of device or host, whichever is slower, because the host launches operations ahead."""
        return max(self.busy, self.host)


class StageTimer:
    """A timer of the pipeline stages of one run. The blocks of all stages have the same shapes."""

    def __init__(self, position: Position, cluster: Cluster, constants: Constants):
        self._position, self._cluster, self._constants = position, cluster, constants
        self.rates: Rates = rates_of(
            cluster,
            position.software,
            position.train.precision,
            constants,
            feed_forward_of(position.arch).matrices == 3,
        )

    def stage(self, position: Position, stage: PipelineStage) -> tuple[WorkTime, WorkTime, WorkTime]:
        """Return a stage's times of (forward, backward for the inputs, backward for the weights), per micro-batch.

        As in theory/work.py, recomputed work is part of the backward for the inputs.
        """
        sparse, again = len(stage.expert_layers), position.recomputed_with_experts(stage)
        forward, inputs, weights = self._ends(position, stage), WorkTime({}), WorkTime({})
        dense = len(stage.layers) - sparse
        for experts, blocks, repeated in ((False, dense, position.recomputed(stage) - again), (True, sparse, again)):
            if blocks:
                parts = self._sparse_block if experts else self._dense_block
                forward, inputs, weights = (
                    total.plus(part, blocks) for total, part in zip((forward, inputs, weights), parts, strict=False)
                )
                inputs = inputs.plus(parts[3], repeated)
        return forward, inputs, weights

    @cached_property
    def _dense_block(self) -> tuple[WorkTime, WorkTime, WorkTime, WorkTime]:
        return self._block(False)

    @cached_property
    def _sparse_block(self) -> tuple[WorkTime, WorkTime, WorkTime, WorkTime]:
        return self._block(True)

    def _block(self, experts: bool) -> tuple[WorkTime, WorkTime, WorkTime, WorkTime]:
        """Return the times of a block's forward, backward for inputs, backward for weights, and recomputation."""
        position = self._position
        products = block_products(position, experts)
        forward, inputs, _ = work.block_work(position, counted_as(self._cluster), experts)
        moved = {MOVED: moved_seconds(self.rates, forward.moved_bytes)}
        ahead = self._products(products) | self._attention(forward.attention_flops) | moved
        back = self._products(p.for_inputs for p in products)
        back |= self._attention(inputs.attention_flops, backward=True)
        back |= {MOVED: moved_seconds(self.rates, inputs.moved_bytes)}
        if experts:
            for part, share in ((ahead, work.FORWARD_SHARE), (back, 1 - work.FORWARD_SHARE)):
                part[ROUTING] = self._routing()
                part[LAUNCHES] = share * self._waits()
        host = [self._host(part.operations) for part in (forward, inputs)]
        if experts:
            alone = self._host(self._one_by_one())
            host = [host[0] + alone, host[1] + 2 * alone]
        weights = self._products(p.for_weights for p in products) | self._accumulated(products)
        again = self._again(experts, WorkTime(ahead, host[0]))
        return WorkTime(ahead, host[0]), WorkTime(back, host[1]), WorkTime(weights), again

    def _again(self, experts: bool, forward: WorkTime) -> WorkTime:
        position = self._position
        if position.parallel.recompute == "none":
            return WorkTime({})
        if position.parallel.recompute == "selective" and position.software.core_recompute:
            return WorkTime({ATTENTION: forward.device[ATTENTION]}, forward.host / 3)
        products = self._products(repeated_products(position, experts))
        if position.parallel.recompute == "selective":
            return WorkTime(products | {MOVED: forward.device[MOVED]}, forward.host)
        return WorkTime(forward.device | products, forward.host)

    def _ends(self, position: Position, stage: PipelineStage) -> WorkTime:
        """Return the time of the stage's work outside blocks: embedding, last norm, head and loss."""
        ends = work.ends_work(position, stage, counted_as(self._cluster))
        part = WorkTime({}, self._host(ends.operations))
        if not stage.last:
            return part
        head = head_product(position)
        seconds = sum(product_seconds(self.rates, p) for p in (head, head.for_inputs, head.for_weights))
        # theory/work.py counts the loss as single operations; fused losses need fewer passes over memory.
        moved = ends.moved_bytes * _LOSS_BYTES[position.software.kernels] / self.rates.memory
        return WorkTime({PRODUCTS: seconds * position.arch.head_passes, MOVED: moved}, part.host)

    def _products(self, products: Iterable[Product]) -> Seconds:
        products = tuple(products)
        seconds = {PRODUCTS: sum(product_seconds(self.rates, p) for p in products)}
        if self.rates.low:
            seconds[CASTS] = sum(cast_seconds(self.rates, p) for p in products)
        return seconds

    def _attention(self, flops: float, backward: bool = False) -> Seconds:
        position = self._position
        arch, ring = position.arch, max(position.parallel.ring, 1)
        if position.software.attention == "unfused":
            return {ATTENTION: self._unfused(backward)}
        tokens = min(position.train.seq_len, arch.sliding_window or position.train.seq_len) / ring
        if position.software.kernels == "tuned":  # values narrower than keys are not padded
            flops *= (arch.head_dim + value_width(arch)) / (2 * arch.head_dim)
        return {ATTENTION: attention_seconds(self.rates, flops, tokens, arch.head_dim, backward=backward)}

    def _unfused(self, backward: bool) -> float:
        """Return the seconds of unfused attention, which computes, writes and reads all scores, even masked ones."""
        position = self._position
        arch, t, e = position.arch, position.train.seq_len, COMPUTE_BYTES[position.train.precision]
        heads = position.train.micro_batch * arch.num_heads // position.parallel.tp
        pair = (
            Product("scores", t, t, arch.head_dim, heads, False),
            Product("values", t, arch.head_dim, t, heads, False),
        )
        passes = _SCORE_GRADIENT_PASSES if backward else _SCORE_PASSES
        passes += _DROPOUT_PASSES if position.software.dropout else 0
        written = passes * e * heads * t * t / position.parallel.cp
        products = sum(product_seconds(self.rates, p) for p in pair) * (2 if backward else 1)
        return products / position.parallel.cp + moved_seconds(self.rates, written)

    def _routing(self) -> float:
        """Return the seconds of gathering token rows for experts and scattering them back. Both steps read and write
        each row once.
        """
        position = self._position
        row = position.arch.d_model * COMPUTE_BYTES[position.train.precision]
        return 4 * position.assignments * row * self._constants.expert_bytes / self.rates.memory

    def _accumulated(self, products: Iterable[Product]) -> Seconds:
        """Return the seconds of adding the weights' gradients to those of earlier micro-batches, which reads and writes
        them once more; {} if fused kernels add them, or with ZeRO-3, where a rank adds only its own shard.
        """
        position = self._position
        parts = position.parallel.zero == 3 and position.parallel.shard_ranks > 1
        if parts or position.software.fused_gradients:
            return {}
        kept = kept_gradient_bytes(position.parallel, position.train.precision)
        numbers = sum(p.n * p.k * p.groups for p in products)
        return {MOVED: 2 * kept * numbers / self.rates.memory}

    def _one_by_one(self) -> float:
        """Return the number of operations in a block's forward that are launched for each expert separately: two
        products with views of their inputs and, in low precision, casts of the inputs.

        The backward has twice as many.
        """
        position, software = self._position, self._position.software
        local = position.arch.moe.num_experts // position.parallel.ep
        return local * (4 + _CAST_OPERATIONS.get(software.recipe, 4 if software.recipe else 0))

    def _waits(self) -> float:
        """Return the seconds that the device waits for the host in a block with experts. Without CUDA graphs, the host
        reads each expert's number of rows before it launches the next operations.
        """
        position = self._position
        if position.software.graphs or not position.software.dropless:
            return 0.0
        routing = work.block_operations(position.arch, True) - work.block_operations(position.arch, False)
        return self._host(routing)

    def _host(self, operations: float) -> float:
        software = self._position.software
        joined = _IN_GRAPHS if software.graphs else _JOINED[software.kernels]
        return operations * joined * self._cluster.op_seconds * self._constants.launch_share


class MeasuredTimer(StageTimer):
    """A timer for clusters with measured rates (doctor --bench), which have one rate per kind of work."""

    def __init__(self, position: Position, cluster: Cluster):
        self._position, self._cluster = position, cluster

    def stage(self, position: Position, stage: PipelineStage) -> tuple[WorkTime, WorkTime, WorkTime]:
        forward, inputs, weights = (self.part(p) for p in work.stage_work(position, stage, counted_as(self._cluster)))
        return forward, inputs, weights

    def part(self, done: work.Work) -> WorkTime:
        """Return the time of the work `done`, at the measured rates."""
        cluster = self._cluster
        peak = cluster.peak_flops[self._position.train.precision]
        device = {
            PRODUCTS: done.matmul_flops / (peak * cluster.matmul_efficiency),
            ATTENTION: done.attention_flops / (peak * cluster.attention_efficiency),
            MOVED: done.moved_bytes / cluster.memory_bandwidth,
        }
        return WorkTime(device, done.operations * cluster.op_seconds)
