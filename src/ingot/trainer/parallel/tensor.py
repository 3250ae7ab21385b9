"""Tensor and sequence parallelism (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2).

The first matrix of a pair is split by columns and the second by rows, so that a rank computes some heads, or a part of
the feed-forward, alone. Such a region begins and ends with a collective:

    sequence = True    enter: gather tokens (backward: reduce-scatter)   leave: reduce-scatter (backward: gather)
    sequence = False   enter: nothing (backward: all-reduce)             leave: all-reduce (backward: nothing)

With `sequence`, norms and residuals between regions hold T/tp tokens; with `tp_chunks`, the collectives of blocks run
beside the products next to them (tensor_overlap.py). The embedding, the head and the loss are split by token id. The
model's code does not change: parameters get their local shape and modules get hooks.

Shape letters: B batch, T tokens, D d_model, M tokens of a chunk, V this rank's part of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.errors import ConfigError
from ingot.plugins.loss import VocabularyPart
from ingot.plugins.piece import ParameterShard
from ingot.trainer.mesh.collectives import all_sum, gather, scatter_sum, start_all_sum
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.split_backward import SplitBackward
from ingot.trainer.parallel.tensor_overlap import OverlappedRegion
from ingot.trainer.torch_private import overlap_products_with_collectives

ROLES = ("column", "row", "vocab", "kv", "stream", "heads", "expert")
TOKENS = 1  # the dim of [B, T, D] that sequence parallelism splits


@dataclass(frozen=True)
class TensorCut:
    """The position of a parameter's local tensor in the whole parameter, before data parallelism divides its rows.

    shape: shape of the whole parameter. offsets: position of the local tensor. partial: every tp rank holds the whole
    parameter and applies it to a part of the activations, so its gradients are summed over tp. view: the view of the
    mesh (mesh/mesh.py) whose ranks hold the same local tensor and divide its state. dim: the dim that the ranks of
    `axis` ("tp", or "ep" for experts) divide; None: each holds the whole parameter. stack: the number of matrices that
    the whole parameter stacks along its rows: experts, else 1.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    partial: bool = False
    view: str = "shard"
    dim: int | None = None
    axis: str = "tp"
    stack: int = 1


def cut_tensors(
    stage: Any, sharding: Mapping[str, str], mesh: Mesh, split: SplitBackward | None = None
) -> dict[str, TensorCut]:
    """Reduce `stage`, a Transformer on the meta device, to this tp rank's part of its matrices and this ep rank's
    experts.

    Returns parameter name -> TensorCut. sharding: end of a parameter's name -> its role (`sharding_of` in
    model/transformer.py). split: of a schedule that splits the backward. The degrees of parallelism must have been
    checked before.
    """
    roles = {name: _role(name, sharding) for name, _ in stage.named_parameters()}
    cuts = _cut_experts(stage, [name for name, role in roles.items() if role == "expert"], mesh)
    dense = {name: role for name, role in roles.items() if role != "expert"}
    ranks, sequence = mesh.size("tp"), mesh.parallel.sequence
    if ranks == 1:
        shapes = {name: tuple(stage.get_parameter(name).shape) for name in dense}
        return cuts | {name: TensorCut(shape, (0,) * len(shape)) for name, shape in shapes.items()}
    region = Region(mesh.group("tp"), sequence)
    chunks = mesh.parallel.tp_chunks
    overlapped = OverlappedRegion(region.group, chunks, split) if chunks > 1 else None
    entries, products = {}, {}  # the modules that are entered, and the layers that multiply the input of a module
    for name, role in dense.items():
        parameter = stage.get_parameter(name)
        module_name, _, leaf = name.rpartition(".")
        module, parent = stage.get_submodule(module_name), module_name.rpartition(".")[0]
        if role == "kv":
            heads = parameter.shape[0] // getattr(stage.get_submodule(parent), "head_dim")  # noqa: B009
            role = "column" if heads % ranks == 0 else "shared kv"
            if role == "shared kv":
                module.register_forward_hook(_own_head(heads, ranks, mesh.index("tp")))
        if role in ("column", "shared kv"):
            entries[parent] = stage.get_submodule(parent)
        if role == "row" and overlapped and _is_product(module):
            overlapped.leave(module)
        elif role == "row":
            module.register_forward_hook(lambda _, args, output: region.leave(output))
        if role == "vocab" and isinstance(module, nn.Embedding):
            _look_up_own_ids(module, region, mesh.index("tp") * (parameter.shape[0] // ranks))
        partial = role in ("heads", "shared kv") or (role == "stream" and sequence)
        dim = {"column": 0, "vocab": 0, "row": 1}.get(role)
        cuts[name] = _cut(parameter, dim, ranks, mesh.index("tp"), partial)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(_local_shape(parameter, dim, ranks))))
        if role in ("column", "shared kv", "heads") and _is_product(module, stage.arch.d_model):
            products.setdefault(parent, []).append(module)
    for parent, module in entries.items():
        if overlapped and parent in products:
            overlapped.enter(module, products[parent])
        else:
            module.register_forward_pre_hook(lambda module, args: (region.enter(args[0]), *args[1:]))
    if stage.norm is not None:
        _read_out_own_ids(stage, region, mesh)
    return cuts


