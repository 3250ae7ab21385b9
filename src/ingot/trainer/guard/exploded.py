"""The largest loss of weights that are of any use. It needs no window of healthy steps, and holds with every preset. No
torch."""

import math
from collections.abc import Sequence
from itertools import takewhile

from ingot.plugins.callback import StepNumbers
from ingot.schema.guard import Guard


class LossLimit:
    """The judgment of the newest losses by guard.exploded_ratio.

    guard: None judges nothing. from_weights: the run began with the weights of a folder, which may have a large loss:
    the ratio is that to the first loss of the attempt then, if that is larger than a uniform guess.
    """

    def __init__(self, guard: Guard | None, vocab_size: int, *, from_weights: bool = False):
        self.ratio = guard.exploded_ratio if guard else 0.0
        self._limit = self._usual = guard.loss_limit(vocab_size) if guard else math.inf
        self._waits = from_weights  # for the first loss

    @property
    def guess(self) -> float:
        """The loss of a uniform guess, infinite without a limit."""
        return self._usual / self.ratio if self.ratio else math.inf

    def above(self, kept: Sequence[StepNumbers]) -> list[StepNumbers]:
        """Return the steps up to the last one of `kept` whose losses are all above the limit, oldest first; none if
        that of the last step is not. kept: steps of a log line whose updates were made."""
        if kept and self._waits:
            self._waits, self._limit = False, max(self._usual, self.ratio * kept[0].loss)
        return [*takewhile(lambda numbers: numbers.loss > self._limit, reversed(kept))][::-1]
