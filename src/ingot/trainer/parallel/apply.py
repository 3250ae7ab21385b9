"""The steps that turn a plain model into a distributed one, and their order, in one function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ingot.plugins.piece import ParameterShard, PlacedParameter
from ingot.schema.run import Train
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.pipeline import TiedEnds, cut_stage
from ingot.trainer.parallel.recompute import KeptResults, recompute
from ingot.trainer.parallel.split_backward import SplitBackward, split_linears
from ingot.trainer.parallel.tensor import TensorCut, cut_tensors, sum_partial_gradients, use_async_tensor_parallel
from ingot.trainer.parallel.units import placement
from ingot.trainer.parallel.zero import Zero
from ingot.trainer.torch_private import allocate

if TYPE_CHECKING:
    from ingot.trainer.parallel.fsdp import Fsdp

# (name, whole shape, offsets, sizes) -> this block of the parameter's first value, on the CPU
InitialValue = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class ShardedModel:
    """This rank's part of a model.

    stages: stage number -> module. data: the data parallelism in use. shards: the rank's blocks of the parameters.
    hidden: the dtype of the hidden states between stages. split: the model's SplitBackward; None if the schedule does
    not split the backward into two halves.
    """

    stages: dict[int, nn.Module]
    data: "Zero | Fsdp"
    shards: list[ParameterShard]
    hidden: torch.dtype
    split: SplitBackward | None
    _cuts: dict[str, TensorCut]
    _partial: list[ParameterShard]
    _tied: TiedEnds | None
    _mesh: Mesh

    def reduce(self) -> None:
        """Set each shard's gradient to the mean over the ranks that read tokens. Call after a step's last backward."""
        self.data.reduce()
        sum_partial_gradients(self._partial, self._mesh)
        if self._tied is not None:
            self._tied.sum_gradients()

    def placement(self) -> dict[str, PlacedParameter]:
        """Return, for each parameter of this rank's stages, its blocks on all ranks of this copy of the stages.

        The mesh needs the view "copy".
        """
        return placement(self._cuts, self._mesh)

    def publish(self) -> None:
        """Copy the masters to the parameters in the compute dtype. Call after the masters changed."""
        self.data.publish()

    def close(self) -> None:
        """Remove the hooks of parameters, so that the model can be freed: the garbage collector does not see that they
        hold it. No step can follow."""
        for hook in self.data.hooks:
            hook.remove()


def parallelize(
    make: Callable[[], nn.Module],
    mesh: Mesh,
    train: Train,
    device: torch.device,
    *,
    sharding: Mapping[str, str],
    rank_of_stage: Sequence[int],
    micro_batches: int,
    initial_value: InitialValue | None,
    kept: KeptResults | None = None,
    whole_attention: bool = True,
) -> ShardedModel:
    """Build this rank's stages of the model that `make` builds on the meta device, with memory and first values.

    mesh.parallel: with every "auto" resolved (theory/layout.py). sharding: end of a parameter's name -> its role under
    tensor parallelism. rank_of_stage: the pipeline rank of each stage. initial_value: must not depend on the rank; None
    leaves values unset, for a dry run. kept: the results of attention rings and the row counts of experts, for
    recompute. whole_attention: the compiler can see all of attention.
    """
    settings = mesh.parallel
    compute, master = COMPUTE[train.precision], COMPUTE["fp64" if train.precision == "fp64" else "fp32"]
    grads = master if train.precision in ("fp32", "fp64") else GRADS[settings.grads]
    stages, every_cut, tied = {}, {}, False
    split = SplitBackward() if settings.splits_backward else None
    for number in [s for s, rank in enumerate(rank_of_stage) if rank == mesh.index("pp")]:
        # 1. Pipeline: keep the blocks of this stage.
        stage = make()
        tied = getattr(stage, "head", None) is None
        if len(rank_of_stage) > 1:
            cut_stage(stage, number, settings.stage_layers)
        # 2. Tensor and sequence: local shapes, and the collectives between them.
        every_cut |= cut_tensors(stage, sharding, mesh, split)
        # A V-shaped pipeline has its first and last stage on one rank.
        shared = stages[0].embed if tied and number > 0 and number == len(rank_of_stage) - 1 and 0 in stages else None
        if shared is not None:
            stage.embed = shared
        # 3. Backward in two halves, if the schedule needs it.
        if split is not None:
            split_linears(stage, split)
        # 4. Recompute activations.
        blocks = stage.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleDict)
        if settings.recompute != "none":
            recompute(blocks, settings.recompute, settings.recompute_every, kept, ring=settings.ring > 1)
        # 5. Compile, block by block: one graph serves all blocks, and the hooks of data parallelism stay outside.
        if should_compile(train, device, settings.splits_backward):
            compile_blocks(
                stage,
                whole_readout=settings.tp == 1,
                whole_attention=whole_attention,
                recompute=settings.recompute,
                every=settings.recompute_every,
            )
        # 6. Precision, ZeRO-3's sharding, and memory for this rank's parts. balance.py makes the buffers of routers.
        place = "cpu" if settings.offload_parameters else device
        if settings.zero == 3:
            from ingot.trainer.parallel import fsdp  # takes half of a rank's imports, and only ZeRO-3 needs it

            stage.to(master)
            fsdp.shard_stage(stage, every_cut, mesh, compute, grads, device)
            stage.to_empty(device=place)
        else:
            if shared is not None:
                stage.register_module("embed", None)  # it has its dtype and its memory already
            allocate(stage.to(compute), place)
            if shared is not None:
                stage.embed = shared
        stages[number] = stage
    if settings.async_tp:
        use_async_tensor_parallel(mesh, device)
    # 7. The shards of each rank, and the exchange of gradients.
    every = list(stages.values())
    if settings.zero == 3:
        from ingot.trainer.parallel import fsdp

        data = fsdp.Fsdp(every, every_cut, mesh, micro_batches)
    else:
        assert settings.zero != "auto"
        data = Zero(every, every_cut, mesh, zero=settings.zero, master=master, grads=grads, micro_batches=micro_batches)
    # 8. First values: each rank makes its own blocks, without communication.
    if initial_value is not None:
        for shard in data.shards:
            shard.value.copy_(initial_value(shard.name, shard.shape, shard.offsets, shard.sizes))
    data.publish()
    partial = [shard for shard in data.shards if every_cut[shard.name].partial]
    two_ranks = tied and rank_of_stage[0] != rank_of_stage[-1]
    ends = TiedEnds(mesh, rank_of_stage, data.shards) if two_ranks else None
    return ShardedModel(stages, data, data.shards, compute, split, every_cut, partial, ends, mesh)


def should_compile(train: Train, device: torch.device, splits_backward: bool = False) -> bool:
    """Return whether blocks are compiled. "auto" compiles on a GPU, unless the backward is split in two halves.

    On a CPU the compiler takes minutes and gains nothing for models that a CPU can train.
    """
    return train.compile == "on" or (train.compile == "auto" and device.type == "cuda" and not splits_backward)


def compile_blocks(
    stage: nn.Module,
    *,
    whole_readout: bool,
    whole_attention: bool = True,
    recompute: Literal["none", "full", "selective"] = "none",
    every: int = 1,
) -> None:
    """Compile the forward of each block. Hooks on blocks, which gather and wait, stay outside the graphs.

    whole_readout: the loss has no collectives. whole_attention: the compiler can see all of attention; it cannot see
    that of context parallelism, or tiles of documents. recompute, every: as in the run's settings.
    """
    for layer, block in stage.get_submodule("blocks").named_children():
        own_recompute = recompute if int(layer) % every == 0 else "none"
        for part in _compiled_parts(block, own_recompute, whole_attention):
            part.forward = torch.compile(part.forward)
    readout = stage.get_submodule("readout")
    if whole_readout:
        readout.nats_and_slope = torch.compile(readout.nats_and_slope)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _compiled_parts(block: Any, recompute: str, whole_attention: bool) -> list[nn.Module]:
    """Return the parts of a block that are compiled.

    In a block with experts the host waits for the row counts, so only its attention and its dense feed-forwards are
    compiled. The same parts are compiled if a recomputed block has attention that the compiler cannot see completely:
    the compiler takes a recomputed function as one graph or not at all. Under selective recompute, nothing of such
    blocks is compiled, because compiled code reuses the memory of results that must be kept.
    """
    moe = getattr(block, "moe", None)
    if moe is None and (whole_attention or recompute == "none"):
        return [block]
    if recompute == "selective":
        return []
    return [part for part in (block.attention, block.mlp, moe and moe.shared) if part is not None]
