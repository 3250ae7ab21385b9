"""How fast a device does what a block asks of it: products by their shape, attention, and bytes that are only moved.

No single efficiency: a product loses what its last tiles and its last wave leave empty, what a tile takes to start and
end (which a short k does not repay), and never beats its bytes through memory. What is left is a share of the best
rate that was ever measured on the device.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from ingot.planner.predict.time.constants import Constants
from ingot.planner.predict.time.matmuls import Product
from ingot.schema.cluster import Cluster
from ingot.schema.software import Software
from ingot.theory.devices import devices, find_device

# Processors that each work on one tile at a time, by the beginning of a device's key (vendors' data sheets).
_MULTIPROCESSORS = {
    "v100": 80, "a100": 108, "a800": 108, "a6000": 84, "a10": 72, "h100-pcie": 114, "h20": 78, "h": 132, "gh": 132,
    "b": 148, "gb": 148, "l40": 142, "rtx-4090": 128, "rtx4090": 128, "rtx-3090": 82, "rtx3090": 82, "mi250": 208,
    "mi3": 304, "mi355": 256,
}  # fmt: skip
_TYPICAL_MULTIPROCESSORS = 132
# Tiles that libraries choose among: rows, columns, and the share of a large tile's rate (it reuses what it loads less).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
_SHORTEST_SPLIT = 2048  # of k, where too few tiles are cut along it
_KERNEL_SECONDS = 2e-6  # between two kernels that are already queued
_ATTENTION_TOKENS = 512  # at which attention's blocks on the diagonal take as long as the others
_ATTENTION_BACKWARD = 0.8  # rate of its backward over its forward's (Dao 2023, figures 4 and 5; Shah et al. 2024)
_ATTENTION_WIDTH = 64  # of a head, beyond 64, at which attention has reached its rate but for a fifth
_BIASED = 0.6  # of the rate without a bias, in the kernels of 2023 that had one
_PLAIN_EAGER = 0.3  # of what unfused kernels move besides, in a model of LayerNorm and GELU
_LOW_PEAK = {"nvfp4": "fp4"}
# Scales along k are applied between partial sums, outside of the tensor cores: by rows CUTLASS's kernels of 2024
# reached about two thirds of the rate with one scale, by blocks (DeepSeek-AI 2024, V3, section 3.3.2) more; later cores
# do it themselves.
_RECIPE_RATE = {"rowwise": 0.67, "blockwise": 0.85}
_NUMBER_BYTES = {"nvfp4": 0.5625}  # of one number with its share of the scales


@dataclass(frozen=True)
class Rates:
    """Of one device under one software: FLOP/s of large products and of forward attention, bytes/s of memory.

    depth: k at which a 16-bit product reaches half of its rate. units: multiprocessors; 0: the device is one large
    one (TPU). low: 0 without low precision. cast: bytes moved per number of an input that is quantised.
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
    """gated: the model has RMSNorm, rotary positions and a gate, each several operations in an eager system; LayerNorm
    and GELU are one each. The cluster has a peak for `precision` (step_time.py asks before)."""
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
    """Of a card under a lower power limit than its sisters with the same peak: power grows with the third power of the
    clock (voltage follows it), so the clock with the cube root of the limit."""
    rated = _rated_watts(cluster.peak_flops.get("bf16", 0.0), cluster.matmul_efficiency)
    return min((cluster.watts / rated) ** (1 / 3), 1.0) if cluster.watts and rated else 1.0


def sustained_share(cluster: Cluster, throttle: float) -> float:
    """Of the rate that a product reaches in a short test. Peaks grew faster than power from generation to generation:
    an A100 has 1.28 W for each TFLOP/s, an H100 0.71, a B200 0.44, and clocks give way."""
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
    """Bytes moved per number that is quantised, in units of the reading that its producer would do anyway.

    tensorwise: read for the largest magnitude and again to convert, written as it is and transposed. Hand-tuned ones
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
    """Of one product on inputs that lie in memory. In low precision where the software has it, casts aside."""
    low = product.low and rates.low > 0
    rate, number = (rates.low, rates.number) if low else (rates.matmul, 2.0)
    depth = rates.depth * (rate / rates.matmul)  # the start and the end of a tile take the same time
    filled = tile_share(product, rates.units) * product.k / (product.k + depth)
    read = (product.m + product.n) * product.k * number
    moved = product.groups * (read + 2.0 * product.m * product.n)
    return max(product.flops / (rate * filled), moved / rates.memory) + _KERNEL_SECONDS


def tile_share(product: Product, units: int) -> float:
    """Of the work of whole waves of whole tiles, what is asked for; by the best of the tiles."""
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
    """Quantising both inputs of one of the three products of a matrix: a third of what all three need."""
    if not product.low or not rates.low:
        return 0.0
    numbers = product.groups * (product.m + product.n) * product.k
    return numbers * rates.cast / 2 / rates.memory


def attention_seconds(rates: Rates, flops: float, tokens: float, width: int, *, backward: bool = False) -> float:
    """Flash attention over sequences of `tokens` (those of one rank, or a window). width: of a head."""
    narrow = min(1.0, 0.8 + 0.2 * (width - 64) / _ATTENTION_WIDTH) if width < 128 else min(1.0, 128 / width) ** 0.5
    rate = rates.attention * narrow * tokens / (tokens + _ATTENTION_TOKENS)
    return flops / (rate * (_ATTENTION_BACKWARD if backward else 1.0)) + _KERNEL_SECONDS


def moved_seconds(rates: Rates, moved_bytes: float) -> float:
    """Of elementwise work: theory/work.py counts the bytes of compiled kernels."""
    return moved_bytes * rates.bytes_factor / rates.memory
