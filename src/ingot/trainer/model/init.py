"""The first weights: a pure function of (seed, parameter name, position), so every layout and device has the same bits.

A matrix is drawn on the CPU in groups of rows. Each group has its own random stream, so a rank draws only the groups
that overlap its rows. (Random operations on a sharded tensor would draw the same rows on every CPU rank, and different
numbers on every layout.)

Scheme: matrices come from N(0, 0.02^2). The matrices that write into the residual stream (attention.o, and `down` of
every feed-forward and expert) have a deviation divided by sqrt(2 * num_layers), so that the variance of the stream does
not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Norm weights begin at 1, biases at 0, and expert loads at
1 (the mean load).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ingot.rng import derive
from ingot.schema.arch import Arch

DEVIATION = 0.02
RESIDUAL_WRITERS = ("attention.o.weight", ".down.weight")
BIAS = ".bias"
# The number of elements of one group of rows: a whole matrix of a small model, or 256 rows of width 4,096.
GROUP_ELEMENTS = 1 << 20


def initial_value(
    name: str,
    shape: Sequence[int],
    arch: Arch,
    seed: int,
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Return the first value of a parameter or buffer, or of one block of it: float32 on the CPU.

    shape: shape of the whole tensor. offsets, sizes: the position and shape of the block; by default the whole tensor.
    """
    offsets, sizes = offsets or (0,) * len(shape), shape if sizes is None else sizes
    if len(shape) == 1:
        return torch.full(tuple(sizes), 0.0 if name.endswith(BIAS) else 1.0)
    block = torch.empty(tuple(sizes))
    deviation = DEVIATION / (math.sqrt(2 * arch.num_layers) if name.endswith(RESIDUAL_WRITERS) else 1.0)
    (rows, columns), (first, left), (height, width) = shape, offsets, sizes
    group_rows = max(GROUP_ELEMENTS // columns, 1)
    for group in range(first // group_rows, -(-(first + height) // group_rows) if height else 0):
        start, stop = group * group_rows, min((group + 1) * group_rows, rows)
        generator = torch.Generator().manual_seed(derive(seed, "init", name, group))
        drawn = torch.empty(stop - start, columns).normal_(0.0, deviation, generator=generator)
        top, bottom = max(start, first), min(stop, first + height)
        block[top - first : bottom - first] = drawn[top - start : bottom - start, left : left + width]
    return block


@torch.no_grad()
def initialize(model: nn.Module, arch: Arch, seed: int) -> None:
    """Fill every parameter and buffer of `model` in place. The model is unsharded and not on the meta device."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(initial_value(name, tensor.shape, arch, seed))
