"""`reduce = "canonical"`: the same gradient bits on 1, 2, 4, ... copies of the model.

Floating-point sums depend on their order. Here the order is fixed. The batch is divided into `virtual_ranks` equal
parts, a power of two; the micro-batches of a part are added one after the other, and the parts are added in a binary
tree, neighbors first. A rank that reads several parts adds their subtree alone; ranks then exchange sums with the rank
at distance 1, 2, 4, ... and add (a + b and b + a have the same bits). The cost: one buffer for each level of a rank's
subtree, and log2(copies) exchanges of whole gradients, where a ring sends 2 (n-1)/n of them. On a CPU, matrix products
with few rows also depend on the number of threads, so the launcher always gives a rank the number of threads that it
would have with the largest number of copies.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.trainer.mesh.collectives import started
from ingot.trainer.mesh.mesh import Mesh


class ReductionTree:
    """The sums of this rank's parts. sums: for each stage, pairs (level, buffers) of different levels, highest first.

    parts: the number of parts that this rank reads. micro_batches: the number of micro-batches of each part.
    done: the number of micro-batches done in this step, by stage.
    """

    def __init__(self, mesh: Mesh, micro_batches: int):
        self.mesh = mesh
        self.parts = mesh.parallel.virtual_ranks // mesh.size("dp_replicate")
        self.micro_batches = micro_batches // self.parts
        self.done: dict[nn.Module, int] = {}
        self.sums: dict[nn.Module, list[tuple[int, list[Tensor]]]] = {}

    def after_micro_batch(self, stage: nn.Module, buffers: list[Tensor]) -> None:
        """Count a micro-batch. At the end of a part, move the sum in `buffers` into the tree."""
        self.done[stage] = self.done.get(stage, 0) + 1
        if self.parts == 1 or self.done[stage] % self.micro_batches:
            return
        sums, level = self.sums.setdefault(stage, []), 0
        total = [buffer.clone() for buffer in buffers]
        while sums and sums[-1][0] == level:
            _, left = sums.pop()
            total, level = [a.add_(b) for a, b in zip(left, total, strict=True)], level + 1
        sums.append((level, total))

    def between_parts(self, stage: nn.Module) -> bool:
        """Return whether the next micro-batch begins a new part, for which the buffers start empty."""
        return self.parts > 1 and self.done[stage] % self.micro_batches == 0

    @torch.no_grad()
    def sum_parts(self, buffers: dict[nn.Module, list[Tensor]]) -> None:
        """Replace the contents of `buffers` by the sums over the parts that this rank read."""
        for stage, whole in buffers.items():
            if self.parts > 1:
                ((_, total),) = self.sums.pop(stage)
                for buffer, value in zip(whole, total, strict=True):
                    buffer.copy_(value)
        self.done.clear()

    @torch.no_grad()
    def sum_over_copies(self, buffer: Tensor) -> None:
        """Replace the contents of `buffer`, the sum of this rank's parts, by the sum over all copies of the model."""
        ranks, index, distance = self.mesh.ranks("dp_replicate"), self.mesh.index("dp_replicate"), 1
        other = torch.empty_like(buffer)
        while distance < len(ranks):
            peer, group = ranks[index ^ distance], self.mesh.group("dp_replicate")
            swap = [dist.P2POp(dist.isend, buffer, peer, group), dist.P2POp(dist.irecv, other, peer, group)]
            for work in [started(one, group, message=True) for one in dist.batch_isend_irecv(swap)]:
                work.wait()
            buffer.add_(other)
            distance *= 2
