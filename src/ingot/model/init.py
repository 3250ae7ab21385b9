"""The first weights: a pure function of (seed, parameter name), the same on any number of ranks and on any device.

Every parameter is drawn whole, on the CPU, from its own random stream; each rank then keeps the part it owns. (Random
operations on a sharded tensor draw the same rows on every rank on CPU, and other numbers for every layout.)

Scheme: matrices from N(0, 0.02^2); the matrices that write into the residual stream (attention.o, mlp.down) have their
deviation divided by sqrt(2 * num_layers), so that its variance does not grow with depth (Radford et al. 2019, GPT-2,
section 2.3). Norm weights are 1.
"""

import math

import torch
from torch import Tensor, nn

from ingot.rng import derive
from ingot.schema.arch import Arch

DEVIATION = 0.02
RESIDUAL_WRITERS = ("attention.o.weight", "mlp.down.weight")


def initial_value(name: str, shape: torch.Size, arch: Arch, seed: int) -> Tensor:
    """The whole parameter `name` as float32 on the CPU."""
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = DEVIATION / (math.sqrt(2 * arch.num_layers) if name.endswith(RESIDUAL_WRITERS) else 1.0)
    generator = torch.Generator().manual_seed(derive(seed, "init", name))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, arch: Arch, seed: int) -> None:
    """Fill every parameter of an undivided, materialised `model` in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, arch, seed))
