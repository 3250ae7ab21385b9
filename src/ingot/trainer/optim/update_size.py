"""The norm of the weights, and of an update, at log lines: their ratio shows whether the learning rate fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot.plugins.piece import ParameterShard

MOST_ELEMENTS = 2**22  # of a rank that are kept until the update has changed them: bounds the memory
MOST_ON_HOST = 2**18  # the same if a GPU trains and its weights are in host memory: a copy of them keeps it waiting


class UpdateSize:
    """The sizes of the weights and of the update in each step that is a multiple of `every`.

    The update of every element is measured if this rank owns at most MOST_ELEMENTS of them. Otherwise each shard has
    evenly spaced elements, whose squares count for those between them. The weights are all counted, except where they
    are in host memory and a GPU trains: reading billions of them would keep it waiting for seconds. Then the same
    elements stand for all, to about 0.3%.

    device: the one that trains.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], every: int, most: int | None = None, device: torch.device | None = None
    ):
        self._owned = [shard for shard in shards if shard.owner and shard.value.numel()]
        on_gpu = device is not None and device.type != "cpu"
        self._is_sampled = on_gpu and any(shard.value.device.type == "cpu" for shard in self._owned)
        most = most or (MOST_ON_HOST if self._is_sampled else MOST_ELEMENTS)
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

    def _square_of_weights(self, shard: ParameterShard) -> Tensor:
        value = self._sample(shard) if self._is_sampled else shard.value
        return torch.linalg.vector_norm(value).double().square() * (shard.value.numel() / value.numel())

    def _sample(self, shard: ParameterShard) -> Tensor:
        return shard.value.view(-1)[:: self._stride]

    @torch.no_grad()
    def read(self) -> tuple[float, float]:
        """Return the square of the norm of the weights that this rank owns, and that of the last measured update since
        the last call; NaN if there was none. To be summed over ranks. The host waits for the device."""
        weights = [self._square_of_weights(shard) for shard in self._owned]
        square, self._square = self._square, None
        total = float(torch.stack(weights).sum()) if weights else 0.0
        if square is None:
            return total, 0.0 if not self._owned else float("nan")
        return total, float(square)
