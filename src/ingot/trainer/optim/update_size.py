"""The norm of the weights, and of an update, at log lines: their ratio shows whether the learning rate fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot.plugins.piece import ParameterShard

MOST_ELEMENTS = 2**22  # of a rank that are kept until the update has changed them: bounds the memory


class UpdateSize:
    """The sizes of the weights and of the update in each step that is a multiple of `every`.

    The update of every element is measured if this rank owns at most MOST_ELEMENTS of them. Otherwise each shard has
    evenly spaced elements, whose squares count for those between them.
    """

    def __init__(self, shards: Sequence[ParameterShard], every: int, most: int = MOST_ELEMENTS):
        self._owned = [shard for shard in shards if shard.owner and shard.value.numel()]
        self._stride = -(-sum(shard.value.numel() for shard in self._owned) // most) or 1
        self._every = every
        self._before: list[Tensor] = []
        self._square: Tensor | None = None

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """Keep elements, if `step` is measured. The host does not wait."""
        if step % self._every == 0:
            self._before = [self._sample(shard).clone() for shard in self._owned]

    @torch.no_grad()
    def after_update(self) -> None:
        """Measure the update of the elements that were kept. The host does not wait."""
        if self._before:
            squares = []
            for shard, before in zip(self._owned, self._before, strict=True):
                change = torch.linalg.vector_norm(self._sample(shard) - before).double().square()
                squares.append(change * (shard.value.numel() / before.numel()))
            self._square = torch.stack(squares).sum()
            self._before.clear()

    def _sample(self, shard: ParameterShard) -> Tensor:
        return shard.value.view(-1)[:: self._stride]

    @torch.no_grad()
    def read(self) -> tuple[float, float]:
        """Return the square of the norm of the weights that this rank owns, and that of the last measured update since
        the last call; NaN if there was none. To be summed over ranks. The host waits for the device."""
        weights = [torch.linalg.vector_norm(shard.value).double().square() for shard in self._owned]
        square, self._square = self._square, None
        total = float(torch.stack(weights).sum()) if weights else 0.0
        if square is None:
            return total, 0.0 if not self._owned else float("nan")
        return total, float(square)
