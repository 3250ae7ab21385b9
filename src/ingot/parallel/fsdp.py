"""ZeRO-3: parameters, gradients and optimizer state are split; PyTorch's FSDP2 (Zhao et al. 2023) gathers each unit
when it is needed, forward and backward, and scatters its gradients.

With dp_replicate > 1 it is HSDP: split within a group of dp_shard ranks, copied across groups. A rank's shards are the
float32 masters: between steps there is no other copy of the parameters. Copies meet once per step: until then FSDP2
keeps the sum of a step's shards of gradients on the device, in the dtype they are sent in.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ingot.dist.mesh import Mesh
from ingot.parallel.piece import Piece
from ingot.parallel.tensor import Cut
from ingot.parallel.units import cut_units, own_rows
from ingot.parallel.zero import is_owner


def shard_stage(stage: nn.Module, mesh: Mesh, compute: torch.dtype, grads: torch.dtype, device: torch.device) -> None:
    """Make `stage`, on the meta device, an FSDPModule in place.

    Inputs are not cast: tokens are integers, hidden states follow the weights, rotary tables have to stay float32.
    """
    settings = mesh.parallel
    axes = ("dp_replicate", "dp_shard") if settings.dp_replicate > 1 else ("dp_shard",)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.offload_parameters else OffloadPolicy()
    options = {
        "mesh": mesh.devices[axes],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=grads, cast_forward_inputs=False),
        "offload_policy": offload,
        "reshard_after_forward": settings.reshard,
    }
    inner = [u.modules for u in cut_units(stage, settings.unit_blocks) if u.modules != (stage,)]
    for modules in inner:
        fully_shard(list(modules), **options)
    fully_shard(stage, **options)
    depth, firsts = settings.prefetch, [modules[0] for modules in inner]
    for i, unit in enumerate(firsts):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(firsts[i + 1 : i + 1 + depth])  # type: ignore[arg-type]
        # FSDP2 takes an empty list for one unit ahead; to gather oneself again is to gather nothing.
        before = firsts[max(i - depth, 0) : i][::-1] or [unit]
        unit.set_modules_to_backward_prefetch(before)  # type: ignore[arg-type]
    if firsts:
        stage.set_modules_to_forward_prefetch(firsts[:depth])  # type: ignore[operator]
        stage.set_modules_to_backward_prefetch(firsts[::-1][:depth] or [stage])  # type: ignore[operator]


class Fsdp:
    """`stages`: FSDPModules whose shards have memory, but no values yet: set `pieces[..].value`."""

    def __init__(self, stages: list[nn.Module], cuts: dict[str, Cut], mesh: Mesh):
        self.stages = stages
        self.copied, self.on_host = mesh.size("dp_replicate") > 1, mesh.parallel.offload_parameters
        self.parameters = [(name, p) for stage in stages for name, p in stage.named_parameters()]
        self.pieces = [self._piece(name, parameter, cuts[name], mesh) for name, parameter in self.parameters]

    def _piece(self, name: str, parameter: nn.Parameter, cut: Cut, mesh: Mesh) -> Piece:
        assert isinstance(parameter, DTensor)
        rows = own_rows(len(parameter), mesh.size("dp_shard"), mesh.index("dp_shard"))
        value = parameter.to_local().detach()
        assert len(value) == len(rows), (name, value.shape, rows)
        return Piece(
            name=name,
            shape=cut.shape,
            offsets=(cut.offsets[0] + rows.start, *cut.offsets[1:]),
            sizes=tuple(value.shape),
            value=value,
            owner=is_owner(cut, parameter, mesh),
        )

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        """Every micro-batch is reduced and added to the shards; its traffic hides behind the backward.

        Copies wait for the last one, unless gradients live on the host: there is then no room for their sum here.
        """
        if self.copied:
            assert isinstance(stage, FSDPModule)
            stage.set_requires_all_reduce(last or self.on_host)

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        """FSDP2's own hooks have done it."""

    def reduce(self) -> None:
        for piece, (_, parameter) in zip(self.pieces, self.parameters, strict=True):
            gradient = parameter.grad
            piece.grad = gradient.to_local() if isinstance(gradient, DTensor) else None

    def publish(self) -> None:
        """The shards are the masters: the next gather reads them."""
        for piece, (_, parameter) in zip(self.pieces, self.parameters, strict=True):
            piece.grad = parameter.grad = None
