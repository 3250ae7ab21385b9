"""Load balancing of experts, once per step: the routers' counts give the loads of the whole batch and new biases.

Data, context and, under sequence parallelism, tensor ranks route different tokens, and pipeline ranks hold different
layers, so one sum over the world of a table of all layers gives every rank all counts. Counts of assignments are whole
numbers in float64: their sum is exact, so loads and biases have the same bits on every layout.

Shape letters: L layers with experts, R layers with experts on this rank, E experts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.plugins.piece import ParameterShard
from ingot.schema.arch import Moe
from ingot.trainer.mesh.collectives import all_sum
from ingot.trainer.mesh.mesh import AXES, Mesh

AFTER_LOADS = 3  # columns of a router's `seen` after the loads: dropped assignments, entropy, tokens


def updated_biases(bias_RE: Tensor, counts_RE: Tensor, rate: float) -> Tensor:
    """Return the biases after a step in which experts had counts_RE assignments: b_e + rate x sign(mean - c_e).

    Wang et al. 2024, algorithm 1. The comparison is between whole numbers, so on every device the bias of an expert
    exactly at the mean does not change.
    """
    below_RE = counts_RE.sum(-1, keepdim=True) - counts_RE * counts_RE.shape[-1]
    return bias_RE + rate * below_RE.sign().to(bias_RE.dtype)


def loads_of(counts_RE: Tensor) -> Tensor:
    """Return each expert's share of the assignments, times E: 1 is the mean."""
    return counts_RE * counts_RE.shape[-1] / counts_RE.sum(-1, keepdim=True)


class Balance:
    """The biases and loads of this rank's routers. The routers' buffers `bias` and `load` are rows of these tensors.

    layers: the numbers of all layers with experts, ascending. bias_RE begins at 0 and load_RE at 1, in float32 (float64
    in a float64 model), whatever the compute dtype; None if the model does not use them.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], mesh: Mesh, moe: Moe, layers: Sequence[int], device: torch.device
    ):
        self.moe, self.layers = moe, list(layers)
        self.routers = _routers(stages.values())
        self.bias_RE = self.load_RE = None
        rows = [self.layers.index(int(router.layer)) for router in self.routers]
        self._rows_R = torch.tensor(rows, dtype=torch.int64, device=device)
        self._owner = all(mesh.index(axis) == 0 for axis in AXES if axis != "pp")
        if self.routers:
            self._give_buffers(device)

    def _give_buffers(self, device: torch.device) -> None:
        size = len(self.routers), self.moe.num_experts
        wide = torch.promote_types(self.routers[0].weight.dtype, torch.float32)
        if self.moe.bias_rate:
            self.bias_RE = torch.zeros(size, dtype=wide, device=device)
        if self.moe.global_loss:
            self.load_RE = torch.ones(size, dtype=wide, device=device)
        for row, router in enumerate(self.routers):
            router.bias = None if self.bias_RE is None else self.bias_RE[row]
            router.load = None if self.load_RE is None else self.load_RE[row]

    @property
    def shards(self) -> list[ParameterShard]:
        """The buffers as whole blocks for a checkpoint, under their names in the model."""
        tensors = (("bias", self.bias_RE), ("load", self.load_RE))
        return [
            self._shard(f"blocks.{router.layer}.moe.router.{kind}", tensor[row])
            for row, router in enumerate(self.routers)
            for kind, tensor in tensors
            if tensor is not None
        ]

    def _shard(self, name: str, value_E: Tensor) -> ParameterShard:
        return ParameterShard(name, tuple(value_E.shape), (0,), tuple(value_E.shape), value_E, self._owner)

    @torch.no_grad()
    def step(self, number: int, veto: Tensor | None) -> Tensor:
        """Update biases and loads, and return the counts of the whole batch. Call after the last backward of a step.

        Returns float64 [L, E + 3]: for each layer the assignments by expert, the dropped assignments, the entropy of
        the scores (nats) summed over tokens, and the number of tokens. number: the step, from 1. veto: a bool scalar,
        true if the step's update was skipped; then nothing changes here either. Collective over the world, including
        ranks without experts. Does not wait for the device.
        """
        table = torch.zeros(
            len(self.layers), self.moe.num_experts + AFTER_LOADS, dtype=torch.float64, device=self._rows_R.device
        )
        if self.routers:
            table.index_copy_(0, self._rows_R, torch.stack([_take(router) for router in self.routers]))
        if dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            table = all_sum(table, dist.group.WORLD)
        counts_RE = table[:, :-AFTER_LOADS].index_select(0, self._rows_R)
        if self.bias_RE is not None and (not self.moe.bias_steps or number <= self.moe.bias_steps):
            _replace(self.bias_RE, updated_biases(self.bias_RE, counts_RE, self.moe.bias_rate), veto)
        if self.load_RE is not None:
            _replace(self.load_RE, loads_of(counts_RE), veto)
        return table


def _routers(stages: Iterable[nn.Module]) -> list[Any]:
    found: list[Any] = [module for stage in stages for module in stage.modules() if hasattr(module, "seen")]
    return sorted(found, key=lambda router: router.layer)


def _take(router: Any) -> Tensor:
    """Return and clear the counts of a router."""
    seen, router.seen = router.seen, None
    assert seen is not None, f"the router of layer {router.layer} had no backward with a RouterLoss"
    return seen


def _replace(old: Tensor, new: Tensor, veto: Tensor | None) -> None:
    new = new.to(old.dtype)
    # The veto is on the host if the masters are.
    old.copy_(new if veto is None else torch.where(veto.to(old.device, non_blocking=True), old, new))
