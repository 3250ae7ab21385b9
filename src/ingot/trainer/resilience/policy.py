"""The policy of a run: for every step, it decides whether to make the update, and how to continue.

A policy is called twice per step. Before the update, `veto` decides on the device, without waiting, whether to skip the
update. After it, `verdict` decides how to continue; the results stay on the device until a policy reads them. All
ranks must reach the same verdict, so a policy uses values that are equal on all ranks: the gradient norm, and the
StepNumbers that `StepResult.read` returns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema.checkpoint import Health
from ingot.schema.guard_record import GuardState, Measure
from ingot.trainer.guard.step_judge import finding
from ingot.trainer.mesh.collectives import mean_over_ranks


@dataclass(frozen=True)
class StepResult:
    """The result of a step, without waiting for the device: loss, grad_norm and skipped are scalars on the device.

    loss: the loss of the tokens that this rank reads, known on ranks with the last pipeline stage. grad_norm: global,
    before clipping. skipped: whether the update was vetoed; None if the policy never vetoes.
    readers: the global ranks whose mean loss is the loss of the step; each has its own tokens, and all have equally
    many. None means all ranks.
    experts: float64 [L, E + 3], the router statistics of the whole batch (parallel/balance.py); None without experts.
    line: at a log line, the numbers of all steps since the previous line; empty between lines.
    judged: float64 [4], what the guard found (guard/step_judge.py); None without a guard. passed: the data of the step
    were passed: there was no forward, and loss and grad_norm have no meaning.
    """

    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor | None = None
    readers: Sequence[int] | None = None
    line: Sequence[StepNumbers] = ()
    experts: Tensor | None = None
    judged: Tensor | None = None
    passed: bool = False

    def read(self) -> StepNumbers:
        """Return the StepNumbers of the step. The host waits for the device, unless `line` has them. Collective."""
        return self.line[-1] if self.line else read_steps([self])[0]


def passed_step(step: int, lr: float, device: torch.device | str) -> StepResult:
    """Return the result of a step whose data are passed: nothing is computed, and nothing changes."""
    nothing = torch.zeros((), dtype=torch.float64, device=device)
    return StepResult(step, lr, nothing, nothing, passed=True)


def read_steps(steps: Sequence[StepResult]) -> list[StepNumbers]:
    """Return the StepNumbers of each of `steps`, with one wait for the device and one collective for all."""
    trained = [one for one in steps if not one.passed]
    numbers = {one.step: one for one in _read_trained(trained)} if trained else {}
    passed = {
        one.step: StepNumbers(one.step, math.nan, math.nan, skipped=True, passed=True) for one in steps if one.passed
    }
    return [(numbers | passed)[one.step] for one in steps]


def _read_trained(steps: Sequence[StepResult]) -> list[StepNumbers]:
    kept = torch.zeros((), dtype=torch.bool, device=steps[0].loss.device)
    fine = torch.zeros(4, dtype=torch.float64, device=steps[0].loss.device)
    columns = (
        torch.stack([s.loss for s in steps])[:, None],
        torch.stack([s.grad_norm for s in steps])[:, None],
        torch.stack([kept if s.skipped is None else s.skipped.reshape(()) for s in steps])[:, None],
        torch.stack([fine if s.judged is None else s.judged for s in steps]),
    )
    # If parameters are on the host, so is the norm.
    table = torch.cat([column.double().to(kept.device) for column in columns], dim=1).cpu().numpy()
    losses = mean_over_ranks(table[:, 0], steps[0].readers)
    return [
        StepNumbers(one.step, float(loss), float(row[1]), bool(row[2]), finding=finding(tuple(row[3:].tolist())))
        for one, loss, row in zip(steps, losses, table, strict=True)
    ]


class Policy(Protocol):
    """The two decisions about each step."""

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Return whether to skip this step's update, a bool scalar on the device; None means never. Must not wait.

        Called on every rank, after gradients were reduced and before the update. grad_norm is the same on all ranks,
        and the result must be, too; loss is not (see StepResult).
        """
        ...

    def health(self) -> Health:
        """Return the judgment of the weights after the last step that had a verdict, for a checkpoint of that step."""
        ...

    def verdict(self, result: StepResult) -> Verdict:
        """Return how to continue after this step; must be the same on every rank. Any verdict takes effect at once.

        Called on every rank after every step, and before the step is saved. Raises RunFailed to end the run.
        """
        ...

    def judge(self, line: Sequence[StepNumbers]) -> None:
        """Raise RunFailed if nothing may be saved after the steps of `line`.

        Called on every rank after a verdict to stop between two log lines, which did not have these numbers.
        """
        ...

    def state(self) -> GuardState:
        """Return what a checkpoint of the last step that had a verdict keeps of the policy. May wait for the device."""
        ...

    def measures(self) -> Sequence[Measure]:
        """Return the measures of the guard so far, oldest first."""
        ...

    def restore(self, state: GuardState, *, changed: bool, new_window: bool, changed_after: int = 0) -> None:
        """Go on as after the step whose checkpoint has `state`. changed: settings or data are others, so earlier
        skipped steps do not count. new_window: earlier losses are no measure, as after a change of the data.
        changed_after: the step after which the newest accepted change of training holds; 0: there is none."""
        ...


class Unwatched:
    """A policy that always continues: for benchmarks and dry runs, which have no run folder."""

    def health(self) -> Health:
        return Health()

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        return None

    def verdict(self, result: StepResult) -> Verdict:
        return Verdict.CONTINUE

    def judge(self, line: Sequence[StepNumbers]) -> None:
        pass

    def state(self) -> GuardState:
        return GuardState()

    def measures(self) -> Sequence[Measure]:
        return ()

    def restore(self, state: GuardState, *, changed: bool, new_window: bool, changed_after: int = 0) -> None:
        pass
