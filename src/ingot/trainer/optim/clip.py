"""Gradient clipping by the global norm (Pascanu et al. 2013), without waiting for the device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.shard import ParameterShard


@torch.no_grad()
def gradient_norm(shards: Sequence[ParameterShard], world: int | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Return the Euclidean norm of the whole model's gradient, a scalar on the device, equal on all ranks. Collective.

    Each element counts once, on the rank that owns its shard. Squares are float32 (float64 for float64 masters); one
    all-reduce sums them over the default group. The order of summation is fixed by the layout, and so are the bits.
    world: the size of the default group; None looks it up; 1 skips the all-reduce. scale: the loss scale by which the
    gradients are multiplied; the norm is divided by it. A non-finite gradient makes the norm non-finite.
    """
    dtype, device = _dtype_and_device(shards)
    owned = [p.grad for p in shards if p.owner and p.grad is not None]
    square = torch.zeros((), dtype=dtype, device=device)
    if owned:
        square = torch.stack([torch.linalg.vector_norm(g, dtype=dtype) for g in owned]).square().sum()
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        dist.all_reduce(square)
    norm = square.sqrt()
    return norm if scale is None else norm / scale


def clip_factor(norm: Tensor, max_norm: float, *, scale: Tensor | None = None) -> Tensor | None:
    """Return the factor for the gradients, min(1, max_norm / norm) / scale; max_norm = 0 does not clip.

    None means the factor 1. scale: the loss scale. Pass the factor as `scale` to the optimizer's step, which multiplies
    in the dtype of the masters: in bfloat16 the factor and the product would be rounded to 8 bits.
    """
    if max_norm <= 0:
        return None if scale is None else scale.reciprocal()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # A loss scale is a power of two, so dividing the factor by it gives the same bits as dividing the gradients.
    return factor if scale is None else factor / scale


def _dtype_and_device(shards: Sequence[ParameterShard]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype of the squares and the device of the gradients.

    The masters have the same dtype on all ranks, even on ranks that own no element.
    """
    assert shards, "every rank holds shards, possibly empty"
    dtype = torch.promote_types(shards[0].value.dtype, torch.float32)
    return dtype, next((p.grad.device for p in shards if p.grad is not None), shards[0].value.device)
