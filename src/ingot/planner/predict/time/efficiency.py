"""The matrix products of a stage with their shapes, and the speed of a device at matrix products, attention and
elementwise work.

The model has no single efficiency. A product has a share of the best rate ever measured on the device. It loses time in
partly empty tiles, in a partly empty last wave, and at the start and end of each tile (more so with a short k), and it
takes at least as long as moving its inputs and output through memory.

The FLOPs of all products sum to those of theory/work.py. A product [m, k] x [k, n] of the forward has two products of
the same size in the backward: [m, n] x [n, k] for its inputs and [n, m] x [m, k] for its weights. Projections of the
same input are one product, as in all tuned systems.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ingot.planner.predict.time.constants import Constants
from ingot.plugins.layers import extra_attention_matrices, feed_forward_of
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.software import Software
from ingot.theory.devices import devices, find_device
from ingot.theory.layout import PipelineStage, Position
from ingot.theory.params import value_width


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of `groups` matrix products [m, k] x [k, n] that one launch starts.

    what: a name, like "q, k, v". low: the product may run in low precision.
    """

    what: str
    m: float
    n: float
    k: float
    groups: int = 1
    low: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.groups

    @property
    def for_inputs(self) -> "Product":
        """The product of the backward that computes the inputs' gradient."""
        return replace(self, n=self.k, k=self.n)

    @property
    def for_weights(self) -> "Product":
        """The product of the backward that computes the weights' gradient."""
        return replace(self, m=self.n, n=self.k, k=self.m)


def total_flops(products: Iterable[Product]) -> float:
    return sum(product.flops for product in products)


def block_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Return the forward products of one block on one rank. experts: a block with experts.

    Tensor-parallel ranks divide attention heads and feed-forward widths; each rank computes all latents, and routes its
    own tokens.
    """
    return (*_attention(position), *(_experts(position) if experts else _feed_forward(position)))


def _attention(position: Position) -> Iterator[Product]:
    arch, tp, m = position.arch, position.parallel.tp, position.tokens
    heads, d = arch.num_heads / tp, arch.d_model
    if arch.is_mla:
        yield from _latent(arch, heads, m)
    else:
        pairs = arch.num_kv_heads if arch.num_kv_heads % tp else arch.num_kv_heads / tp
        yield Product("q, k, v", m, (heads + 2 * pairs) * arch.head_dim, d)
    yield Product("o", m, d, heads * value_width(arch))
    for rows, columns in extra_attention_matrices(arch):
        yield Product("own of attention", m, rows / tp, columns)


def _latent(arch: Arch, heads: float, m: float) -> Iterator[Product]:
    mla = arch.mla
    yield Product("latents", m, mla.q_rank + mla.kv_rank + mla.rope_dim, arch.d_model)
    yield Product("q up", m, heads * arch.head_dim, mla.q_rank or arch.d_model)
    yield Product("k, v up", m, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)


def _pair(arch: Arch, what: str, rows: float, width: float, groups: int = 1) -> Iterator[Product]:
    """Yield the products of a feed-forward: "gate, up" (only up if the model has no gate), then "down"."""
    yield Product(f"gate, up{what}", rows, (feed_forward_of(arch).matrices - 1) * width, arch.d_model, groups)
    yield Product(f"down{what}", rows, arch.d_model, width, groups)


def _feed_forward(position: Position) -> Iterator[Product]:
    arch = position.arch
    return _pair(arch, "", position.tokens, arch.d_ffn / position.parallel.tp)


def _experts(position: Position) -> Iterator[Product]:
    arch, moe, parallel = position.arch, position.arch.moe, position.parallel
    routed = position.tokens / position.sequence_ranks
    yield Product("router", routed, moe.num_experts, arch.d_model, low=False)
    local = moe.num_experts // parallel.ep
    yield from _pair(arch, " of experts", position.assignments / local, moe.d_expert, local)
    if moe.has_fallback:
        yield from _pair(arch, " of the fallback", routed, moe.d_expert)
    if moe.shared_experts:
        yield from _pair(arch, " shared", position.tokens, moe.shared_experts * moe.d_expert / parallel.tp)


def repeated_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Return the forward products that the backward of a recomputed block repeats, as theory/work.py counts them.

    With "full", all products, or all but the last if its result is not needed. With "selective", the products whose
    results tensor parallelism sums over ranks, or none if "selective" means the attention core. If
    software.products_recomputed is set, that share of each product.
    """
    parallel, forward = position.parallel, block_products(position, experts)
    last_too = experts or parallel.splits_backward
    if parallel.recompute == "full":
        return forward if last_too else forward[:-1]
    if parallel.recompute == "none":
        return ()
    if share := position.software.products_recomputed:
        return tuple(replace(p, m=share * p.m) for p in forward)
    if position.software.core_recompute or parallel.tp == 1:
        return ()
    return tuple(p for p in forward if p.what == "o" or (last_too and p.what in ("down", "down shared")))