def _is_product(module: nn.Module, width: int | None = None) -> TypeGuard[nn.Linear]:
    """Return whether `module` is a matrix product alone, of inputs of this width (None: any)."""
    return isinstance(module, nn.Linear) and module.bias is None and width in (None, module.in_features)


def _role(name: str, sharding: Mapping[str, str]) -> str:
    ends = [end for end in sharding if f".{name}".endswith(f".{end}")]
    if not ends:
        raise ConfigError(
            "E-LAYER-SHARDING",
            f"parameter {name} has no role under tensor parallelism",
            rule="a layer of a plug-in declares the role of each of its parameters (plugins/layers.py)",
            fix="add the parameter to `sharding` of the plug-in's part",
            parameter=name,
        )
    role = sharding[max(ends, key=len)]
    if role not in ROLES:
        raise ConfigError(
            "E-LAYER-SHARDING",
            f"parameter {name} has the role {role!r}",
            rule=f"a role is one of {', '.join(ROLES)}",
            fix="correct `sharding` of the plug-in's part (plugins/layers.py)",
            parameter=name,
        )
    return role


def _cut_experts(stage: Any, names: list[str], mesh: Mesh) -> dict[str, TensorCut]:
    """Reduce the experts to those of this ep rank, a block of rows, because experts are stacked along the rows. Tensor
    parallelism does not split experts."""
    cuts, ranks = {}, mesh.size("ep")
    for name in names:
        parameter, (module_name, _, leaf) = stage.get_parameter(name), name.rpartition(".")
        module = stage.get_submodule(module_name)
        cut = _cut(parameter, 0, ranks, mesh.index("ep"), partial=False)
        cuts[name] = replace(cut, view="expert_shard", axis="ep", stack=len(parameter) // module.outputs)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(_local_shape(parameter, 0, ranks))))
    return cuts


def _local_shape(parameter: Tensor, dim: int | None, ranks: int) -> tuple[int, ...]:
    return tuple(n // ranks if d == dim else n for d, n in enumerate(parameter.shape))


def _cut(parameter: Tensor, dim: int | None, ranks: int, index: int, partial: bool) -> TensorCut:
    offsets = tuple(n // ranks * index if d == dim else 0 for d, n in enumerate(parameter.shape))
    return TensorCut(tuple(parameter.shape), offsets, partial, dim=dim)


class Region:
    """The two collectives around a region that each rank computes alone. The compiler can see their operators."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool):
        self.group, self.sequence = group, sequence

    def enter(self, x_BTD: Tensor) -> Tensor:
        return (_GatherTokens if self.sequence else _SumBackward).apply(x_BTD, self.group)

    def leave(self, x_BTD: Tensor) -> Tensor:
        return (_ScatterTokens if self.sequence else _SumForward).apply(x_BTD, self.group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, TOKENS, group)

    @staticmethod
    def backward(ctx, *grads):
        return scatter_sum(grads[0], TOKENS, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sum(x, TOKENS, group)

    @staticmethod
    def backward(ctx, *grads):
        return gather(grads[0], TOKENS, ctx.group), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_sum(x, group)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return all_sum(grads[0], ctx.group), None


def _own_head(heads: int, ranks: int, index: int):
    """Return a hook for models with fewer key/value heads than ranks: every rank computes all key/value heads and keeps
    the head that its queries use."""

    def keep(module: nn.Module, args, output: Tensor) -> Tensor:
        return output.chunk(heads, dim=-1)[index * heads // ranks]

    return keep


def _look_up_own_ids(embed: Any, region: Region, first: int) -> None:
    """Let `embed` look up the ids first..first+V-1 and return zeros for other ids; the sum over ranks is the result."""

    def forward(ids_BT: Tensor) -> Tensor:
        own = ids_BT - first
        others = (own < 0) | (own >= embed.weight.shape[0])
        x_BTD = F.embedding(own.masked_fill(others, 0), embed.weight).masked_fill(others[..., None], 0)
        return region.leave(x_BTD)

    embed.forward = forward


def _read_out_own_ids(stage: Any, region: Region, mesh: Mesh) -> None:
    rows = (stage.head or stage.embed).weight.shape[0]
    stage.norm.register_forward_hook(lambda _, args, output: region.enter(output))
    first, group = mesh.index("tp") * rows, region.group
    vocabulary = VocabularyPart(first, lambda x_M: all_sum(x_M, group), lambda x_M: all_sum(x_M, group, "max"))
    whole = lambda logits: gather(logits, logits.dim() - 1, group)  # noqa: E731
    stage.readout.use(own_nats_and_slope(group, first), whole, vocabulary)


def own_nats_and_slope(group: dist.ProcessGroup, first: int):
    """Return the function that computes cross entropy over a vocabulary split by id. Ranks exchange three numbers per
    token, no logits.

    The function does what `nats_and_slope` of model/loss.py does, for the ids first..first+V-1 of this rank. All ranks
    get the same nats.
    """

    def measure(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        shifted = wide - all_sum(wide.amax(-1), group, "max")[:, None]
        own = targets_M - first
        inside = (own >= 0) & (own < logits_MV.shape[-1])
        own = own.clamp(0, logits_MV.shape[-1] - 1)[:, None]
        target = shifted.gather(-1, own).squeeze(-1) * inside
        p = shifted.exp_()
        total, target = all_sum(torch.stack((p.sum(-1), target)), group)
        slope = p.div_(total[:, None])
        slope.scatter_add_(-1, own, -inside.to(p.dtype)[:, None])
        return total.log() - target, slope.type_as(logits_MV)

    return measure


@torch.no_grad()
def sum_partial_gradients(shards: list[ParameterShard], mesh: Mesh) -> None:
    """Sum, in one all-reduce, the gradients of parameters that each tp rank applied to its own tokens or heads."""
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    if mesh.size("tp") == 1 or not gradients:
        return
    total = torch.cat([g.reshape(-1) for g in gradients])
    start_all_sum(total, mesh.group("tp")).wait()
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def use_async_tensor_parallel(mesh: Mesh, device: torch.device) -> None:
    """Let the compiler overlap a gather or reduce-scatter with its matrix product by splitting both into parts (Wang et
    al. 2023), over symmetric memory. Not tested: the overlap needs several GPUs in one NVLink domain.

    Raises ConfigError if the run is not on GPUs.
    """
    if device.type != "cuda":
        raise ConfigError(
            "E-ASYNC-TP-DEVICE",
            f"parallel.async_tp = true, but the run is on {device.type}",
            rule="overlapped tensor parallelism needs the symmetric memory of GPUs",
            fix="set parallel.async_tp = false",
            device=device.type,
        )
    overlap_products_with_collectives(mesh.group("tp").group_name)
