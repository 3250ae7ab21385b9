"""How a plain model becomes a distributed one: THE order, in one function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ingot.schema.run import Train
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.parallel.fsdp import Fsdp, shard_stage
from ingot.trainer.parallel.piece import Piece
from ingot.trainer.parallel.recompute import recompute
from ingot.trainer.parallel.split_backward import split_linears
from ingot.trainer.parallel.stages import TiedEnds, cut_stage
from ingot.trainer.parallel.tensor import cut_tensors, sum_partial_gradients, use_async_tensor_parallel
from ingot.trainer.parallel.zero import Zero

# (name, whole shape, offsets, sizes) -> that block of the parameter's first value, on the CPU
InitialValue = Callable[[str, Sequence[int], Sequence[int], Sequence[int]], Tensor]

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
GRADS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Parallelized:
    """This rank's part of a model. stages: by stage number. pieces: what it owns of the parameters.

    hidden: dtype of what stages hand to each other.
    """

    stages: dict[int, nn.Module]
    data: Zero | Fsdp
    pieces: list[Piece]
    hidden: torch.dtype
    _partial: list[Piece]
    _tied: TiedEnds | None
    _mesh: Mesh

    def reduce(self) -> None:
        """After the last backward of a step: every piece gets its whole gradient, the mean over token ranks."""
        self.data.reduce()
        sum_partial_gradients(self._partial, self._mesh)
        if self._tied is not None:
            self._tied.sum_gradients()

    def publish(self) -> None:
        """After masters changed: what computes follows them."""
        self.data.publish()


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
) -> Parallelized:
    """This rank's stages of the model that `make` builds on the meta device, with memory and first values.

    mesh.parallel: with every "auto" resolved (theory/layout.py). rank_of_stage: of the pipeline's table.
    initial_value: must not depend on the rank; None leaves values unset, for a trace without memory.
    """
    settings = mesh.parallel
    compute, master = COMPUTE[train.precision], COMPUTE["fp64" if train.precision == "fp64" else "fp32"]
    grads = master if train.precision in ("fp32", "fp64") else GRADS[settings.grads]
    stages, every_cut, tied = {}, {}, False
    for number in [s for s, rank in enumerate(rank_of_stage) if rank == mesh.index("pp")]:
        # 1. Pipeline: keep the blocks of this stage.
        stage = make()
        tied = getattr(stage, "head", None) is None
        if len(rank_of_stage) > 1:
            cut_stage(stage, number, settings.stage_layers)
        # 2. Tensor and sequence: local shapes, and the collectives between them.
        every_cut |= cut_tensors(stage, sharding, mesh)
        if tied and number > 0 and number == len(rank_of_stage) - 1 and 0 in stages:
            stage.embed = stages[0].embed  # a V-shaped pipeline begins and ends here
        # 3. Backward in two halves, where the schedule wants it.
        if settings.splits_backward:
            split_linears(stage)
        # 4. Recompute activations.
        blocks = stage.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleDict)
        if settings.recompute != "none":
            recompute(blocks, settings.recompute, settings.recompute_every, rings=settings.ring > 1)
        # 5. Compile, block by block: one graph serves all blocks, and hooks of data parallelism stay outside of it.
        if should_compile(train, device, settings.splits_backward):
            compile_blocks(
                stage,
                whole_readout=settings.tp == 1,
                whole_attention=settings.cp == 1,
                recompute=settings.recompute,
                every=settings.recompute_every,
            )
        # 6. Precision, and ZeRO-3's cut; memory for this rank's parts. Buffers of routers get theirs in balance.py.
        if settings.zero == 3:
            stage.to(master)
            shard_stage(stage, every_cut, mesh, compute, grads, device)
        else:
            stage.to(compute)
        stage.to_empty(device="cpu" if settings.offload_parameters else device)
        stages[number] = stage
    if settings.async_tp:
        use_async_tensor_parallel(mesh, device)
    # 7. Who owns what, and how gradients meet.
    every = list(stages.values())
    if settings.zero == 3:
        data = Fsdp(every, every_cut, mesh)
    else:
        assert settings.zero != "auto"
        data = Zero(every, every_cut, mesh, zero=settings.zero, master=master, grads=grads, micro_batches=micro_batches)
    # 8. First values, each rank its own blocks, without communication.
    if initial_value is not None:
        for piece in data.pieces:
            piece.value.copy_(initial_value(piece.name, piece.shape, piece.offsets, piece.sizes))
    data.publish()
    partial = [piece for piece in data.pieces if every_cut[piece.name].partial]
    two_ranks = tied and rank_of_stage[0] != rank_of_stage[-1]
    ends = TiedEnds(mesh, rank_of_stage, data.pieces) if two_ranks else None
    return Parallelized(stages, data, data.pieces, compute, partial, ends, mesh)


def should_compile(train: Train, device: torch.device, splits_backward: bool = False) -> bool:
    """ "auto" compiles on a GPU. On a CPU the compiler takes minutes and wins nothing at the sizes a CPU trains.

    A backward in two halves cannot be compiled as one.
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
    """Only forwards: hooks on blocks, which gather and wait, stay outside of the graphs.

    recompute, every: as settings have them. whole_attention: the compiler can see all of attention, which under context
    parallelism it cannot.
    """
    for layer, block in stage.get_submodule("blocks").named_children():
        own_recompute = recompute if int(layer) % every == 0 else "none"
        for part in _compiled_parts(block, own_recompute, whole_attention):
            part.forward = torch.compile(part.forward)
    readout = stage.get_submodule("readout")
    if whole_readout:
        readout.piece = torch.compile(readout.piece)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _compiled_parts(block: Any, recompute: str, whole_attention: bool) -> list[nn.Module]:
    """A block with experts waits for the host to know who has how many rows: its attention is compiled, and what does
    not depend on that. The same of a recomputed block whose attention is not seen whole: the compiler takes a recompute
    in one graph or leaves it alone, with all that is inside. Nothing where a block keeps results of some operations and
    is no such graph: compiled code uses the memory of its results again."""
    moe = getattr(block, "moe", None)
    if moe is None and (whole_attention or recompute == "none"):
        return [block]
    if recompute == "selective":
        return []
    return [part for part in (block.attention, block.mlp, moe and moe.shared) if part is not None]
