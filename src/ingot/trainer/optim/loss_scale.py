"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), without waiting for the device."""

import torch
from torch import Tensor

INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
STATE = ("loss_scale", "loss_scale_good_steps")


class LossScale:
    """The factor that multiplies the loss before its backward; gradients are divided by it before their use (clip.py).

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
