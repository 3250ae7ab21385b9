"""Sharded data parallelism: FSDP2 (ZeRO stage 3; Rajbhandari et al. 2020, Zhao et al. 2023).

Each rank keeps a part of every parameter, its gradient and its optimizer state. Parameters are gathered unit by unit
when they are needed, gradients are summed and scattered.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ingot.theory.memory import ONE_UNIT_PARAMETERS


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """bf16: float32 master shards, computation and gathers in bf16, gradients summed in float32.

    Inputs are not cast: tokens are integers, hidden states follow the weights, rotary tables have to stay float32.
    """
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def shard_data_parallel(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Make `model` (with `.blocks`, a ModuleDict) an FSDPModule in place, as one unit or as one per block."""
    policy = mixed_precision(precision)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters < ONE_UNIT_PARAMETERS:
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def is_one_unit(model: nn.Module) -> bool:
    return sum(isinstance(module, FSDPModule) for module in model.modules()) == 1


def before_backward(model: nn.Module, *, last: bool) -> None:
    """Say whether the coming backward is the last of its optimizer step. Gradients accumulate in float32 either way.

    One unit: micro-batches before the last add to whole float32 gradients on each rank, without any traffic, and the
    parameters stay gathered. Several units: whole gradients would not fit, so every micro-batch is summed over ranks
    and added to the float32 shards; the traffic hides behind the backward.
    """
    if isinstance(model, FSDPModule) and is_one_unit(model):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
