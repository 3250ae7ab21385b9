"""ZeRO-3: parameters, gradients and optimizer state are divided. PyTorch's FSDP2 (Zhao et al. 2023) gathers each unit
when it is needed, in forward and backward, and reduce-scatters its gradients.

With dp_replicate > 1 this form is HSDP: state is divided within a group of dp_shard x cp ranks and copied across
groups. Experts are units of their own inside blocks, divided among the ranks that hold the same experts. A rank's
shards are the float32 masters: between steps there is no other copy of the parameters. The copies exchange gradients
once per step; until then FSDP2 keeps the sum of a step's gradient shards on the device, in the dtype in which they are
sent.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ingot.plugins.piece import ParameterShard
from ingot.trainer.mesh.collectives import scatter_into
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.tensor import TensorCut
from ingot.trainer.parallel.units import ShardingUnit, cut_units, is_owner, own_rows
from ingot.trainer.parallel.unreduced import GradientReader
from ingot.trainer.torch_private import drop_partial_sums, gather_before_backward


def shard_stage(
    stage: nn.Module,
    cuts: Mapping[str, TensorCut],
    mesh: Mesh,
    compute: torch.dtype,
    grads: torch.dtype,
    device: torch.device,
) -> None:
    """Turn `stage`, on the meta device, into an FSDPModule in place.

    compute, grads: the dtypes of gathered parameters and of sent gradients. Inputs are not cast: tokens are integers,
    hidden states follow the weights, and rotary tables must stay float32.
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
                _gather_experts_before_recompute(unit.modules[-1], experts)


def _gather_experts_before_recompute(module: nn.Module, experts: nn.Module) -> None:
    """Gather `experts` when the backward of `module` begins, before its forward runs again.

    The hooks of `experts` run inside the recomputed part. They would treat the recompute as a forward (gather, free,
    and gather once more), and a selective recompute would see different operations than in the first forward.
    """

    def hook(module: nn.Module, args, output):
        assert isinstance(experts, FSDPModule)
        return gather_before_backward(experts, output)

    module.register_forward_hook(hook)


def _prefetch(stage: nn.Module, units: Sequence[ShardingUnit], depth: int) -> None:
    """Let every unit gather its own experts and the next `depth` units, forward and backward."""
    inner = [unit for unit in units if unit.modules != (stage,)]
    for i, unit in enumerate(inner):
        experts = [*unit.experts[:1]]
        later, earlier = inner[i + 1 : i + 1 + depth], inner[max(i - depth, 0) : i][::-1]
        _set_prefetch(unit.modules[0], forward=experts + _firsts(later), backward=experts + _firsts(earlier))
    own = [experts for unit in units if unit.modules == (stage,) for experts in unit.experts[:1]]
    if inner or own:
        _set_prefetch(stage, forward=own + _firsts(inner[:depth]), backward=own + _firsts(inner[::-1][:depth]))
    for unit in units:
        for experts in unit.experts[:1]:
            _set_prefetch(experts, forward=[], backward=[])


def _firsts(units: Sequence[ShardingUnit]) -> list[nn.Module]:
    """Return one module per group of parameters of these units, as FSDP2's prefetch settings require."""
    return [module for unit in units for module in (unit.modules[0], *unit.experts[:1])]


def _set_prefetch(module: nn.Module, *, forward: list[nn.Module], backward: list[nn.Module]) -> None:
    assert isinstance(module, FSDPModule)
    module.set_modules_to_forward_prefetch(forward)  # type: ignore[arg-type]
    # FSDP2 takes an empty list to mean "one unit ahead". A module that prefetches itself gathers nothing more.
    module.set_modules_to_backward_prefetch(backward or [module])  # type: ignore[arg-type]


class _Reduction:
    """The reduce-scatter of an FSDP2 unit's gradients, after a reader has seen them.

    FSDP2 allocates a buffer, copies the gradients of a backward into it, allocates a second one for the result, on the
    stream of the exchange, and reduces the first into the second; if there is one rank, it only copies.
    """

    def __init__(self, number: int, reader: GradientReader):
        self._number, self._reader = number, reader
        self._whole: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._whole is None:
            self._whole = torch.empty(*size, dtype=dtype, device=device)
            return self._whole
        whole, self._whole = self._whole, None
        self._reader.take(self._number, whole)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if self._reader.apart:
            output_tensor.zero_()
        else:
            scatter_into(output_tensor, input_tensor, group, op)


