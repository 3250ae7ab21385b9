"""How a plain model becomes a distributed one: THE order, in one function."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ingot.parallel.data import shard_data_parallel
from ingot.schema.run import Train


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    train: Train,
    device: torch.device,
    initial_value: Callable[[str, torch.Size], Tensor],
) -> nn.Module:
    """Compile, shard, materialise and initialise `model`, built on the meta device. Returns it, changed in place.

    initial_value(name, whole shape) -> the whole parameter on the CPU. It must not depend on the rank: each rank cuts
    its own part from it, without communication.
    """
    # 1. Precision of what is stored: float32 masters, unless the run is a float64 proof.
    model.to(torch.float64 if train.precision == "fp64" else torch.float32)
    # 2. Compile, block by block: one graph serves all blocks, and FSDP's hooks stay outside of it.
    if should_compile(train, device):
        compile_blocks(model)
    # 3. Shard parameters, gradients and optimizer state over the data-parallel ranks; compute precision is set here.
    shard_data_parallel(model, mesh, train.precision)
    # 4. Memory for this rank's parts, and their first values.
    model.to_empty(device=device)
    fill(model, initial_value)
    return model


def should_compile(train: Train, device: torch.device) -> bool:
    """ "auto" compiles on a GPU. On a CPU the compiler takes minutes and wins nothing at the sizes a CPU trains."""
    return train.compile == "on" or (train.compile == "auto" and device.type == "cuda")


def compile_blocks(model: nn.Module) -> None:
    for block in model.get_submodule("blocks").children():
        block.compile()
    cross_entropy = model.get_submodule("cross_entropy")
    cross_entropy.piece = torch.compile(cross_entropy.piece)  # pyright: ignore[reportArgumentType, reportCallIssue]


@torch.no_grad()
def fill(model: nn.Module, value: Callable[[str, torch.Size], Tensor]) -> None:
    """Set every parameter from `value(name, whole shape)`; of a sharded one, the part that this rank owns."""
    for name, parameter in model.named_parameters():
        whole = value(name, parameter.shape).to(parameter.device, parameter.dtype)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has the whole value, nothing is sent.
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        else:
            parameter.copy_(whole)
