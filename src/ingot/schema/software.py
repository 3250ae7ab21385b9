"""The properties of a training system that, besides layout and hardware, decide its speed.

The same layout on the same GPUs is up to twice as fast in one system as in another. These properties describe the
differences, so that a prediction never needs a correction factor for a particular system.
"""

from dataclasses import dataclass
from typing import Literal

from ingot.ranges import Share

# Matrix products in 8 or 4 bits, by the granularity of their scales; "": 16-bit products.
Recipe = Literal["", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The properties of a training system; the defaults are ingot's own.

    kernels: kernels of everything except matrix products: "eager" (one kernel per operation), "compiled" (fused by a
      compiler), "tuned" (fused by hand, with the vendor's library).
    attention: "flash" (Dao 2022; 2023) never writes scores to memory; nor does "tuned", whose kernels are written for
      the device's generation (Shah et al. 2024; cuDNN's of 2025); "unfused" writes and reads them, with fused softmax.
    biased_scores: scores get a bias before softmax (ALiBi, Press et al. 2021), which flash kernels load or compute too.
    recipe: number format of low-precision matrix products.
    fused_gradients: the kernel that computes a weight's gradient also adds it, in fp32, to the sum over earlier
      micro-batches; else a separate kernel adds it.
    graphs: recorded graphs (CUDA graphs) start the kernels, so that the host does not limit the device.
    overlap_data, overlap_tensor, overlap_pipeline: communication of this axis overlaps computation.
    overlap_experts: the experts' all-to-alls overlap the computation of another micro-batch.
    rails: collectives between nodes use all network cards of a node at once; else each ring has one card.
    dispatch_once: a token crosses the network only once for all its experts in the same domain of fast links
      (DeepSeek-AI 2024, V3, section 3.2.2).
    scatter_sends: each tensor-parallel rank sends only its part of the data for the next pipeline stage (Narayanan et
      al. 2021, section 4.1); else each sends all of the data.
    dropout: there is dropout, whose masks are kept for the backward.
    core_recompute: "selective" recomputes the core of attention (Korthikanti et al. 2022, section 5), unlike ingot's
      "selective" (theory/saved.py).
    products_recomputed: share of the matrix products that "selective" computes again; ingot keeps all their results.
    parts_recomputed: results of norms, of activation functions and of the up projections of latents are always
      recomputed, besides whole blocks (Megatron-Core's recompute_modules); this costs almost no time.
    loss: "chunked" never has all logits of a micro-batch (model/loss.py); "fused" has all logits and their gradient;
      "whole" also has eager PyTorch's float32 copies of them (theory/memory.py).
    megatron_state: a parameter needs 18 bytes of state (16-bit weight, fp32 gradient, master and moments), or 6 + 12 /
      ranks with a distributed optimizer.
    gathers_matrices: ZeRO-3 gathers and reduces single matrices instead of units of blocks (DeepSpeed's hooks of
      submodules; Rajbhandari et al. 2021).
    dropless: experts take all tokens; unless `graphs`, the host waits for the numbers of tokens.
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
    products_recomputed: Share = 0.0
    parts_recomputed: bool = False
    loss: Literal["chunked", "fused", "whole"] = "chunked"
    megatron_state: bool = False
    gathers_matrices: bool = False
    dropless: bool = True


INGOT = Software()
