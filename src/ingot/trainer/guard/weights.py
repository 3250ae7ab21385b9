"""Weights that updates do not change: at a learning rate of 0, or if the results of the optimizer are lost.

A few elements of the masters are compared at log lines. An update of AdamW moves each by about the learning rate, far
more than the spacing of float32 at their size, so a single one that changed is enough.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot.plugins.callback import StepNumbers
from ingot.plugins.piece import ParameterShard

_SHARDS, _ELEMENTS = 16, 16  # as many of a rank, evenly spaced, and as many elements of each


class WeightProbe:
    """Elements of this rank's masters, and since when they are the same."""

    def __init__(self, shards: Sequence[ParameterShard]):
        some = [shard.value for shard in shards if shard.value.numel()]
        some = some[:: max(len(some) // _SHARDS, 1)][:_SHARDS]
        # Views, made once: a master stays the same tensor for the whole run.
        self._parts = [one.view(-1)[:: max(one.numel() // _ELEMENTS, 1)][:_ELEMENTS] for one in some]
        self._before, self._updates, self._since = self._read(), 0, 0
        self._last = 0  # step of the last line

    def _read(self) -> Tensor:
        return torch.cat(self._parts).cpu() if self._parts else torch.empty(0)

    def look(self, line: Sequence[StepNumbers]) -> tuple[int, int]:
        """Return how many updates in a row, up to the steps of this line, changed nothing, and the step of the first.
        The host waits for the device."""
        now, made = self._read(), [numbers.step for numbers in line if not numbers.skipped]
        went_back = (
            bool(line) and line[0].step <= self._last
        )  # steps that are trained again give the same weights again
        self._last = line[-1].step if line else self._last
        if went_back or len(now) == 0 or not torch.equal(now, self._before):
            self._before, self._updates, self._since = now, 0, 0
        elif made:
            self._since = self._since or made[0]
            self._updates += len(made)
        return self._updates, self._since
