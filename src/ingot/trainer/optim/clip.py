"""Clipping by the global gradient norm (Pascanu et al. 2013), without waiting for the device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.trainer.optim.adamw import Piece


@torch.no_grad()
def gradient_norm(pieces: Sequence[Piece], world: int | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Euclidean norm of the whole model's gradient, a scalar on the device, the same on all ranks. Collective.

    Each element counts once: on the rank that owns its piece. The squares are summed over the default group in one
    all-reduce, left out when `world`, its size, is 1; None looks it up. Squares are float32, for float64 masters
    float64. A layout has one order of summation, and so always the same bits. scale: the loss scale that the gradients
    carry; the norm is that without it. A non-finite gradient shows in the norm.
    """
    dtype, device = _norm_place(pieces)
    owned = [p.grad for p in pieces if p.owner and p.grad is not None]
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
    """What to multiply gradients with: min(1, max_norm / norm), or 1 if max_norm is 0, over the loss scale they carry.

    None leaves them as they are. Low-precision gradients are best multiplied in the optimizer's step (`scale` there),
    after conversion: in bfloat16 the factor itself may be rounded to 8 bits, and the product is.
    """
    if max_norm <= 0:
        return None if scale is None else scale.reciprocal()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # A loss scale is a power of two: the factor of both has the same bits as one after the other.
    return factor if scale is None else factor / scale


def _norm_place(pieces: Sequence[Piece]) -> tuple[torch.dtype, torch.device]:
    """Masters have one dtype on all ranks, also on those that own nothing; gradients tell the device."""
    assert pieces, "every rank holds pieces, if only empty ones"
    dtype = torch.promote_types(pieces[0].value.dtype, torch.float32)
    return dtype, next((p.grad.device for p in pieces if p.grad is not None), pieces[0].value.device)
