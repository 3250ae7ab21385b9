"""Hashes of a sample of each rank's own gradients, by which the replay names one of two copies of the state.

A flipped bit of a weight changes the gradients that its rank computes from then on, and through their sum the weights
of the other copy one step later. When the steps are trained again from sound state, the rank that had the flip is the
one whose own gradients, before they are reduced, differ first from those that it computed the first time.

Each step hashes the first elements of every buffer of gradients, and the loss of the rank's own tokens: a changed
weight changes the last bits of gradients all over the model. The hashes stay on the device until there is damage.
"""

import numpy as np
import torch
from torch import Tensor

from ingot.trainer.integrity.hashing import BufferHasher, multipliers
from ingot.trainer.parallel.unreduced import GradientReader, ReadableGradients

SAMPLED = 1 << 14  # elements of a buffer
_REMEMBERED = 4096  # steps


class _Totals:
    """One hash for each of the last steps, on the device. steps: the step of each place, 0 without one."""

    def __init__(self, device: torch.device):
        self.values = torch.zeros(_REMEMBERED, dtype=torch.int64, device=device)
        self.steps = np.zeros(_REMEMBERED, dtype=np.int64)

    def put(self, step: int, total: Tensor) -> None:
        self.values[step % _REMEMBERED] = total
        self.steps[step % _REMEMBERED] = step


class GradientSamples:
    """The samples of this rank. data: shows its gradients, before they are reduced. other: another reader of them, to
    which all are passed on; while it reads those of another rank's batch, none are sampled."""

    def __init__(self, data: ReadableGradients, device: torch.device, other: GradientReader | None = None):
        exchanges, buffers = data.buffers_read
        self._other, self._hasher = other, BufferHasher(device)
        self._factors = multipliers(0, exchanges * buffers + 1).reshape(-1).tolist()
        self._buffers, self._exchanges = buffers, [0] * buffers
        self._sums = torch.zeros(buffers, dtype=torch.int64, device=device)
        self._now, self._before = _Totals(device), _Totals(device)
        data.show_gradients(self)

    @property
    def apart(self) -> bool:
        """True while the gradients belong to a batch of another rank."""
        return self._other is not None and self._other.apart

    def take(self, number: int, gradients: Tensor) -> None:
        """Hash the first elements of buffer `number`. Does not wait for the device."""
        if self._other is not None:
            self._other.take(number, gradients)
        if not self.apart:
            exchange, self._exchanges[number] = self._exchanges[number], self._exchanges[number] + 1
            factor = self._factors[exchange * self._buffers + number]
            self._sums[number] += self._hasher.hash(gradients.view(-1)[:SAMPLED]) * factor

    def reduced(self, step: int, loss: Tensor) -> None:
        """Take in that the gradients of `step` were reduced. loss: of this rank's tokens, a scalar."""
        own = loss.detach().to(torch.float32).view(torch.int32).to(self._sums.device, torch.int64)
        self._now.put(step, self._sums.sum() + own * self._factors[-1])
        self._sums.zero_()
        self._exchanges = [0] * self._buffers

    def replay(self) -> None:
        """Take in that the steps so far are trained again from sound state."""
        self._before, self._now = self._now, _Totals(self._sums.device)

    def first_difference(self, last: int) -> tuple[int, int]:
        """Return the first step up to `last` whose sample is another one now that it was trained again, 0 without one,
        and how many steps before it have the same sample. The host waits for the device."""
        both = (self._now.steps == self._before.steps) & (self._now.steps > 0) & (self._now.steps <= last)
        differs = both & (self._now.values != self._before.values).cpu().numpy()
        first = int(self._now.steps[differs].min()) if differs.any() else 0
        return first, int((both & ~differs & (self._now.steps < (first or last + 1))).sum())

    def of_step(self, step: int) -> Tensor:
        """Return the sample of `step`, one of the last that were reduced: an int64 scalar, a copy on the device."""
        return self._now.values[step % _REMEMBERED].clone()
