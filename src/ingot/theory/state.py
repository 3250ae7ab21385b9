"""Bytes of training state that one rank keeps per parameter between optimizer steps (Rajbhandari et al. 2020, 3.1).

AdamW in mixed precision needs, per parameter, 2 B for the copy that computes, g B for its gradient (2 in bf16, 4 in
fp32), 4 B for the float32 master and 8 B for two moments: 16 B, or 18 B with fp32 gradients. Over the N ranks that
share one copy of a parameter, N = dp_shard x cp, and for routed experts dp_shard x cp x tp / ep:

    DDP (N = 1)   2 + g + 12      16 or 18
    ZeRO-1        2 + g + 12/N    4 + 12/N or 6 + 12/N     master and moments are split
    ZeRO-2        2 + (g + 12)/N  2 + 14/N or 2 + 16/N     gradients too
    ZeRO-3        16/N            no copy beside the float32 shards, and their gradients are float32 like them

In fp32 and fp64 the parameter is its own master, s = 4 or 8 B: no copy, gradients s, moments 2s.
"""

from dataclasses import dataclass

from ingot.schema.parallel import Parallel

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
STORED_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class State:
    """Bytes per parameter on one rank. copy: the one that computes, 0 where the master itself does."""

    copy: float
    gradient: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        return self.copy + self.gradient + self.master + self.moments


def state_per_parameter(parallel: Parallel, precision: str, ranks: int = 0) -> State:
    """On the device, of a resolved layout (theory/layout.py). ranks: N; 0: that of all but routed experts.

    Offloaded moments are in host memory or files; the masters stay. With `offload_parameters` the shards and their
    gradients are on the host too.
    """
    e, s, n = COMPUTE_BYTES[precision], STORED_BYTES[precision], ranks or parallel.shard_ranks
    g, moments = kept_gradient_bytes(parallel, precision), 0.0 if parallel.offload != "none" else 2 * s / n
    if parallel.zero == 3:
        return State(0.0, 0.0, 0.0, 0.0) if parallel.offload_parameters else State(0.0, s / n, s / n, moments)
    gradient = g / n if parallel.zero == 2 else g
    return State(e, gradient, s / n, moments) if e != s else State(0.0, gradient, s, moments)


def kept_gradient_bytes(parallel: Parallel, precision: str) -> int:
    """Of one gradient between micro-batches. FSDP2 (zero 3) keeps shards in the dtype of the master."""
    return STORED_BYTES[precision] if parallel.zero == 3 else sent_gradient_bytes(parallel, precision)


def sent_gradient_bytes(parallel: Parallel, precision: str) -> int:
    """Of one gradient on its way between data-parallel ranks."""
    return 2 if parallel.grads == "bf16" else STORED_BYTES[precision]
