"""The contract of a reader of a rank's own gradients, before they are reduced (trainer/integrity/recompute.py)."""

from typing import Protocol

from torch import Tensor


class GradientReader(Protocol):
    """A reader of the gradients of one step on one rank.

    apart: the gradients belong to a batch of another rank: they are read and dropped, and not reduced.
    """

    @property
    def apart(self) -> bool: ...

    def take(self, number: int, gradients: Tensor) -> None:
        """Read the gradients of buffer `number`, on the stream on which they will be reduced."""
