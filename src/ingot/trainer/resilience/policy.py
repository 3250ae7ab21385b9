"""The policy of a run: for every step, it decides whether to make the update, and how to continue.

A policy is called twice per step. Before the update, `veto` decides on the device, without waiting, whether to skip the
update. After it, `verdict` decides how to continue; the results stay on the device until a policy reads them. All
ranks must reach the same verdict, so a policy uses values that are equal on all ranks: the gradient norm, and the
StepNumbers that `StepResult.read` returns.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ingot.errors import RunFailed
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema.checkpoint import Health
from ingot.schema.run_folder import RunFolder
from ingot.trainer.mesh.collectives import mean_over_ranks

SKIPS, SKIPS_AMONG = 10, 100  # without a loss scale: a device or a shard that fails now and then
SKIPS_IN_A_ROW = 3  # without a loss scale: one batch may be bad, but if several in a row are, the weights are
EXPLODED = 2.0  # in units of the loss of a uniform guess, ln(vocabulary); training starts close to 1
VETOES_IN_A_ROW = 50  # each halves the loss scale: 50 vetoes turn 2^16 into 2^-34, so the cause is not the scale


@dataclass(frozen=True)
class StepResult:
    """The result of a step, without waiting for the device: loss, grad_norm and skipped are scalars on the device.

    loss: the loss of the tokens that this rank reads, known on ranks with the last pipeline stage. grad_norm: global,
    before clipping. skipped: whether the update was vetoed; None if the policy never vetoes.
    readers: the global ranks whose mean loss is the loss of the step; each has its own tokens, and all have equally
    many. None means all ranks.
    experts: float64 [L, E + 3], the router statistics of the whole batch (parallel/balance.py); None without experts.
    line: at a log line, the numbers of all steps since the previous line; empty between lines.
    """

    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor | None = None
    readers: Sequence[int] | None = None
    line: Sequence[StepNumbers] = ()
    experts: Tensor | None = None

    def read(self) -> StepNumbers:
        """Return the StepNumbers of the step. The host waits for the device, unless `line` has them. Collective."""
        return self.line[-1] if self.line else read_steps([self])[0]


def read_steps(steps: Sequence[StepResult]) -> list[StepNumbers]:
    """Return the StepNumbers of each of `steps`, with one wait for the device and one collective for all."""
    kept = torch.zeros((), dtype=torch.bool, device=steps[0].loss.device)
    columns = (
        [s.loss for s in steps],
        [s.grad_norm for s in steps],
        [kept if s.skipped is None else s.skipped.reshape(()) for s in steps],
    )
    # If parameters are on the host, so is the norm.
    values = [torch.stack(column).double().to(kept.device) for column in columns]
    losses, norms, skipped = torch.stack(values).cpu().numpy()
    losses = mean_over_ranks(losses, steps[0].readers)
    return [
        StepNumbers(result.step, float(loss), float(norm), bool(was_skipped))
        for result, loss, norm, was_skipped in zip(steps, losses, norms, skipped, strict=True)
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


class DefaultPolicy:
    """A policy that skips updates whose gradient is not finite, and ends a run that does not recover.

    The decision to skip is made on the device in every step; results are read at log lines. A run ends after
    SKIPS_IN_A_ROW skipped steps or SKIPS of the last SKIPS_AMONG, and if the loss at a log line is EXPLODED times that
    of a uniform guess. So weights that cannot be used are never saved.

    scaled_loss: with a dynamic loss scale (fp16), gradients overflow now and then; only VETOES_IN_A_ROW skipped steps
    are a failure. vocab_size: of the model; 0 does not judge the size of the loss. from_weights: the run began with the
    weights of a folder, which may have a large loss: it has to reach EXPLODED times the first one of the attempt, too.
    """

    def __init__(
        self, folder: RunFolder, *, scaled_loss: bool = False, vocab_size: int = 0, from_weights: bool = False
    ):
        self.folder, self.scaled_loss = folder, scaled_loss
        self.largest_loss = EXPLODED * math.log(vocab_size) if vocab_size > 1 else math.inf
        self._from_weights, self._first_loss = from_weights, 0.0  # the first loss of this attempt
        self._recent: deque[bool] = deque(maxlen=SKIPS_AMONG)  # whether each of the last steps was skipped
        self._vetoes = 0  # skipped steps in a row, up to the last log line
        self._last: StepNumbers | None = None  # the last step that was not skipped, up to the last log line

    def veto(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        return ~torch.isfinite(grad_norm)

    def health(self) -> Health:
        if self._last is None:
            return Health()
        values = f"loss {self._last.loss:.5g}, gradient norm {self._last.grad_norm:.5g} at step {self._last.step}"
        return Health(state="healthy", reason=values, by="default policy")

    def verdict(self, result: StepResult) -> Verdict:
        self.judge(result.line)
        return Verdict.CONTINUE

    def judge(self, line: Sequence[StepNumbers]) -> None:
        for numbers in line:
            self._judge(numbers)
        kept = [numbers for numbers in line if not numbers.skipped]
        if kept and self._from_weights and self._first_loss == 0.0:
            self._first_loss = kept[0].loss
        if kept:
            self._judge_size(kept[-1])

    def _judge(self, numbers: StepNumbers) -> None:
        """Raise RunFailed if nothing may be saved after this step."""
        self._vetoes = self._vetoes + 1 if numbers.skipped else 0
        self._recent.append(numbers.skipped)
        values = f"loss {numbers.loss} and gradient norm {numbers.grad_norm} at step {numbers.step}"
        if self.scaled_loss and self._vetoes >= VETOES_IN_A_ROW:
            raise RunFailed(
                "E-LOSS-SCALE",
                f"{values}: {self._vetoes} steps in a row were skipped",
                rule="gradients that are not finite at any loss scale are not an fp16 overflow",
                fix="lower optim.lr, or set train.precision = 'bf16', then run the same command: it continues from the "
                "last checkpoint",
                step=numbers.step,
                skipped=self._vetoes,
            )
        many = sum(self._recent)
        lost = not self.scaled_loss and (self._vetoes >= SKIPS_IN_A_ROW or many >= SKIPS)
        if lost or not (numbers.skipped or numbers.is_finite):
            raise RunFailed(
                "E-LOSS-NOT-FINITE",
                values + (f", and {many} of the last {len(self._recent)} steps were skipped" if lost else ""),
                rule="a step whose gradient is not finite is skipped, but training does not continue after "
                f"{SKIPS_IN_A_ROW} such steps in a row or {SKIPS} of {SKIPS_AMONG}, or with a loss that is not finite; "
                "no such weights were saved",
                fix="lower optim.lr, raise schedule.warmup_steps or set optim.clip_norm, then run the same command: it "
                f"continues from the last checkpoint. The documents of the step: {self._trace(numbers.step)}",
                step=numbers.step,
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                skipped=self._vetoes,
            )
        if not numbers.skipped:
            self._last = numbers

    def _judge_size(self, numbers: StepNumbers) -> None:
        """Raise RunFailed if the loss is far above that of a model that knows nothing, and above the first one."""
        if numbers.loss > max(self.largest_loss, EXPLODED * self._first_loss):
            raise RunFailed(
                "E-LOSS-EXPLODED",
                f"loss {numbers.loss:.4g} at step {numbers.step}",
                rule=f"a uniform guess has a loss of {self.largest_loss / EXPLODED:.4g}; weights with {EXPLODED:g} "
                "times that loss are useless, and no such weights were saved",
                fix="lower optim.lr or raise schedule.warmup_steps, then run the same command: it continues from the "
                "last checkpoint. In the first steps: check that tokenizer and weights belong together. "
                f"The documents of the step: {self._trace(numbers.step)}",
                step=numbers.step,
                loss=numbers.loss,
                largest=self.largest_loss,
            )

    def _trace(self, step: int) -> str:
        return f"ingot data trace --run {self.folder.root} --step {step}"
