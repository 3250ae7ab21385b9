"""The range of the gradient by layer, in runs whose training precision has a narrower one than float32.

Backward makes gradients in the training precision: what is smaller than its numbers becomes 0, what is larger infinite.
They are looked at where every layout has them, after they were summed, and before the update; with a loss scale, they
still have it. A sum is 0 if its parts are, so what is lost everywhere is seen, and what is lost in some micro-batches
is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.plugins.piece import ParameterShard
from ingot.trainer.mesh.collectives import gather_from

OUTSIDE = "outside of blocks"
_CHUNK = 2**22  # elements that are looked at together: bounds the memory of it
NEAR = 0.5  # of the largest number: the last binade


@dataclass(frozen=True)
class LayerRange:
    """The shares of the elements of a layer's gradient that are 0 or subnormal in the training precision, and that are
    half of its largest number or more."""

    layer: str
    underflow: float
    saturation: float


class GradientRange:
    """The measurement, every `every` steps. dtype: of the training precision. tied: the embedding is the head, too; if
    not, its gradient has zeros for all tokens that the batch lacks, and is not looked at.
    """

    def __init__(self, shards: Sequence[ParameterShard], layers: int, dtype: torch.dtype, every: int, *, tied: bool):
        names = {f"blocks.{layer}": layer for layer in range(layers)}
        self.every, self.names = every, [*names, OUTSIDE]
        looked_at = [shard for shard in shards if shard.owner and (tied or shard.name != "embed.weight")]
        self._shards = [
            (shard, names.get(".".join(shard.name.split(".")[:2]), layers))
            for shard in looked_at
            if shard.value.numel()
        ]
        finfo = torch.finfo(dtype)
        self._least, self._most = finfo.smallest_normal, finfo.max * NEAR
        self._counted: list[tuple[int, list[tuple[int, int]], Tensor | None]] = []

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Count, if it is due after `step`. Call when gradients are reduced; the host does not wait."""
        if step % self.every:
            return
        there = [(row, shard.grad) for shard, row in self._shards if shard.grad is not None]
        counts = torch.stack([self._count(gradient) for _, gradient in there]) if there else None
        self._counted.append((step, [(row, gradient.numel()) for row, gradient in there], counts))

    def _count(self, gradient: Tensor) -> Tensor:
        """Return int64 [2]: how many elements are too small, and too large."""
        found = []
        for part in gradient.reshape(-1).split(_CHUNK):
            size = part.abs()
            found.append(torch.stack(((size < self._least).sum(), (size >= self._most).sum())))
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def read(self) -> list[tuple[int, list[LayerRange]]]:
        """Return (step, its layers) of all that was counted since the last call. Collective if anything was; then the
        host waits for the device."""
        result = []
        for step, rows, counts in self._counted:
            table = np.zeros((len(self.names), 3))
            for (row, elements), count in zip(rows, [] if counts is None else counts.tolist(), strict=True):
                table[row] += (*count, elements)
            result.append((step, table))
        self._counted.clear()
        return [(step, self._layers(_sum_over_ranks(table))) for step, table in result]

    def _layers(self, table: np.ndarray) -> list[LayerRange]:
        return [
            LayerRange(name, small / elements, large / elements)
            for name, (small, large, elements) in zip(self.names, table.tolist(), strict=True)
            if elements
        ]


def _sum_over_ranks(table: np.ndarray) -> np.ndarray:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return table if world == 1 else gather_from(range(world), table).sum(0)