def head_product(position: Position) -> Product:
    """Return the product that computes the logits of one micro-batch, which is never in low precision."""
    arch = position.arch
    return Product("head", position.tokens, arch.vocab_size / position.parallel.tp, arch.d_model, low=False)


@dataclass(frozen=True)
class StageProducts:
    """The products of one micro-batch on one stage, each with the number of times it runs."""

    forward: tuple[tuple[Product, int], ...]
    inputs: tuple[tuple[Product, int], ...]
    weights: tuple[tuple[Product, int], ...]

    @property
    def flops(self) -> tuple[float, float, float]:
        """The FLOPs of (forward, backward for the inputs, backward for the weights)."""
        parts = (self.forward, self.inputs, self.weights)
        forward, inputs, weights = (sum(p.flops * count for p, count in part) for part in parts)
        return forward, inputs, weights


def stage_products(position: Position, stage: PipelineStage) -> StageProducts:
    """Return the products of a stage. All three products of the head are in `forward`, because the loss computes its
    gradients there; recomputed products are in `inputs`. A loss that waits for its backward (GPipe, breadth first) is
    counted there too, although it runs with the backward: the rank's work is the same.
    """
    sparse, again = len(stage.expert_layers), position.recomputed_with_experts(stage)
    kinds = ((False, len(stage.layers) - sparse, position.recomputed(stage) - again), (True, sparse, again))
    forward, inputs, weights = [], [], []
    if stage.last:
        head, passes = head_product(position), position.arch.head_passes
        forward += [(product, passes) for product in (head, head.for_inputs, head.for_weights)]
    for experts, blocks, recomputed in kinds:
        products = block_products(position, experts) if blocks else ()
        forward += [(p, blocks) for p in products]
        inputs += [(p.for_inputs, blocks) for p in products]
        if recomputed:
            inputs += [(p, recomputed) for p in repeated_products(position, experts)]
        weights += [(p.for_weights, blocks) for p in products]
    return StageProducts(tuple(forward), tuple(inputs), tuple(weights))


# The number of multiprocessors, each of which works on one tile at a time, by the beginning of a device's key (vendors'
# data sheets).
_MULTIPROCESSORS = {
    "v100": 80, "a100": 108, "a800": 108, "a6000": 84, "a10": 72, "h100-pcie": 114, "h20": 78, "h": 132, "gh": 132,
    "b": 148, "gb": 148, "l40": 142, "rtx-4090": 128, "rtx4090": 128, "rtx-3090": 82, "rtx3090": 82, "mi250": 208,
    "mi3": 304, "mi355": 256,
}  # fmt: skip
_TYPICAL_MULTIPROCESSORS = 132
# The tiles from which libraries choose: rows, columns, and their rate as a share of a large tile's rate (small tiles
# reuse loaded data less).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
_SHORTEST_SPLIT = 2048  # shortest part of k, if a product with few tiles is split along k
_KERNEL_SECONDS = 2e-6  # gap between two kernels that are already queued
_ATTENTION_TOKENS = 512  # length at which attention has half its rate, because blocks on the diagonal are half masked
_ATTENTION_BACKWARD = 0.8  # rate of attention's backward / forward (Dao 2023, fig. 4 and 5; Shah et al. 2024)
_ATTENTION_WIDTH = 64  # attention has 80% of its rate at a head width of 64, and all of it at this much more
_BIASED = 0.6  # rate of attention with a bias / without, in the kernels of 2023 that supported a bias
_PLAIN_EAGER = 0.3  # share of unfused kernels' extra bytes that a model with LayerNorm and GELU has
_LOW_PEAK = {"nvfp4": "fp4"}
# Rates relative to one scale per tensor. Scales along k are applied between partial sums, outside the tensor cores:
# CUTLASS's row-wise kernels of 2024 reached about two thirds, kernels with scales per block (DeepSeek-AI 2024, V3,
# section 3.3.2) more. Later tensor cores apply block scales themselves.
_RECIPE_RATE = {"rowwise": 0.67, "blockwise": 0.85}
_NUMBER_BYTES = {"nvfp4": 0.5625}  # bytes of one number with its share of the scales


