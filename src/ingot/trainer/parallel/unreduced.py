"""The contract of a reader of a rank's own gradients, before they are reduced (trainer/integrity/recompute.py,
samples.py)."""

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


class ReadableGradients(Protocol):
    """The data parallelism whose gradients are read. buffers_read: at most so many exchanges of each buffer, and the
    number of buffers."""

    buffers_read: tuple[int, int]

    def show_gradients(self, reader: GradientReader) -> None: ...
    def drop_gradients(self) -> None: ...
    def name_of(self, number: int, element: int) -> tuple[str, int | None]: ...
