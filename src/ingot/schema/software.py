"""The software of a training job as named properties, which decide its speed besides layout and hardware.

The same layout on the same GPUs differs by a factor of two between systems. The differences are written here, property
by property, so that a prediction never needs a factor of its own for one system.
"""

from dataclasses import dataclass
from typing import Literal

# Products in 8 or 4 bits, by the granularity of their scales; "" are 16-bit products.
Recipe = Literal["", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The properties of a training system; the defaults are ingot's own.

    kernels: of everything that is no matrix product: "eager" (one kernel per operation), "compiled" (fused by a
      compiler), "tuned" (fused by hand, with the vendor's library).
    attention: "flash" (Dao 2022; 2023) never writes scores; "tuned" neither, in kernels for the very generation of the
      device (Shah et al. 2024; cuDNN's of 2025); "unfused" writes and reads them, with a fused softmax.
    biased_scores: scores get a bias before softmax (ALiBi, Press et al. 2021), which flash kernels load or compute too.
    recipe: of low-precision matrix products.
    fused_gradients: products of weights' gradients are added to those of earlier micro-batches in the same kernel, in
      fp32; else in a separate kernel.
    graphs: kernels are started by recorded graphs, so that the host does not limit the device.
    overlap_data, overlap_tensor, overlap_pipeline: collectives of the axis overlap computation.
    overlap_experts: all-to-alls of experts overlap another micro-batch.
    rails: collectives between nodes use every network card of a node at once; else each ring has one card.
    dispatch_once: a token crosses the network once for all its experts in a domain of fast links (DeepSeek-AI 2024, V3,
      section 3.2.2).
    scatter_sends: tensor-parallel ranks each send a part of the data for the next pipeline stage (Narayanan et al.
      2021, section 4.1); else each sends all of it.
    dropout: masks are kept for the backward.
    core_recompute: "selective" recomputation means the attention core (Korthikanti et al. 2022, section 5), not ingot's
      form of it (theory/saved.py).
    products_recomputed: share of the matrix products that "selective" recomputation repeats; ingot's keeps all results.
    parts_recomputed: results of norms and activation functions, and of the up projections of latents, are always
      recomputed, in addition to whole blocks (Megatron-Core's recompute_modules); the cost is close to zero.
    loss: "chunked" never has all logits of a micro-batch (model/loss.py); "fused" has them and their gradient, "whole"
      also eager PyTorch's float32 copies of them (theory/memory.py).
    megatron_state: state of a parameter is 18 bytes undivided (16-bit weight, fp32 gradient, master and moments), or 6
      + 12 / ranks with a distributed optimizer.
    gathers_matrices: ZeRO-3 gathers single matrices, and reduces their gradients, not units of blocks (DeepSpeed's
      hooks of submodules; Rajbhandari et al. 2021).
    dropless: experts take all tokens; the host waits for their counts unless `graphs`.
    """

    name: str = "ingot"
    kernels: Literal["eager", "compiled", "tuned"] = "compiled"
    attention: Literal["flash", "tuned", "unfused"] = "flash"
    biased_scores: bool = False
    recipe: Recipe = ""
    fused_gradients: bool = False
    graphs: bool = False
    overlap_data: bool = True
    overlap_tensor: bool = False
    overlap_pipeline: bool = True
    overlap_experts: bool = False
    rails: bool = True
    dispatch_once: bool = False
    scatter_sends: bool = False
    dropout: bool = False
    core_recompute: bool = False
    products_recomputed: float = 0.0
    parts_recomputed: bool = False
    loss: Literal["chunked", "fused", "whole"] = "chunked"
    megatron_state: bool = False
    gathers_matrices: bool = False
    dropless: bool = True


INGOT = Software()
