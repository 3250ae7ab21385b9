"""Clipping by the global gradient norm (Pascanu et al. 2013), without waiting for the device."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), in place; 0 only measures. Returns the norm, a scalar tensor.

    norm: Euclidean, over every element of every gradient on every rank. Sharded gradients (DTensor, each element on
    exactly one rank of its mesh) are measured by their local parts, and the squares are summed over the mesh. The
    norm stays on the device: nothing here waits for it, a non-finite one shows in the log of its interval.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norm = torch.nn.utils.get_total_norm(local)
    sharded = next((g for g in gradients if isinstance(g, DTensor)), None)
    if sharded is not None:
        square = norm.square()
        for axis in range(sharded.device_mesh.ndim):
            dist.all_reduce(square, group=sharded.device_mesh.get_group(axis))
        norm = square.sqrt()
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in local:
            gradient.mul_(scale)
    return norm
