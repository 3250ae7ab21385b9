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
    window: float64 [2, guard.window], loss and log gradient norm of the last healthy steps, the newest at the end; NaN
    before them, which sorting puts at the end. count: int64, how many there were since the window began. Both are
    updated in place, and are the same on every rank.
    """

    def __init__(self, guard: Guard, device: torch.device | str, settled_after: int = 0):
        self.guard, self.settled_after, self.begins = guard, settled_after, frozenset[int]()
        self.window = torch.full((2, guard.window), math.nan, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        # A step is judged by many operations on few numbers, which cost as much as they are many: what does not change
        # is here, and what follows from the count alone is in a table.
        self._older, self._newer = self.window[:, :-1], self.window[:, 1:]
        level = min(guard.level, guard.window)
        self._level = self.window[:, -level:]
        held = torch.arange(guard.window + 1)
        values = torch.stack((held.clamp(max=level), held - 1), dim=1)  # those of the level, and the changes
        middle = (values - 1).clamp(min=0) // 2
        self._middles = middle.to(device, torch.int16)  # [count, kind]; as int64 it would take more than the window
        self._spreads = torch.tensor([[guard.loss_spread], [guard.norm_spread]], dtype=torch.float64, device=device)
        self._weights = torch.tensor([[float(bit)] for bit in KINDS], dtype=torch.float64, device=device)
        self._nothing = torch.zeros((), dtype=torch.float64, device=device)
        self._ready = max(guard.ready, 2)  # a single step has no noise
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._newest: tuple[Tensor, Tensor, Tensor] | None = None  # a loss, its norm, and their `_values`

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor, *, settled: bool = True) -> Tensor:
        """Return what is found in a step: float64 [4] = (bits of the kinds, deviations of the loss, of the norm, the
        norm in units of the median). loss, grad_norm: scalars, the same on every rank. settled: sizes are judged.
        """
        raw, values = _values(loss, grad_norm)
        self._newest = loss, grad_norm, values
        held = self.count.clamp(max=self.guard.window).view(1)
        of_level, of_changes = self._middles.index_select(0, held).long().view(2, 1, 1).expand(2, 2, 1).unbind()
        changes = self._newer - self._older
        deviation = changes.sub_(_median(changes, of_changes)).abs_()
        spread = _median(deviation, of_changes).mul_(_NOISE).maximum(self._spreads)
        distance = values - _median(self._level, of_level)
        sigmas, factor = distance / spread, distance[1:].exp()
        ready = self.count >= self._ready if settled else self._never
        finite = values == raw
        spikes = (sigmas > self.guard.sigmas).logical_and_(ready).logical_and_(finite)
        (finite_loss, _), (loss_spike, norm_spike) = finite.unbind(), spikes.unbind()
        corrupted = (factor >= self.guard.corruption_factor) & (norm_spike & (finite_loss > loss_spike))
        bits = torch.cat((~finite, spikes, corrupted)).double().mul_(self._weights).sum(dim=0, keepdim=True)
        judged = torch.where(ready, torch.cat((sigmas, factor)), self._nothing)
        return torch.cat((bits, judged)).view(4)

    @torch.no_grad()
    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Take a step into the window, unless its update was `skipped`."""
        newest, self._newest = self._newest, None
        judged = newest is not None and newest[0] is loss and newest[1] is grad_norm
        values = newest[2] if newest is not None and judged else _values(loss, grad_norm)[1]
        self.window.copy_(torch.where(skipped, self.window, torch.cat((self._newer, values), dim=1)))
        self.count.add_(~skipped)

    def forget(self) -> None:
        """Begin a new window: what was unusual before is the level now."""
        self.window.fill_(math.nan)
        self.count.zero_()

    def first_judged(self, step: int) -> int:
        """Return the first step whose sizes are judged if the window is as it is after `step`, and the steps after it
        are healthy. The host waits for the device."""
        return max(step + max(self._ready - int(self.count), 0), self.settled_after) + 1

    def values(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return losses and logarithms of the norms in the window, oldest first. The host waits for the device."""
        held = min(int(self.count), self.guard.window)
        losses, norms = self.window[:, self.guard.window - held :].tolist()
        return tuple(losses), tuple(norms)

    def restore(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Take over what `values` returned, also that of another size of the window."""
        held = min(len(losses), self.guard.window)
        self.forget()
        if held:
            values = torch.tensor([losses[-held:], norms[-held:]], dtype=torch.float64)
            self.window[:, self.guard.window - held :].copy_(values)
        self.count.fill_(held)


def _values(loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and logarithm of the norm, float64 [2, 1]: as they are, and with 0 for those that are not finite."""
    loss, norm = loss.double().reshape(1), norm.double().reshape(1)
    raw = torch.stack((loss, norm.clamp(min=_LEAST_NORM).log_()))
    return raw, raw.nan_to_num(0.0, 0.0, 0.0)


def _median(values: Tensor, middle: Tensor) -> Tensor:
    """Return the lower median of each row of `values` [2, n], as [2, 1], without those that are NaN. middle: its place
    in the sorted row, int64 [2, 1]."""
    return values.sort(dim=1).values.gather(1, middle)


def finding(judged: tuple[float, ...]) -> StepFinding | None:
    """Return what the four numbers of `StepJudge.judge` say; None if nothing was found."""
    bits, loss_sigmas, norm_sigmas, factor = judged
    kinds = tuple(name for bit, name in KINDS.items() if int(bits) & bit)
    return StepFinding(kinds, loss_sigmas, norm_sigmas, factor) if kinds else None


def without_overflow(numbers: StepNumbers) -> StepNumbers:
    """Return the numbers of a step of a run with a loss scale, without a finding that the scale explains."""
    found = numbers.finding
    return replace(numbers, finding=None) if found and set(found.kinds) == {KINDS[NORM_NOT_FINITE]} else numbers
