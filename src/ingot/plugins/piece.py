"""A rank's block of one parameter: all that the optimizer, clipping, checkpoints and offload know about the layout.

Tensor parallelism splits a parameter along one dim and data parallelism splits its rows, so a rank has one rectangular
block of the whole parameter. Pipeline stages have different parameters. Ranks that hold the same block (replicas) all
update it; one of them, the owner, saves it and counts it in the gradient norm.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ParameterShard:
    """A block of the parameter `name`, whose whole shape is `shape`.

    offsets, sizes: position and shape of the block in the whole; a size may be 0 (if there are more ranks than rows).
    value: the master copy of the block, contiguous, of shape `sizes`, float32 (float64 in a float64 run). An optimizer
      updates it in place; the tensor stays the same object for the whole run.
    owner: True on exactly one of the ranks that hold this block.
    grad: the gradient of the block, of shape `sizes`, on the device of `value` or of the parameters, possibly in a
      narrower dtype. Set for each optimizer step, otherwise None; the optimizer frees it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    value: "Tensor"
    owner: bool
    grad: "Tensor | None" = None

    @property
    def decays(self) -> bool:
        """True for matrices: weight decay does not act on norm weights."""
        return len(self.shape) >= 2


@dataclass(frozen=True)
class PlacedBlock:
    """The block of a parameter on the global rank `rank`."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter and its blocks on the ranks of one copy of the model, in the order of the ranks.

    shape: of the whole parameter. stack: the number of matrices that it stacks along its rows: experts, else 1.
    """

    shape: tuple[int, ...]
    stack: int
    blocks: tuple[PlacedBlock, ...]
