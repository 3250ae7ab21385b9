"""ZeRO-3: parameters, gradients and optimizer state are split; PyTorch's FSDP2 (Zhao et al. 2023) gathers each unit
when it is needed, forward and backward, and scatters its gradients.

With dp_replicate > 1 it is HSDP: split within a group of dp_shard x cp ranks, copied across groups. Experts are units
of their own inside of blocks, split among the ranks that hold the same ones. A rank's shards are the float32 masters:
between steps there is no other copy of the parameters. Copies meet once per step: until then FSDP2 keeps the sum of a
step's shards of gradients on the device, in the dtype they are sent in.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.piece import Piece
from ingot.trainer.parallel.tensor import Cut
from ingot.trainer.parallel.units import Unit, cut_units, is_owner, own_rows


def shard_stage(
    stage: nn.Module,
    cuts: Mapping[str, Cut],
    mesh: Mesh,
    compute: torch.dtype,
    grads: torch.dtype,
    device: torch.device,
) -> None:
    """Make `stage`, on the meta device, an FSDPModule in place.

    Inputs are not cast: tokens are integers, hidden states follow the weights, rotary tables have to stay float32.
    """
    settings = mesh.parallel
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.offload_parameters else OffloadPolicy()
    options = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=grads, cast_forward_inputs=False),
        "offload_policy": offload,
    }
    units = cut_units(stage, settings.unit_blocks, cuts)
    plane = mesh.plane("shard")
    expert_plane = mesh.plane("expert_shard") if any(unit.experts for unit in units) else plane
    for unit in units:
        if unit.experts:
            fully_shard(list(unit.experts), mesh=expert_plane, reshard_after_forward=settings.reshard, **options)
        if unit.modules != (stage,):
            fully_shard(list(unit.modules), mesh=plane, reshard_after_forward=settings.reshard, **options)
    fully_shard(stage, mesh=plane, reshard_after_forward=settings.reshard, **options)
    _prefetch(stage, units, settings.prefetch)
    if settings.recompute != "none":
        for unit in units:
            for experts in unit.experts[:1]:
                _begin_backward(unit.modules[-1], experts)


def _begin_backward(module: nn.Module, experts: nn.Module) -> None:
    """Gather `experts` when the backward of `module` begins, which is before its forward runs again. Else their hooks,
    which stand inside of what is recomputed, would take that for a forward: gather, free, and gather once more; and a
    selective recompute would find other operations there than the first time."""

    def hook(module: nn.Module, args, output):
        assert isinstance(experts, FSDPModule)
        return experts._get_fsdp_state()._register_pre_backward_hook(output)

    module.register_forward_hook(hook)


def _prefetch(stage: nn.Module, units: Sequence[Unit], depth: int) -> None:
    """Every unit gathers its own experts, and `depth` units ahead of it, forward and backward."""
    inner = [unit for unit in units if unit.modules != (stage,)]
    for i, unit in enumerate(inner):
        experts = [*unit.experts[:1]]
        ahead, behind = inner[i + 1 : i + 1 + depth], inner[max(i - depth, 0) : i][::-1]
        _gathers(unit.modules[0], forward=experts + _firsts(ahead), backward=experts + _firsts(behind))
    own = [experts for unit in units if unit.modules == (stage,) for experts in unit.experts[:1]]
    if inner or own:
        _gathers(stage, forward=own + _firsts(inner[:depth]), backward=own + _firsts(inner[::-1][:depth]))
    for unit in units:
        for experts in unit.experts[:1]:
            _gathers(experts, forward=[], backward=[])


def _firsts(units: Sequence[Unit]) -> list[nn.Module]:
    """What stands for all parameters of these units."""
    return [module for unit in units for module in (unit.modules[0], *unit.experts[:1])]


def _gathers(module: nn.Module, *, forward: list[nn.Module], backward: list[nn.Module]) -> None:
    assert isinstance(module, FSDPModule)
    module.set_modules_to_forward_prefetch(forward)  # type: ignore[arg-type]
    # FSDP2 takes an empty list for one unit ahead; to gather oneself again is to gather nothing.
    module.set_modules_to_backward_prefetch(backward or [module])  # type: ignore[arg-type]


class Fsdp:
    """`stages`: FSDPModules whose shards have memory, but no values yet: set `pieces[..].value`."""

    def __init__(self, stages: list[nn.Module], cuts: dict[str, Cut], mesh: Mesh):
        self.stages = stages
        settings = mesh.parallel
        self.copied, self.on_host = settings.dp_replicate > 1, settings.offload_parameters
        # FSDP2 takes the mean over those that share a parameter; what is wanted is that over token ranks.
        sharers = {view: mesh.size(view) * settings.dp_replicate for view in {cut.view for cut in cuts.values()}}
        self.factors = {name: sharers[cut.view] / settings.token_ranks for name, cut in cuts.items()}
        self.parameters = [(name, p) for stage in stages for name, p in stage.named_parameters()]
        self.pieces = [self._piece(name, parameter, cuts[name], mesh) for name, parameter in self.parameters]

    def _piece(self, name: str, parameter: nn.Parameter, cut: Cut, mesh: Mesh) -> Piece:
        assert isinstance(parameter, DTensor)
        rows = own_rows(len(parameter), mesh.size(cut.view), mesh.index(cut.view))
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

    @torch.no_grad()
    def reduce(self) -> None:
        for piece, (name, parameter) in zip(self.pieces, self.parameters, strict=True):
            gradient, factor = parameter.grad, self.factors[name]
            piece.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            if piece.grad is not None and factor != 1:
                piece.grad.mul_(factor)

    def publish(self) -> None:
        """The shards are the masters: the next gather reads them."""
        for piece, (_, parameter) in zip(self.pieces, self.parameters, strict=True):
            piece.grad = parameter.grad = None
