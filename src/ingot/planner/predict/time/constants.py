"""The few numbers of the time model that no data sheet states: fitted once, to all published runs together.

Each has a meaning of its own, a prior from what is known of hardware, and bounds beyond which it would mean nothing.
planner/fit.py moves them from the priors as far as published steps ask for; fitted.json has the result.
"""

import json
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any


def _fitted(prior: float, sigma: float, low: float, high: float) -> Any:
    """sigma: of the logarithm, how far the prior may be off. low, high: bounds."""
    return field(default=prior, metadata={"sigma": sigma, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Constants:
    """matmul_share: of the best measured rate of a 16-bit product, what large ones sustain inside of a step.
    throttle: what is lost of it where the power limit is below 1 W for each TFLOP/s of the 16-bit peak, or unknown.
    low_share: the same of products in 8 and 4 bits, of their own peak.
    tile_depth: k, in 16-bit numbers, whose multiplication takes as long as a tile's start and end.
    attention_share: of Cluster.attention_efficiency, what flash attention reaches in a step, forward.
    tuned_attention: share of the peak that kernels written for the very device reach, forward.
    bandwidth_share: of the memory's bandwidth, what elementwise kernels reach.
    eager_bytes, tuned_bytes: bytes that unfused and hand-fused kernels move, over those of compiled ones.
    cast_bytes: of low-precision products, bytes moved to quantise their inputs, over the least (efficiency.py).
    launch_share: of Cluster.op_seconds per operation, what a system without graphs takes of the host.
    link_share, network_share: of link and network bandwidth, what collectives of large messages reach.
    interference: of a collective beside computation, by how much of its time it slows that down.
    tensor_exposed: of tensor-parallel collectives that overlap products, the share that is waited for.
    expert_bytes: bytes moved to bring rows to experts and back, over the least.
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
    """What the package ships; the priors of those that fitted.json does not have."""
    source = resources.files("ingot.planner.predict.time").joinpath("fitted.json")
    if not source.is_file():
        return PRIOR
    values = json.loads(source.read_text(encoding="utf-8")).get("constants", {})
    known = {f.name for f in fields(Constants)}
    return Constants(**{name: float(value) for name, value in values.items() if name in known})
