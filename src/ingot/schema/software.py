"""The software that runs a training job, as properties with names: what decides its speed besides layout and hardware.

The same layout on the same GPUs differs by a factor of two between systems. What differs is written here, property by
property, so that a prediction never needs a factor of its own for one system.
"""

from dataclasses import dataclass
from typing import Literal

# Products in 8 or 4 bits, by the granularity of their scales; "" are 16-bit products.
Recipe = Literal["", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """ingot's own by default.

    kernels: of everything that is no matrix product: "eager" (one kernel per operation), "compiled" (fused by a
      compiler), "tuned" (fused by hand, with the vendor's library).
    attention: "flash" (Dao 2022) never writes scores; "unfused" writes and reads them, with a fused softmax.
    recipe: of low-precision matrix products.
    graphs: kernels are started by recorded graphs, so that the host does not limit the device.
    overlap_data, overlap_tensor, overlap_pipeline: collectives of the axis run beside computation.
    overlap_experts: all-to-alls of experts too.
    dropout: masks are kept for the backward.
    core_recompute: "selective" recomputation means the attention core (Korthikanti et al. 2022, section 5), not what
      ingot means by it (theory/activations.py).
    megatron_state: state of a parameter is 18 bytes undivided (16-bit weight, fp32 gradient, master and moments), or
      6 + 12 / ranks with a distributed optimizer.
    dropless: experts take all tokens; the host waits for their counts unless `graphs`.
    """

    name: str = "ingot"
    kernels: Literal["eager", "compiled", "tuned"] = "compiled"
    attention: Literal["flash", "unfused"] = "flash"
    recipe: Recipe = ""
    graphs: bool = False
    overlap_data: bool = True
    overlap_tensor: bool = False
    overlap_pipeline: bool = True
    overlap_experts: bool = False
    dropout: bool = False
    core_recompute: bool = False
    megatron_state: bool = False
    dropless: bool = True


INGOT = Software()
