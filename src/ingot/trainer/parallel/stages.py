"""Cutting a model into pipeline stages, from outside: a stage is the whole model without what other stages hold."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ingot.trainer.mesh.mesh import Mesh, own_group
from ingot.trainer.parallel.piece import Piece


def cut_stage(model: Any, stage: int, stage_layers: Sequence[int]) -> nn.Module:
    """`model` (a Transformer on the meta device) reduced in place to `stage`. Blocks keep their numbers, so their names
    do not change. stage_layers: blocks of each stage."""
    first = sum(stage_layers[:stage])
    own = {str(i) for i in range(first, first + stage_layers[stage])}
    blocks = model.get_submodule("blocks")
    for key in [key for key, _ in blocks.named_children() if key not in own]:
        del blocks[key]  # type: ignore[operator]
    tied = getattr(model, "head", None) is None
    if stage != len(stage_layers) - 1:
        model.norm = model.head = None
    if stage != 0 and not (tied and stage == len(stage_layers) - 1):
        model.embed = None
    return model


class TiedEnds:
    """One matrix on two ranks: the first stage's embedding is the last one's head, so their gradients are summed.

    Both hold it, start from the same values and take the same updates; the first stage's copy counts and is saved.
    """

    def __init__(self, mesh: Mesh, rank_of_stage: Sequence[int], pieces: list[Piece]):
        """Collective: every rank makes the groups of all pairs. pieces: of this rank."""
        ends = rank_of_stage[0], rank_of_stage[-1]
        self.piece = next((piece for piece in pieces if piece.name == "embed.weight"), None)
        lines = mesh.devices.mesh.flatten(1).T.tolist()  # of every pipeline its global ranks
        self.group = own_group([[line[end] for end in ends] for line in lines], mesh.timeout, "tied_ends")
        if self.piece is not None and mesh.index("pp") != ends[0]:
            self.piece.owner = False

    @torch.no_grad()
    def sum_gradients(self) -> None:
        if self.piece is not None and self.piece.grad is not None:
            dist.all_reduce(self.piece.grad, group=self.group)
