"""What one rank owns of one parameter. Optimizer, clipping, checkpoints and offload see nothing else of a layout.

A parameter may be cut by tensor parallelism along one dim and by data parallelism along rows; what is left on a rank is
one rectangular block of the whole parameter. Pipeline stages hold different parameters. Ranks that hold the same block
(replicas) all update it; one of them, the owner, writes it and counts it.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Piece:
    """A block of the parameter `name`, whose whole shape is `shape`.

    offsets, sizes: of the block within the whole, one number per dim; a size may be 0 (more ranks than rows).
    value: the master copy of the block, shape `sizes`, float32 (float64 in a float64 run). An optimizer updates it in
      place; it keeps its identity for the whole run.
    grad: of the block, shape `sizes`, in the dtype gradients are kept in; set for each optimizer step, else None.
    owner: True on exactly one of the ranks that hold this block.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    value: Tensor
    owner: bool
    grad: Tensor | None = None

    @property
    def decays(self) -> bool:
        """Weight decay acts on matrices, not on norm weights."""
        return len(self.shape) >= 2
