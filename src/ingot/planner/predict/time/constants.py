"""The constants of the time model that no data sheet states, fitted to all published runs together, and the error band.

Each constant has its own meaning, a prior from knowledge of the hardware, and bounds outside which it would have no
meaning. planner/published/fit.py fits them to published step times; fitted.json has the result.
"""

import json
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any


def _fitted(prior: float, sigma: float, low: float, high: float) -> Any:
    """Return a field for a constant. sigma: standard deviation of the prior's logarithm. low, high: its bounds."""
    return field(default=prior, metadata={"sigma": sigma, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of the time model.

    matmul_share: share of the best measured rate of 16-bit products that large products sustain in a training step.
    throttle: share of that rate that is lost if the power limit is unknown or below 1 W per TFLOP/s of the 16-bit
      peak.
    low_share: like matmul_share, for products in 8 and 4 bits, relative to their own peak.
    tile_depth: the k, in 16-bit numbers, whose multiplication takes as long as a tile's start and end.
    attention_share: share of Cluster.attention_efficiency that flash attention's forward reaches in a training step.
    tuned_attention: share of the peak that attention's forward reaches in kernels written for this device.
    bandwidth_share: share of the memory bandwidth that elementwise kernels reach.
    eager_bytes, tuned_bytes: bytes that unfused and hand-fused kernels move, divided by those of compiled kernels.
    cast_bytes: bytes that quantization of products' inputs moves, divided by the minimum (efficiency.py, _cast_bytes).
    launch_share: host time per operation without CUDA graphs, divided by Cluster.op_seconds.
    link_share, network_share: shares of the link and the network bandwidth that collectives of large messages reach.
    interference: slow-down of computation by a concurrent collective, as a share of the collective's time.
    tensor_exposed: share of tensor-parallel collectives that remains exposed if they overlap with products.
    expert_bytes: bytes moved to gather rows for experts and scatter them back, divided by the minimum.
    """

    matmul_share: float = _fitted(0.93, 0.05, 0.6, 1.0)
    throttle: float = _fitted(0.08, 0.4, 0.01, 0.3)
    low_share: float = _fitted(0.80, 0.10, 0.5, 1.0)
    tile_depth: float = _fitted(150.0, 0.5, 16.0, 1000.0)
    attention_share: float = _fitted(1.0, 0.15, 0.5, 1.6)
    tuned_attention: float = _fitted(0.5, 0.15, 0.3, 0.8)
    bandwidth_share: float = _fitted(0.8, 0.1, 0.5, 0.95)
    eager_bytes: float = _fitted(1.8, 0.25, 1.0, 4.0)
    tuned_bytes: float = _fitted(0.8, 0.2, 0.4, 1.2)
    cast_bytes: float = _fitted(1.0, 0.3, 0.3, 4.0)
    launch_share: float = _fitted(1.5, 0.4, 0.2, 5.0)
    link_share: float = _fitted(0.75, 0.1, 0.4, 0.95)
    network_share: float = _fitted(0.85, 0.1, 0.4, 0.98)
    interference: float = _fitted(0.2, 0.5, 0.02, 0.8)
    tensor_exposed: float = _fitted(0.45, 0.4, 0.05, 1.0)
    expert_bytes: float = _fitted(1.5, 0.4, 0.5, 6.0)


PRIOR = Constants()


@cache
def fitted() -> Constants:
    """Return the constants that the package ships. A constant that is not in fitted.json has its prior."""
    source = resources.files("ingot.planner.predict.time").joinpath("fitted.json")
    if not source.is_file():
        return PRIOR
    values = json.loads(source.read_text(encoding="utf-8")).get("constants", {})
    known = {f.name for f in fields(Constants)}
    return Constants(**{name: float(value) for name, value in values.items() if name in known})


@cache
def error_ratios() -> tuple[float, float]:
    """Return (low, high): measured / predicted step time is between these for 80% of the published rows. Each row is
    predicted with a fit to all families but its own (planner/published/fit.py).

    Both are 1.0 if there is no fit.
    """
    source = resources.files("ingot.planner.predict.time").joinpath("fitted.json")
    if not source.is_file():
        return 1.0, 1.0
    low, high = json.loads(source.read_text(encoding="utf-8"))["band"]
    return float(low), float(high)


def error_band(seconds: float) -> tuple[float, float]:
    """Return the error band (low, high), in seconds, of a step that is predicted to take `seconds`."""
    low, high = error_ratios()
    return low * seconds, high * seconds
