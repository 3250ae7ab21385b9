"""The matrix products of a stage with their shapes, and how fast a device does them, attention, and byte-moving work.

There is no single efficiency. A product loses what its last tiles and its last wave leave empty, and the start and end
of each tile (which a short k does not repay), and it is never faster than its bytes through memory. What is left is a
share of the best rate ever measured on the device.

The operations of the products sum to those of theory/work.py. A product [m, k] x [k, n] of the forward has two of the
same size in the backward: for its inputs [m, n] x [n, k], for its weights [n, m] x [m, k]. Projections with the same
input are one product, as in all tuned systems.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ingot.planner.predict.time.constants import Constants
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.software import Software
from ingot.theory.devices import devices, find_device
from ingot.theory.layout import PipelineStage, Position
from ingot.theory.params import value_width


@dataclass(frozen=True, slots=True)
class Product:
    """`groups` products of [m, k] and [k, n] that are started together.

    what: a name like "q, k, v". low: the product may run in low precision.
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
        """The product of the backward for the inputs."""
        return replace(self, n=self.k, k=self.n)

    @property
    def for_weights(self) -> "Product":
        """The product of the backward for the weights."""
        return replace(self, m=self.n, n=self.k, k=self.m)


def total_flops(products: Iterable[Product]) -> float:
    return sum(product.flops for product in products)


def block_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Return the forward products of one block, with or without experts.

    Ranks of tensor parallelism share heads and widths; each computes all latents, and routes its own tokens.
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


def _latent(arch: Arch, heads: float, m: float) -> Iterator[Product]:
    mla = arch.mla
    yield Product("latents", m, mla.q_rank + mla.kv_rank + mla.rope_dim, arch.d_model)
    yield Product("q up", m, heads * arch.head_dim, mla.q_rank or arch.d_model)
    yield Product("k, v up", m, heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)


def _pair(arch: Arch, what: str, rows: float, width: float, groups: int = 1) -> Iterator[Product]:
    """Yield the products of a feed-forward: gate and up, or up alone; then down."""
    yield Product(f"gate, up{what}", rows, (arch.ffn_matrices - 1) * width, arch.d_model, groups)
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
    overflow = routed * moe.top_k - position.assignments
    if moe.has_fallback and overflow > 0:
        yield from _pair(arch, " of overflow", overflow, moe.d_expert)
    if moe.shared_experts:
        yield from _pair(arch, " shared", position.tokens, moe.shared_experts * moe.d_expert / parallel.tp)


def repeated_products(position: Position, experts: bool) -> tuple[Product, ...]:
    """Return the products that the backward of a recomputed block runs again, as theory/work.py counts them.

    With "full", all but the last; with "selective", those whose results tensor parallelism sums over ranks, or none
    where "selective" means the attention core. If software.products_recomputed is set, that share of each product.
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
    """Return the product that makes the logits of one micro-batch, always in 16 bits."""
    arch = position.arch
    return Product("head", position.tokens, arch.vocab_size / position.parallel.tp, arch.d_model, low=False)


@dataclass(frozen=True)
class StageProducts:
    """The products of one micro-batch on one stage, each with its number of runs."""

    forward: tuple[tuple[Product, int], ...]
    inputs: tuple[tuple[Product, int], ...]
    weights: tuple[tuple[Product, int], ...]

    @property
    def flops(self) -> tuple[float, float, float]:
        """FLOPs of (forward, backward for the inputs, backward for the weights)."""
        parts = (self.forward, self.inputs, self.weights)
        forward, inputs, weights = (sum(p.flops * count for p, count in part) for part in parts)
        return forward, inputs, weights


def stage_products(position: Position, stage: PipelineStage) -> StageProducts:
    """Return the products of a stage. The loss computes its gradients in the forward; recomputed products count with
    the backward for the inputs.
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