class Fsdp:
    """Data parallelism by FSDP2.

    `stages` are FSDPModules whose parameters are allocated but not initialized: the caller must fill the `value` of
    each of `shards`.
    """

    def __init__(self, stages: list[nn.Module], cuts: dict[str, TensorCut], mesh: Mesh, micro_batches: int):
        self.stages, self.hooks = stages, []  # FSDP2 owns its hooks
        self.units = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
        self.buffers_read = (micro_batches, len(self.units))
        self._reader: GradientReader | None = None
        settings = mesh.parallel
        self.copied, self.on_host = settings.dp_replicate > 1, settings.offload_parameters
        # FSDP2 takes the mean over the ranks that share a parameter; `reduce` turns it into the mean over token ranks.
        sharers = {view: mesh.size(view) * settings.dp_replicate for view in {cut.view for cut in cuts.values()}}
        self.factors = {name: sharers[cut.view] / settings.token_ranks for name, cut in cuts.items()}
        self.parameters = [(name, p) for stage in stages for name, p in stage.named_parameters()]
        self.shards = [self._shard(name, parameter, cuts[name], mesh) for name, parameter in self.parameters]

    def _shard(self, name: str, parameter: nn.Parameter, cut: TensorCut, mesh: Mesh) -> ParameterShard:
        assert isinstance(parameter, DTensor)
        rows = own_rows(len(parameter), mesh.size(cut.view), mesh.index(cut.view))
        value = parameter.to_local().detach()
        assert len(value) == len(rows), (name, value.shape, rows)
        return ParameterShard(
            name=name,
            shape=cut.shape,
            offsets=(cut.offsets[0] + rows.start, *cut.offsets[1:]),
            sizes=tuple(value.shape),
            value=value,
            owner=is_owner(cut, parameter, mesh),
        )

    def show_gradients(self, reader: GradientReader) -> None:
        """Show this rank's gradients to `reader` from now on, before they are reduced."""
        for number, unit in enumerate(self.units):
            unit.set_custom_reduce_scatter(_Reduction(number, reader))  # pyright: ignore[reportArgumentType]
        self._reader = reader

    def name_of(self, number: int, element: int) -> tuple[str, int | None]:
        """Return the first parameter of unit `number`: FSDP2 mixes those of a unit in its buffer."""
        own = set(self.units[number].parameters())
        return next(name for name, parameter in self.parameters if parameter in own), None

    def drop_gradients(self) -> None:
        """End a step whose gradients are only read: drop what is left of them."""
        for unit in self.units:
            drop_partial_sums(unit)
        self.publish()

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        """Choose whether this backward sums gradients over the copies of the model.

        FSDP2 reduces the gradients of every micro-batch into the shards during the backward. The copies exchange their
        sums in the last backward of a step. If gradients are on the host, the copies exchange them in every backward,
        because a sum over several backwards would take device memory.
        """
        if self.copied:
            assert isinstance(stage, FSDPModule)
            reduces = self._reader is None or not self._reader.apart
            stage.set_requires_all_reduce((last or self.on_host) and reduces)

    def after_backward(self, stage: nn.Module, last: bool) -> None:
        """Do nothing: the hooks of FSDP2 have already reduced the gradients."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Set the gradient of every shard to the mean over the ranks that read tokens."""
        for shard, (name, parameter) in zip(self.shards, self.parameters, strict=True):
            gradient, factor = parameter.grad, self.factors[name]
            shard.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            if shard.grad is not None and factor != 1:
                shard.grad.mul_(factor)

    def published(self) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
        """Return no parameters: between steps there is no copy of the masters."""
        return {}

    def publish(self) -> None:
        """Free the gradients. Nothing is copied: the shards are the masters, from which the next gather reads."""
        for shard, (_, parameter) in zip(self.shards, self.parameters, strict=True):
            shard.grad = parameter.grad = None
