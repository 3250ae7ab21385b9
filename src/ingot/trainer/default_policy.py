"""The policy of `ingot train`: skip what would harm the weights, go back, and end a run that does not recover."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ingot.errors import IngotError, RunFailed
from ingot.plugins.callback import StepNumbers, Verdict
from ingot.schema.accepted import command_with_rate, rate_to_try
from ingot.schema.checkpoint import Health
from ingot.schema.guard_record import FAILED, GuardState, Measure, proven_to, with_those_of
from ingot.schema.run_folder import RunFolder
from ingot.trainer.guard.exploded import LossLimit
from ingot.trainer.guard.ladder import Ladder
from ingot.trainer.guard.step_judge import KINDS, LOSS_NOT_FINITE, NORM_NOT_FINITE, without_overflow
from ingot.trainer.resilience.policy import StepResult

SKIPS, SKIPS_AMONG = 10, 100  # without a loss scale: a device or a shard that fails now and then
SKIPS_IN_A_ROW = 3  # without a loss scale: one batch may be bad, but if several in a row are, the weights are
VETOES_IN_A_ROW = 50  # each halves the loss scale: 50 vetoes turn 2^16 into 2^-34, so the cause is not the scale

OVERFLOW = KINDS[NORM_NOT_FINITE]
# What was found, by the error that ends the run because of its numbers.
_FOUND = {"E-LOSS-NOT-FINITE": KINDS[LOSS_NOT_FINITE], "E-LOSS-SCALE": OVERFLOW, "E-LOSS-EXPLODED": "loss exploded"}


class DefaultPolicy:
    """A policy that skips updates whose gradient is not finite, and ends a run that does not recover. With a ladder, it
    goes back and takes the measures of the guard first.

    The decision to skip is made on the device in every step; results are read at log lines. Without a ladder, a run
    ends after SKIPS_IN_A_ROW skipped steps or SKIPS of the last SKIPS_AMONG; with one or without, if the loss at a log
    line is above the limit of the guard (guard/exploded.py). So weights that cannot be used are never saved.

    scaled_loss: with a dynamic loss scale (fp16), gradients overflow now and then; only VETOES_IN_A_ROW skipped steps
    are a failure. limit: of the loss. lr: optim.lr of the run. recorded: the measures of the guard so far. ladder:
    takes more against skipped steps; None: the run ends after too many of them. record: called on every rank with all
    measures before the run ends because of its numbers, so that the next start knows which checkpoints are too close
    to that; None: nothing is recorded. proven_steps: of the guard. say: prints a line.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        scaled_loss: bool = False,
        limit: LossLimit | None = None,
        lr: float = 0.0,
        recorded: Sequence[Measure] = (),
        ladder: Ladder | None = None,
        record: Callable[[Sequence[Measure]], None] | None = None,
        proven_steps: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._recorded, self._record, self._say = list(recorded), record, say
        self._proven_steps, self._changed_after = proven_steps, 0
        self.folder, self.scaled_loss, self.ladder = folder, scaled_loss, ladder
        self._lr, self._limit = lr, limit or LossLimit(None, 0)
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

    def state(self) -> GuardState:
        return self.ladder.state() if self.ladder else GuardState(measures=tuple(self._recorded))

    def measures(self) -> Sequence[Measure]:
        return self.ladder.measures if self.ladder else self._recorded

    def restore(self, state: GuardState, *, changed: bool, new_window: bool, changed_after: int = 0) -> None:
        self._recent.clear()
        self._vetoes, self._last, self._changed_after = 0, None, changed_after
        self._recorded = with_those_of(self._recorded, state.measures)
        if self.ladder:
            self.ladder.restore(state, changed=changed, new_window=new_window, changed_after=changed_after)

    def verdict(self, result: StepResult) -> Verdict:
        self.judge(result.line)
        if self.ladder is None or not result.line:
            return Verdict.CONTINUE
        return self.ladder.verdict()

    def judge(self, line: Sequence[StepNumbers]) -> None:
        try:
            self._judge_line(line)
        except RunFailed as error:
            try:
                self._record_end(error)
            except (IngotError, OSError) as failed:  # a full disk, for example: the run ends for its own reason
                reason = getattr(failed, "found", failed)
                self._say(
                    f"WARNING   this end is not recorded ({reason}): the next start may continue from a checkpoint "
                    "right before it"
                )
            raise

    def _record_end(self, error: RunFailed) -> None:
        """Record that the run ends because of its numbers: checkpoints with too few steps before that are in doubt
        at the next start. The same end once more, after such a start, puts no others in doubt."""
        if self._record is None or error.code not in _FOUND:
            return
        last, skipped = error.facts["step"], error.facts.get("skipped", 0)
        assert isinstance(last, int) and isinstance(skipped, int)
        first = last - max(skipped, 1) + 1
        before = proven_to(first, self._proven_steps, self._changed_after)
        end = Measure(action=FAILED, first=first, last=last, found=(_FOUND[error.code],), proven_to=before, lr=self._lr)
        measures = self.ladder.measures if self.ladder else self._recorded
        if end not in measures:
            measures.append(end)
            self._record(measures)

    def _judge_line(self, line: Sequence[StepNumbers]) -> None:
        trained = [numbers for numbers in line if not numbers.passed]
        if self.ladder:
            self.ladder.look([without_overflow(numbers) for numbers in line] if self.scaled_loss else line)
        for numbers in trained:
            self._judge(numbers)
        kept = [numbers for numbers in trained if not numbers.skipped]
        self._judge_sizes(kept)

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
                fix="continue from the last checkpoint with train.precision = 'bf16', or with a lower rate: "
                f"{self._with_lower_rate()}",
                step=numbers.step,
                skipped=self._vetoes,
            )
        many = sum(self._recent)
        too_many = self._vetoes >= SKIPS_IN_A_ROW or many >= SKIPS
        lost = self.ladder is None and not self.scaled_loss and too_many
        if lost or not (numbers.skipped or numbers.is_finite):
            raise RunFailed(
                "E-LOSS-NOT-FINITE",
                values + (f", and {many} of the last {len(self._recent)} steps were skipped" if lost else ""),
                rule="a step whose gradient is not finite is skipped, but training does not continue after "
                f"{SKIPS_IN_A_ROW} such steps in a row or {SKIPS} of {SKIPS_AMONG}, or with a loss that is not finite; "
                "no such weights were saved",
                fix="continue from the last checkpoint with a longer schedule.warmup_steps, with optim.clip_norm, or "
                f"with a lower rate: {self._with_lower_rate()}. The cause: ingot explain nan {self.folder.root} --step "
                f"{numbers.step}. Unusual documents of the step: {self._documents(numbers.step)}",
                step=numbers.step,
                loss=numbers.loss,
                grad_norm=numbers.grad_norm,
                skipped=self._vetoes,
            )
        if not numbers.skipped:
            self._last = numbers

    def _judge_sizes(self, kept: Sequence[StepNumbers]) -> None:
        """Raise RunFailed if the last loss of `kept` is above the limit. The error names the step from which on they
        are."""
        if large := self._limit.above(kept):
            numbers, last = large[0], large[-1]
            still = f", and {last.loss:.4g} at step {last.step}" if last is not numbers else ""
            raise RunFailed(
                "E-LOSS-EXPLODED",
                f"loss {numbers.loss:.4g} at step {numbers.step}{still}",
                rule=f"a uniform guess has a loss of {self._limit.guess:.4g}; weights with {self._limit.ratio:g} times "
                "that loss are useless (guard.exploded_ratio), and no such weights were saved",
                fix="continue from the last checkpoint with a longer schedule.warmup_steps, or with a lower rate: "
                f"{self._with_lower_rate()}. In the first steps: check that tokenizer and weights belong together. "
                f"Unusual documents of the step: {self._documents(numbers.step)}",
                step=numbers.step,
                loss=numbers.loss,
                largest=self._limit.ratio * self._limit.guess,
            )

    def _with_lower_rate(self) -> str:
        return command_with_rate(self.folder.root, rate_to_try(self.folder.accepted, self._lr))

    def _documents(self, step: int) -> str:
        return f"ingot explain spike {self.folder.root} --step {step}"
