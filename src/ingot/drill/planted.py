"""Faults in the ranks of a copy: a callback that plants what is planned (plan.py), and changes to a step that it uses.

A copy of a drill has it as a callback of a plug-in, so a run that is not drilled has none of this. A step is changed
where no callback is called: the batch before the forward, the gradients before their norm, the rate of an update.
"""

import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.drill.job import RUN_VARIABLE
from ingot.drill.plan import BITS, LOUD, NEVER, STAYS, UNTIL_REPAIRED, FaultPlan, PlannedFault
from ingot.plugins.callback import StepCallback, StepNumbers
from ingot.schema.guard_record import read_measures
from ingot.schema.run_folder import RunFolder
from ingot.trainer import step as trainer_step
from ingot.trainer.integrity.recompute import RecomputedGradients


@dataclass
class _Changes:
    """The changes to a step: of the batch, of the learning rate of a step, of the rank's own gradients before they are
    reduced, if the run computes them twice, and the call before the gradient norm. optimizer: of the run."""

    batch: Callable[[Any], Any] = lambda batch: batch
    rate: Callable[[int, float], float] = lambda step, rate: rate
    own_gradients: Callable[[int, Tensor], None] = lambda step, buffer: None
    before_norm: Callable[[int], None] = lambda step: None
    step: int = 0
    optimizer: Any = None


_FIRST_ELEMENTS = 16
_LEFT_OUT = 7  # elements of a collective that one rank leaves out: no other one has so many
_changes: list[_Changes] = []  # one, once the functions of the step are replaced


def change_steps(**changes: Callable) -> None:
    """Change the steps of this process from now on: `batch`, `rate`, `own_gradients` and `before_norm` as in _Changes.
    A later call replaces what it names, because a rank may start again in its process."""
    if not _changes:
        _changes.append(_Changes())
        _replace_functions(_changes[0])
    for name, change in changes.items():
        setattr(_changes[0], name, change)


