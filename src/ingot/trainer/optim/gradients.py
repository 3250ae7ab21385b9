"""Gradients between backward and update: clipping by their global norm (Pascanu et al. 2013), and dynamic loss scaling
for float16 (Micikevicius et al. 2018, section 3.2). Neither waits for the device.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.plugins.piece import ParameterShard
from ingot.trainer.torch_private import norms_of


@torch.no_grad()
def gradient_norm(shards: Sequence[ParameterShard], world: int | None = None, *, scale: Tensor | None = None) -> Tensor:
    """Return the Euclidean norm of the whole model's gradient, a scalar on the device, equal on all ranks. Collective.

    Each element counts once, on the rank that owns its shard. Squares are float32 (float64 for float64 masters); one
    all-reduce over the default group sums those of the ranks in float64. The order of summation is fixed by the layout,
    and so are the bits. world: the size of the default group; None looks it up; 1 skips the all-reduce. scale: the loss
    scale by which the gradients are multiplied; the norm is divided by it. A non-finite gradient makes the norm
    non-finite.
    """
    return gradient_norm_and_loss(shards, None, 0.0, world, scale=scale)[0]


@torch.no_grad()
def gradient_norm_and_loss(
    shards: Sequence[ParameterShard],
    loss: Tensor | None,
    share: float,
    world: int | None = None,
    *,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `gradient_norm` and the loss of the step, float64, both equal on all ranks, by one all-reduce. Collective.

    loss: of this rank's tokens. share: by which it counts in the loss of the step; 0 on ranks that read no tokens of
    their own, whose `loss` does not count, whatever it is.
    """
    dtype, device = _dtype_and_device(shards)
    owned = [p.grad for p in shards if p.owner and p.grad is not None]
    square = torch.zeros((), dtype=dtype, device=device)
    if owned:
        square = torch.stack(norms_of(owned, dtype)).square().sum()
    own = torch.zeros((), dtype=torch.float64, device=device)
    if loss is not None and share:
        own = loss.detach().to(device, torch.float64).reshape(()) * share
    if world is None:
        world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        sums = torch.stack((square.double(), own))
        dist.all_reduce(sums)
        square, own = sums[0].to(dtype), sums[1]
    norm = square.sqrt()
    return (norm if scale is None else norm / scale), own


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


# -- loss scale --


INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
STATE = ("loss_scale", "loss_scale_good_steps")


class LossScale:
    """The factor that multiplies the loss before its backward; gradients are divided by it before their use.

    scale: a float32 scalar on the device, always a power of two, so that scaling changes exponents only.
    good_steps: the number of finite steps since `scale` last changed, an int64 scalar. Both tensors are updated in
    place.
    """

    def __init__(self, device: torch.device | str, *, growth_interval: int = GROWTH_INTERVAL):
        self.growth_interval = growth_interval
        self.scale = torch.tensor(INIT_SCALE, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Halve the scale after a step that overflowed; double it after `growth_interval` finite steps in a row.

        found_inf: a scalar, 1 if the step overflowed; it must be the same on all ranks, as the gradient norm is.
        """
        overflow = found_inf.to(torch.bool).reshape(())
        good = torch.where(overflow, 0, self.good_steps + 1)
        grows = good >= self.growth_interval
        self.scale.mul_(torch.where(overflow, 0.5, torch.where(grows, 2.0, 1.0)))
        self.good_steps.copy_(torch.where(grows, 0, good))

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors for a checkpoint, which may be read and written between steps. All ranks have the
        same values."""
        return dict(zip(STATE, (self.scale, self.good_steps), strict=True))