# Multiprocessors, which each work on one tile at a time, by the beginning of a device's key (vendors' data sheets).
_MULTIPROCESSORS = {
    "v100": 80, "a100": 108, "a800": 108, "a6000": 84, "a10": 72, "h100-pcie": 114, "h20": 78, "h": 132, "gh": 132,
    "b": 148, "gb": 148, "l40": 142, "rtx-4090": 128, "rtx4090": 128, "rtx-3090": 82, "rtx3090": 82, "mi250": 208,
    "mi3": 304, "mi355": 256,
}  # fmt: skip
_TYPICAL_MULTIPROCESSORS = 132
# Tiles that libraries choose among: rows, columns, and the share of a large tile's rate (small tiles reuse loads less).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
_SHORTEST_SPLIT = 2048  # shortest part of k, where too few tiles are split along k
_KERNEL_SECONDS = 2e-6  # between two kernels that are already queued
_ATTENTION_TOKENS = 512  # at which attention's blocks on the diagonal take as long as the others
_ATTENTION_BACKWARD = 0.8  # rate of attention's backward over its forward (Dao 2023, fig. 4 and 5; Shah et al. 2024)
_ATTENTION_WIDTH = 64  # head width beyond 64 at which attention has gained the last fifth of its rate
_BIASED = 0.6  # rate with a bias over the rate without, in the kernels of 2023 that had one
_PLAIN_EAGER = 0.3  # share of the extra bytes of unfused kernels in a model of LayerNorm and GELU
_LOW_PEAK = {"nvfp4": "fp4"}
# Scales along k are applied between partial sums, outside of the tensor cores: by rows CUTLASS's kernels of 2024
# reached about two thirds of the rate with one scale, by blocks (DeepSeek-AI 2024, V3, section 3.3.2) more; later cores
# apply scales themselves.
_RECIPE_RATE = {"rowwise": 0.67, "blockwise": 0.85}
_NUMBER_BYTES = {"nvfp4": 0.5625}  # bytes of one number with its share of the scales


@dataclass(frozen=True)
class Rates:
    """The rates of one device under one software: FLOP/s of large products and of forward attention, bytes/s of memory.

    low: FLOP/s in low precision, 0 without. bytes_factor: bytes moved over those of compiled kernels.
    depth: k at which a 16-bit product reaches half of its rate. units: multiprocessors; 0: the device is one large one
      (TPU).
    number: bytes of a low-precision number. cast: bytes moved per number of an input that is quantized.
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
    """Return the rates of a cluster's devices. The cluster has a peak for `precision` (step_time.py checks that first).

    gated: the model has RMSNorm, rotary positions and a gate, each several operations in an eager system; LayerNorm and
      GELU are one operation each.
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
    """Return the clock of a card under a lower power limit, as a share of the clock of other cards with the same peak.

    Power grows with the third power of the clock (voltage follows the clock), so the clock grows with the cube root of
    the limit.
    """
    rated = _rated_watts(cluster.peak_flops.get("bf16", 0.0), cluster.matmul_efficiency)
    return min((cluster.watts / rated) ** (1 / 3), 1.0) if cluster.watts and rated else 1.0


def sustained_share(cluster: Cluster, throttle: float) -> float:
    """Return the sustained rate of a product as a share of its rate in a short test.

    Peaks grew faster than power from generation to generation: an A100 has 1.28 W per TFLOP/s, an H100 0.71, a B200
      0.44, and clocks drop.
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
    """Return the bytes moved per number that is quantized, beyond the reading that its producer would do anyway.

    tensorwise: read for the largest magnitude and again to convert, written in place and transposed. Hand-tuned kernels
      scale by earlier maxima inside of the kernel before, and only write. rowwise: two sets of scales, along rows and
      along columns, each with its own passes. Blocks of 128 or 32 numbers need one pass, which writes scales too.
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
    """Return the seconds of one product whose inputs are in memory, casts left out; in low precision where the
    software has it.
    """
    low = product.low and rates.low > 0
    rate, number = (rates.low, rates.number) if low else (rates.matmul, 2.0)
    depth = rates.depth * (rate / rates.matmul)  # the start and the end of a tile take the same time at any rate
    filled = tile_share(product, rates.units) * product.k / (product.k + depth)
    read = (product.m + product.n) * product.k * number
    moved = product.groups * (read + 2.0 * product.m * product.n)
    return max(product.flops / (rate * filled), moved / rates.memory) + _KERNEL_SECONDS


def tile_share(product: Product, units: int) -> float:
    """Return the useful share of whole waves of whole tiles, for the best of the tiles."""
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
    """Return the seconds to quantize both inputs of one of a matrix's three products: a third of the casts of all
    three.
    """
    if not product.low or not rates.low:
        return 0.0
    numbers = product.groups * (product.m + product.n) * product.k
    return numbers * rates.cast / 2 / rates.memory


def attention_seconds(rates: Rates, flops: float, tokens: float, width: int, *, backward: bool = False) -> float:
    """Return the seconds of flash attention over sequences of `tokens` (of one rank, or of a window). width: of a
    head.
    """
    narrow = min(1.0, 0.8 + 0.2 * (width - 64) / _ATTENTION_WIDTH) if width < 128 else min(1.0, 128 / width) ** 0.5
    rate = rates.attention * narrow * tokens / (tokens + _ATTENTION_TOKENS)
    return flops / (rate * (_ATTENTION_BACKWARD if backward else 1.0)) + _KERNEL_SECONDS


def moved_seconds(rates: Rates, moved_bytes: float) -> float:
    """Return the seconds of elementwise work; moved_bytes counts compiled kernels (theory/work.py)."""
    return moved_bytes * rates.bytes_factor / rates.memory
