"""The second try of a step in which the guard found something, before its update: the same batch, the same weights.

A fault of a processor that comes once does not come again, so the second try has the bits of a run without it. Data or
weights that hurt give the same bits again, and are skipped as without a second try. The host has to wait for the device
in each step to know whether a second one is needed, so it is not for every run (guard.retry).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ingot.trainer.guard.step_judge import KINDS, NORM_NOT_FINITE
from ingot.trainer.parallel.apply import ShardedModel


@dataclass(frozen=True)
class RetriedStep:
    """A step that was tried twice. found: the kinds in the first try. healthy: nothing was found in the second. same:
    both tries had the same loss and gradient norm, bit for bit."""

    step: int
    found: tuple[str, ...]
    healthy: bool
    same: bool


class StepRetry:
    """The state of a run that a forward and a backward change, as it was before the step, and the record of tries.

    stages: of this rank. scaled_loss: in fp16, a gradient that is not finite is no reason for a second try.
    """

    def __init__(self, stages: Mapping[int, nn.Module], device: torch.device, *, scaled_loss: bool):
        modules = [module for stage in stages.values() for module in stage.modules()]
        self._routers: list[Any] = [module for module in modules if hasattr(module, "seen")]
        self._terms: list[Any] = [term for module in modules for term in getattr(module, "terms", ())]
        self._device, self._scaled = device, scaled_loss
        self._sums: list[Tensor | None] = []
        self._random: list[Tensor] = []
        self._tried: list[RetriedStep] = []

    def keep(self) -> None:
        """Keep the state before the forwards of a step: sums of loss terms, and random states."""
        self._sums = [None if term.sums is None else term.sums.clone() for term in self._terms]
        self._random = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self._device))

    def is_needed(self, judged: Tensor) -> bool:
        """Return whether the step has to be tried again; the same on all ranks. judged: as StepJudge.judge returns it.
        The host waits for the device."""
        bits = int(judged[0])
        return bits > 0 and not (self._scaled and bits == NORM_NOT_FINITE)

    def undo(self, model: ShardedModel) -> None:
        """Let the run be as before the forwards: without gradients, and with parameters that are new copies of the
        masters, in case a copy was damaged."""
        for term, sums in zip(self._terms, self._sums, strict=True):
            term.sums = sums
        for router in self._routers:
            router.seen = None
        torch.set_rng_state(self._random[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random[1], self._device)
        for shard in model.shards:
            shard.grad = None
        model.publish()

    def record(self, step: int, first: Sequence[Tensor], second: Sequence[Tensor], judged: Sequence[Tensor]) -> None:
        """Take in the two tries of `step`. first, second: loss and gradient norm of each, the same on all ranks.
        judged: of each."""
        bits, again = (int(one[0]) for one in judged)
        same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
        found = tuple(name for bit, name in KINDS.items() if bits & bit)
        self._tried.append(RetriedStep(step, found, healthy=again == 0, same=same))

    def take(self) -> list[RetriedStep]:
        """Return the steps that were tried twice since the last call."""
        tried, self._tried = self._tried, []
        return tried