def _replace_functions(now: _Changes) -> None:
    # A step that is tried again calls each of these a second time, except the update.
    forward_backward, measure = trainer_step.forward_backward, trainer_step.measure
    update = trainer_step.update_measured
    norm, take = trainer_step.gradient_norm_and_loss, RecomputedGradients.take

    def changed_forward_backward(parts, batch):
        now.step, now.optimizer = batch.step, parts.optimizer
        return forward_backward(parts, now.batch(batch))

    def changed_take(self, number, gradients):
        if not self.apart:
            now.own_gradients(now.step, gradients)
        take(self, number, gradients)

    def changed_measure(parts, step, loss):  # a program may have computed the loss without forward_backward
        now.step, now.optimizer = step, parts.optimizer
        return measure(parts, step, loss)

    def changed_update(parts, step, measured, lr):
        return update(parts, step, measured, now.rate(step, lr))

    def changed_norm(*arguments, **keywords):
        now.before_norm(now.step)
        return norm(*arguments, **keywords)

    trainer_step.forward_backward, RecomputedGradients.take = changed_forward_backward, changed_take
    trainer_step.measure, trainer_step.update_measured = changed_measure, changed_update
    trainer_step.gradient_norm_and_loss = changed_norm


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element of a contiguous tensor in place. bit: 0 is the lowest of the element."""
    octets = tensor.detach().view(-1).view(torch.uint8)
    octets[element * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)


def hold_interpreter_lock() -> None:
    """Stay in native code that never releases the interpreter lock, without end."""
    sum(itertools.repeat(0))


def wait_for_ever() -> None:
    """Wait as a program that waits for something else than a collective."""
    signal.sigwait([signal.SIGWINCH])


def with_tokens(batch: Any, tokens: Tensor) -> Any:
    """Return a batch with other tokens. tokens: int64 [A, B, T + 1]."""
    return replace(batch, inputs=tokens[..., :-1], targets=tokens[..., 1:])


class PlantedFaults(StepCallback):
    """Plants the faults of the plan of this copy. All ranks learn of a fault at the same log line."""

    def __init__(self, run, options):
        self.run, self.folder = run, RunFolder(Path(os.environ[RUN_VARIABLE]))
        self.plan, self.updated = FaultPlan(self.folder.root), 0
        starts, faults = self.plan.starts(), self.plan.faults()
        self.started: list[tuple[PlannedFault, int]] = [(faults[number], starts[number]) for number in sorted(starts)]
        change_steps(
            batch=self.on_batch, rate=self.on_rate, own_gradients=self.on_own_gradients, before_norm=self.on_norm
        )

    # -- what happens in a step --

    def on_batch(self, batch: Any) -> Any:
        """Return the batch, or one whose tokens are all the last one of the vocabulary."""
        if not self._due("document", batch.step):
            return batch
        shape = (*batch.inputs.shape[:-1], batch.inputs.shape[-1] + 1)
        token = self.run.config.model.vocab_size - 1
        return with_tokens(batch, torch.full(shape, token, dtype=torch.int64, device=batch.inputs.device))

    def on_rate(self, step: int, rate: float) -> float:
        if self._due("still", step):
            return 0.0
        due = self._due("rate", step)
        return due[0].factor * self.run.config.optim.lr if due else rate

    def on_norm(self, step: int) -> None:
        if self._due("nan", step):
            gradients = [piece.grad for piece in self.run.pieces if piece.grad is not None and piece.grad.numel()]
            for gradient in gradients[:1]:
                gradient.view(-1)[0] = math.nan

    def on_own_gradients(self, step: int, buffer: Tensor) -> None:
        """Flip a bit of one of the first elements of a buffer of gradients: its end may be padding."""
        for number, fault in self._bits_due("gradient", step):
            self._flip(number, fault, step, "gradient", buffer.view(-1)[:_FIRST_ELEMENTS])

    def on_gradients(self, step: int) -> None:
        for fault in self._due("slow", step):
            time.sleep(fault.seconds if fault.rank == self.run.rank else 0.0)
        self._flip_state(step)

    def _flip_state(self, step: int) -> None:
        """Flip the bit of a weight or of a moment, after a step whose state was hashed, and before that of this step
        is."""
        if self.updated != step - 1:
            return
        pieces = [piece for piece in self.run.pieces if piece.value.numel()]
        for number, fault in self._bits_due("flip", step):
            piece = pieces[fault.piece % len(pieces)]
            self._flip(number, fault, step, piece.name, piece.value)
        for number, fault in self._bits_due("moment", step):
            name = pieces[fault.piece % len(pieces)].name
            moments = {kind: one for kind, one in _changes[0].optimizer.moments()[name].items() if one.numel() > 1}
            for kind in sorted(moments)[fault.element % max(len(moments), 1) :][:1]:
                self._flip(number, fault, step, f"{kind}.{name}", moments[kind])

    def _bits_due(self, kind: str, step: int) -> list[tuple[int, PlannedFault]]:
        """Return the wrong bits of this kind that this rank has now, with their numbers."""
        due = [(n, fault) for n, (fault, start) in enumerate(self.started) if fault.kind == kind and step >= start]
        return [(n, fault) for n, fault in due if fault.rank == self.run.rank and self.plan.planted(n) is None]

    def _flip(self, number: int, fault: PlannedFault, step: int, name: str, tensor: Tensor) -> None:
        element, bit = fault.element % tensor.numel(), fault.bit % (8 * tensor.element_size())
        self.plan.record(number, step=step, tensor=name, bit=bit)
        flip_bit(tensor, element, bit)

    def on_update(self, step: int) -> None:
        self.updated = step
        for number, (fault, start) in enumerate(self.started):
            if fault.kind in LOUD and step == start:
                self._fail(number, fault, step)

    def _fail(self, number: int, fault: PlannedFault, step: int) -> None:
        """Let the rank of a fault hang, end or leave out a collective, unless that is over."""
        own = fault.rank == self.run.rank
        comes_again = fault.kind in UNTIL_REPAIRED
        if self.plan.is_repaired(number) if comes_again else not own or self.plan.planted(number) is not None:
            return
        if fault.kind == "leave" and not own:
            dist.all_reduce(torch.ones(_LEFT_OUT, device=self.run.device))
        if not own:
            return
        self.plan.record(number, step=step)
        if fault.kind == "abort":
            os.abort()
        elif fault.kind == "hold":
            hold_interpreter_lock()
        elif fault.kind == "wait":
            wait_for_ever()

    def _due(self, kind: str, step: int) -> list[PlannedFault]:
        """Return the faults of this kind that a step has, and record that they are planted."""
        due = []
        for number, (fault, start) in enumerate(self.started):
            if fault.kind == kind and start <= step < start + fault.steps and not self._is_past(fault, start):
                due.append(fault)
                if self.run.rank == 0:
                    self.plan.record(number, step=start)
        return due

    def _is_past(self, fault: PlannedFault, start: int) -> bool:
        """Return whether the guard took a measure against a fault that does not come again. The measure is recorded
        before it takes effect, so a rank that is killed then, and starts again, finds the same."""
        returns = fault.kind in STAYS or not fault.once
        return not returns and any(one.first >= start for one in read_measures(self.folder.guard))

    # -- which fault comes next --

    def on_line(self, steps: Sequence[StepNumbers]) -> dict[str, float]:
        number, start = self._next(steps) if self.run.rank == 0 else (0, 0)
        shared = torch.tensor([number, start], dtype=torch.float64, device=self.run.device)
        number, start = map(int, self.run.sum_over_ranks(shared).tolist())
        if number:
            self.started.append((self.plan.faults()[number - 1], start))
        return {}

    def _next(self, steps: Sequence[StepNumbers]) -> tuple[int, int]:
        """Return the number of a fault that begins now, counted from 1, and its first step; (0, 0) without one."""
        step, number, faults = steps[-1].step, len(self.started), self.plan.faults()
        if number == len(faults) or (self.started and not self._is_over(number - 1, step)):
            return 0, 0
        fault = faults[number]
        if step + 1 < fault.earliest:
            return 0, 0
        # A row of skipped steps this soon after another one would be the same trouble to the guard.
        if any(step - one.last < self.run.config.guard.calm_steps for one in read_measures(self.folder.guard)):
            return 0, 0
        start = step + 1 if step < fault.latest else NEVER
        self.plan.start(number, start)
        return number + 1, start

    def _is_over(self, number: int, step: int) -> bool:
        fault, start = self.started[number]
        if start == NEVER:
            return True
        if fault.kind in UNTIL_REPAIRED:
            return self.plan.is_repaired(number)
        if fault.kind in BITS | LOUD:
            planted = self.plan.planted(number)
            return planted is not None and step > planted["step"]
        if fault.once and fault.kind in ("nan", "rate") and not self._is_past(fault, start):
            return False
        return step >= start + fault.steps
