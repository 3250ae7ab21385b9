"""The judgment of a step before its update, on the device, without waiting for it.

A step is compared with the healthy steps before it: loss and logarithm of the gradient norm, each by its distance from
the median of the last few. The unit is the noise between two steps: 1.4826 times the median absolute deviation of their
differences, which is the standard deviation of normal values (Leys et al. 2013), by the square root of two. So neither
a spike nor a loss that falls fast makes the unit larger, as they would a standard deviation. Sums are float64, and both
values are equal on all ranks, so all ranks decide alike.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ingot.plugins.callback import StepFinding, StepNumbers
from ingot.schema.guard import Guard

_NOISE = 1.4826 / math.sqrt(2)  # 1.4826: 1 / the 75th percentile of the standard normal distribution
_LEAST_NORM = 1e-30  # a gradient of zeros has a logarithm, too

# The kinds of findings, as bits of one number.
LOSS_NOT_FINITE, NORM_NOT_FINITE, LOSS_SPIKE, NORM_SPIKE, CORRUPTION = 1, 2, 4, 8, 16
KINDS = {
    LOSS_NOT_FINITE: "loss not finite",
    NORM_NOT_FINITE: "gradient not finite",
    LOSS_SPIKE: "loss spike",
    NORM_SPIKE: "gradient spike",
    CORRUPTION: "suspected corruption",
}
NOT_FINITE = frozenset((KINDS[LOSS_NOT_FINITE], KINDS[NORM_NOT_FINITE]))


class StepJudge:
    """The window of healthy steps on the device, and the judgment by it.

    settled_after: up to this step, sizes are not judged: in and after the warm-up of the learning rate, losses fall and
    norms rise by several of their deviations in healthy runs, too. begins: the steps before which a new window begins,
    because the guard accepted a new level there.
    window: float64 [2, guard.window], loss and log gradient norm of the last healthy steps, the newest at the end.
    count: int64, how many of them there are. Both are updated in place, and are the same on every rank.
    """

    def __init__(self, guard: Guard, device: torch.device | str, settled_after: int = 0):
        self.guard, self.settled_after, self.begins = guard, settled_after, frozenset[int]()
        self.window = torch.zeros(2, guard.window, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._spreads = torch.tensor([guard.loss_spread, guard.norm_spread], dtype=torch.float64, device=device)
        self._places = torch.arange(guard.window, 0, -1, device=device)  # 1 is the newest

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, *, settled: bool = True) -> Tensor:
        """Return what is found in a step: float64 [4] = (bits of the kinds, deviations of the loss, of the norm, the
        norm in units of the median). loss, grad_norm: scalars, the same on every rank. settled: sizes are judged.
        """
        loss, norm = loss.double().reshape(()), grad_norm.double().reshape(())
        values = _values(loss, norm)
        recent = self.window
        empty = self._places > self.count
        level = min(self.guard.level, self.guard.window)
        median = _median(recent[:, -level:], empty[-level:], self.count.clamp(max=level))
        changes, unknown = recent.diff(dim=1), empty[:-1]
        number = (self.count - 1).clamp(min=0, max=self.guard.window - 1)
        deviation = (changes - _median(changes, unknown, number)).abs()
        spread = torch.maximum(_NOISE * _median(deviation, unknown, number), self._spreads[:, None])
        distance = values - median[:, 0]
        sigmas, factor = distance / spread[:, 0], distance[1].exp()
        ready = (self.count >= self.guard.ready) & settled
        loss_spike, norm_spike = ready & (sigmas > self.guard.sigmas)
        corrupted = norm_spike & (factor >= self.guard.corruption_factor) & ~loss_spike
        finite_loss, finite_norm = loss.isfinite(), norm.isfinite()
        bits = (
            ~finite_loss * LOSS_NOT_FINITE
            + ~finite_norm * NORM_NOT_FINITE
            + (finite_loss & loss_spike) * LOSS_SPIKE
            + (finite_norm & norm_spike) * NORM_SPIKE
            + (finite_loss & finite_norm & corrupted) * CORRUPTION
        )
        judged = torch.stack((sigmas[0], sigmas[1], factor))
        return torch.cat((bits.double().reshape(1), torch.where(ready, judged, 0.0)))

    @torch.no_grad()
    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Take a step into the window, unless its update was `skipped`."""
        values = _values(loss.double().reshape(()), grad_norm.double().reshape(()))
        moved = torch.cat((self.window[:, 1:], values[:, None]), dim=1)
        self.window.copy_(torch.where(skipped, self.window, moved))
        self.count.add_(~skipped)

    def forget(self) -> None:
        """Begin a new window: what was unusual before is the level now."""
        self.count.zero_()

    def first_judged(self, step: int) -> int:
        """Return the first step whose sizes are judged if the window is as it is after `step`, and the steps after it
        are healthy. The host waits for the device."""
        return max(step + max(self.guard.ready - int(self.count), 0), self.settled_after) + 1

    def values(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return losses and logarithms of the norms in the window, oldest first. The host waits for the device."""
        held = min(int(self.count), self.guard.window)
        losses, norms = self.window[:, self.guard.window - held :].tolist()
        return tuple(losses), tuple(norms)

    def restore(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Take over what `values` returned, also that of another size of the window."""
        held = min(len(losses), self.guard.window)
        if held:
            values = torch.tensor([losses[-held:], norms[-held:]], dtype=torch.float64)
            self.window[:, self.guard.window - held :].copy_(values)
        self.count.fill_(held)


def _values(loss: Tensor, norm: Tensor) -> Tensor:
    """Return loss and logarithm of the norm, float64 [2]; 0 for those that are not finite."""
    values = torch.stack((loss, norm.clamp(min=_LEAST_NORM).log()))
    return torch.where(values.isfinite(), values, 0.0)


def _median(values: Tensor, empty: Tensor, number: Tensor) -> Tensor:
    """Return the lower median of each row of `values` [2, n], as [2, 1], without the places that are `empty` [n].

    number: how many are left, int64.
    """
    middle = ((number - 1).clamp(min=0) // 2).expand(2, 1)
    return torch.where(empty, math.inf, values).sort(dim=1).values.gather(1, middle)


def finding(judged: tuple[float, ...]) -> StepFinding | None:
    """Return what the four numbers of `StepJudge.judge` say; None if nothing was found."""
    bits, loss_sigmas, norm_sigmas, factor = judged
    kinds = tuple(name for bit, name in KINDS.items() if int(bits) & bit)
    return StepFinding(kinds, loss_sigmas, norm_sigmas, factor) if kinds else None


def without_overflow(numbers: StepNumbers) -> StepNumbers:
    """Return the numbers of a step of a run with a loss scale, without a finding that the scale explains."""
    found = numbers.finding
    return replace(numbers, finding=None) if found and set(found.kinds) == {KINDS[NORM_NOT_FINITE]} else numbers