@dataclass(frozen=True)
class Rates:
    """The rates of one device with one software. matmul, attention: FLOP/s of large 16-bit products and of attention's
    forward. memory: bytes/s.

    low: FLOP/s of low-precision products, 0 if there are none. bytes_factor: bytes that elementwise work moves, divided
      by those of compiled kernels.
    depth: the k at which a 16-bit product reaches half its rate. units: number of multiprocessors; 0 for a TPU, which
      works as a single unit.
    number: bytes of a low-precision number. cast: bytes moved per number that is quantized.
    """

    matmul: float
    low: float
    attention: float
    memory: float
    bytes_factor: float
    depth: float
    units: int
    number: float
    cast: float


def rates_of(cluster: Cluster, software: Software, precision: str, constants: Constants, gated: bool = True) -> Rates:
    """Return the rates of a cluster's devices. The cluster must have a peak for `precision` (step_time.py checks it).

    gated: the model has RMSNorm, rotary positions and a gate, which take several operations each in an eager system;
      LayerNorm and GELU take one operation each.
    """
    peak, clock = cluster.peak_flops[precision], clock_share(cluster) * sustained_share(cluster, constants.throttle)
    best = cluster.matmul_efficiency * clock
    low = cluster.peak_flops.get(_LOW_PEAK.get(software.recipe, "fp8"), 0.0) if software.recipe else 0.0
    attention = cluster.attention_efficiency * constants.attention_share
    if software.biased_scores:
        attention *= _BIASED
    if software.attention == "tuned":
        attention = max(attention, constants.tuned_attention)
    eager = 1 + (constants.eager_bytes - 1) * (1.0 if gated else _PLAIN_EAGER)
    return Rates(
        matmul=peak * best * constants.matmul_share,
        low=low * best * constants.low_share * _RECIPE_RATE.get(software.recipe, 1.0),
        attention=peak * clock_share(cluster) * attention,
        memory=cluster.memory_bandwidth * constants.bandwidth_share,
        bytes_factor={"eager": eager, "compiled": 1.0, "tuned": constants.tuned_bytes}[software.kernels],
        depth=constants.tile_depth,
        units=0 if cluster.device == "tpu" else _multiprocessors(cluster.device_name),
        number=_NUMBER_BYTES.get(software.recipe, 1.0),
        cast=constants.cast_bytes * _cast_bytes(software),
    )


def clock_share(cluster: Cluster) -> float:
    """Return the clock of a card as a share of that of cards with the same peak and the highest power limit.

    Power grows with the cube of the clock (voltage grows with the clock), so the clock is proportional to the cube root
    of the power limit. The share is 1 if the limit is not known.
    """
    rated = _rated_watts(cluster.peak_flops.get("bf16", 0.0), cluster.matmul_efficiency)
    return min((cluster.watts / rated) ** (1 / 3), 1.0) if cluster.watts and rated else 1.0


def sustained_share(cluster: Cluster, throttle: float) -> float:
    """Return the sustained rate of a product as a share of its rate in a short test: 1 - throttle for devices with less
    than 1 W per TFLOP/s, otherwise 1.

    With each generation, peaks grew faster than power: an A100 has 1.28 W per TFLOP/s, an H100 0.71, a B200 0.44.
    Devices with little power per FLOP lower their clock under sustained load.
    """
    tera = cluster.peak_flops.get("bf16", 0.0) / 1e12
    return 1.0 if tera and cluster.watts >= tera else 1.0 - throttle


@cache
def _rated_watts(peak: float, efficiency: float) -> float:
    sisters = [d.watts for d in devices().values() if d.bf16 * 1e12 == peak and d.matmul_efficiency == efficiency]
    return max(sisters, default=0.0)


