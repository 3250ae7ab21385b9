"""The second try of a step in which the guard found something, before its update: the same batch, the same weights.

A fault of a processor that comes once does not come again, so the second try has the bits of a run without it. Data or
weights that hurt give the same bits again, and are skipped as without a second try. The host has to wait for the device
in each step to know whether a second one is needed, so it is not for every run (guard.retry).

A device that fails every few steps would be healed each time, and nobody would hear of it: the ranks that computed
other bits of their own in the second try are named, and repeated faults are an alert.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.alert import TRANSIENT, Alert
from ingot.schema.run_folder import RunFolder
from ingot.trainer.guard.step_judge import KINDS, NORM_NOT_FINITE
from ingot.trainer.mesh.collectives import gather_from, largest_of_ranks
from ingot.trainer.parallel.apply import ShardedModel
from ingot.units import counted

_MOST_HEALED = 3  # steps, of all attempts: sound devices fail in months


@dataclass(frozen=True)
class RetriedStep:
    """A step that was tried twice. found: the kinds in the first try. healthy: nothing was found in the second. same:
    both tries had the same loss and gradient norm, bit for bit. ranks: those of the copies of the model whose own loss
    or gradients had other bits, of which one has the fault; (): not known, if none had or all."""

    step: int
    found: tuple[str, ...]
    healthy: bool
    same: bool
    ranks: tuple[int, ...] = ()


class Try(NamedTuple):
    """A try of a step before its update. judged: as StepJudge.judge returns it. shared: loss and gradient norm of the
    step, the same on all ranks. own: this rank's loss, and the sample of its gradients if there is one."""

    judged: Tensor
    shared: tuple[Tensor, ...]
    own: tuple[Tensor, ...]


class StepRetry:
    """The state of a run that a forward and a backward change, as it was before the step, and the record of tries.

    stages: of this rank. scaled_loss: in fp16, a gradient that is not finite is no reason for a second try. data_rank:
    the same on all ranks of a copy of the model.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], device: torch.device, *, scaled_loss: bool, data_rank: int, ranks: int
    ):
        modules = [module for stage in stages.values() for module in stage.modules()]
        self._routers: list[Any] = [module for module in modules if hasattr(module, "seen")]
        self._terms: list[Any] = [term for module in modules for term in getattr(module, "terms", ())]
        self._device, self._scaled, self._data_rank, self._ranks = device, scaled_loss, data_rank, range(ranks)
        self._found = 0
        self._sums: list[Tensor | None] = []
        self._random: list[Tensor] = []
        self._tried: list[RetriedStep] = []
        self._recorded: list[Mapping[str, Any]] | None = None

    def keep(self) -> None:
        """Keep the state before the forwards of a step: sums of loss terms, and random states."""
        self._sums = [None if term.sums is None else term.sums.clone() for term in self._terms]
        self._random = [torch.get_rng_state()]
        if self._device.type == "cuda":
            self._random.append(torch.cuda.get_rng_state(self._device))

    def is_needed(self, judged: Tensor) -> bool:
        """Return whether the step has to be tried again. judged: as StepJudge.judge returns it. Collective: the window
        of a rank's judge may be damaged, and a rank that tried again alone would wait for the others for ever. The
        host waits for the device."""
        self._found = int(largest_of_ranks(float(judged[0]))[0])
        return self._found > 0 and not (self._scaled and self._found == NORM_NOT_FINITE)

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

    def record(self, step: int, first: Try, second: Try) -> None:
        """Take in the two tries of `step`. Collective."""
        same = all(map(_same_bits, first.shared, second.shared))
        changed = not all(map(_same_bits, first.own, second.own))
        rows = gather_from(self._ranks, np.array([changed, self._data_rank], dtype=np.float64))
        parts = {part for changed, part in rows.tolist() if changed}
        ranks = tuple(rank for rank, (_, part) in enumerate(rows.tolist()) if part in parts)
        found = tuple(name for bit, name in KINDS.items() if self._found & bit)
        healthy = int(second.judged[0]) == 0
        known = ranks if len(ranks) < len(self._ranks) else ()
        self._tried.append(RetriedStep(step, found, healthy=healthy, same=same, ranks=known))

    def take(self) -> list[RetriedStep]:
        """Return the steps that were tried twice since the last call."""
        tried, self._tried = self._tried, []
        return tried

    def of_all_attempts(self, folder: RunFolder, newest: Iterable[RetriedStep]) -> Sequence[Mapping[str, Any]]:
        """Return the `retried` events of a run so far. newest: those of a log line, which are in the log already.

        The log is read once in an attempt: that of a long run takes seconds.
        """
        if self._recorded is None:
            self._recorded = list(read_events(folder.events, events.RETRIED))
        else:
            self._recorded += map(asdict, newest)
        return self._recorded


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two scalars of one dtype have the same bits: a value that is not finite equals itself."""
    return torch.equal(*(each.detach().reshape(1).view(torch.uint8) for each in (one, other)))


def repeated_faults(log: Iterable[Mapping[str, Any]], new: int) -> Alert | None:
    """Return the alert of a run whose second tries heal faults again and again: at the third of them, the sixth, and
    so on, each twice as many. log: its `retried` events, also those of earlier attempts. new: how many healed faults at
    the end of it were not counted before."""
    healed = [event for event in log if event.get("healthy")]
    limit = _MOST_HEALED
    while limit <= len(healed) - new:
        limit *= 2
    if len(healed) < limit:
        return None
    named = Counter(rank for event in healed for rank in event.get("ranks", ()))
    return Alert(
        alert=TRANSIENT,
        step=healed[-1]["step"],
        since=healed[0]["step"],
        value=len(healed),
        limit=limit,
        places=tuple(f"rank {rank} ({counted(times, 'time')})" for rank, times in named.most_common()),
        cause="`ingot doctor` looks for faults of a machine",
    )