@cache
def _multiprocessors(device_name: str) -> int:
    device = find_device(device_name)
    found = [name for name in _MULTIPROCESSORS if device and device.key.startswith(name)]
    return _MULTIPROCESSORS[max(found, key=len)] if found else _TYPICAL_MULTIPROCESSORS


def _cast_bytes(software: Software) -> float:
    """Return the bytes that quantization moves per number of an input, without the producer's own reads and writes.

    tensorwise: two reads of 2 bytes (for the maximum, and to convert) and two writes of 1 byte (plain and transposed);
      hand-tuned kernels scale by earlier maxima inside the preceding kernel, and only write. rowwise: two sets of
      scales, along rows and along columns, each with its own passes. blockwise, mxfp8, nvfp4: one pass, which also
      writes the scales.
    """
    fused = software.kernels == "tuned"
    return {
        "": 0.0,
        "tensorwise": 2.0 if fused else 6.0,
        "rowwise": 6.0 if fused else 14.0,
        "blockwise": 4.0 if fused else 8.0,
        "mxfp8": 4.2 if fused else 8.4,
        "nvfp4": 3.5 if fused else 7.0,
    }[software.recipe]


@lru_cache(maxsize=65_536)
def product_seconds(rates: Rates, product: Product) -> float:
    """Return the seconds of one product, in low precision if software and product allow it. Casts of its inputs are not
    included.
    """
    low = product.low and rates.low > 0
    rate, number = (rates.low, rates.number) if low else (rates.matmul, 2.0)
    depth = rates.depth * (rate / rates.matmul)  # the start and end of a tile take the same time in any precision
    filled = tile_share(product, rates.units) * product.k / (product.k + depth)
    read = (product.m + product.n) * product.k * number
    moved = product.groups * (read + 2.0 * product.m * product.n)
    return max(product.flops / (rate * filled), moved / rates.memory) + _KERNEL_SECONDS


def tile_share(product: Product, units: int) -> float:
    """Return the share of the multiprocessors' work that is useful: tiles at the edges and the last wave of tiles are
    partly empty. The tile size with the best rate counts. units: number of multiprocessors, 0 for a TPU."""
    if units == 0:
        return _filled(product.m, 128) * _filled(product.n, 128) * _filled(product.k, 128)
    return max(_tile_share(product, rows, columns, units) * rate for rows, columns, rate in _TILES)


def _tile_share(product: Product, rows: int, columns: int, units: int) -> float:
    tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.groups
    if tiles < units:
        splits = max(min(units // tiles, int(product.k // _SHORTEST_SPLIT)), 1)
        waves = tiles * splits / units
    else:
        waves = tiles / units / math.ceil(tiles / units)
    return _filled(product.m, rows) * _filled(product.n, columns) * waves


def _filled(size: float, tile: int) -> float:
    return size / (math.ceil(size / tile) * tile)


def cast_seconds(rates: Rates, product: Product) -> float:
    """Return the seconds to quantize the inputs of one product. Two of the three products of a matrix (forward, two
    backward) use each quantized input, so half of its cost counts here.
    """
    if not product.low or not rates.low:
        return 0.0
    numbers = product.groups * (product.m + product.n) * product.k
    return numbers * rates.cast / 2 / rates.memory


def attention_seconds(rates: Rates, flops: float, tokens: float, width: int, *, backward: bool = False) -> float:
    """Return the seconds of flash attention. tokens: length of the part of the sequence on one rank, or of the window.
    width: head dimension. backward: use the lower rate of the backward.
    """
    narrow = min(1.0, 0.8 + 0.2 * (width - 64) / _ATTENTION_WIDTH) if width < 128 else min(1.0, 128 / width) ** 0.5
    rate = rates.attention * narrow * tokens / (tokens + _ATTENTION_TOKENS)
    return flops / (rate * (_ATTENTION_BACKWARD if backward else 1.0)) + _KERNEL_SECONDS


def moved_seconds(rates: Rates, moved_bytes: float) -> float:
    """Return the seconds of elementwise work. moved_bytes: the bytes that compiled kernels move (theory/work.py)."""
    return moved_bytes * rates.bytes_factor / rates.memory
