"""The step at which a run's numbers were not finite, by its event log, and what the log shows before it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import DataMissing
from ingot.rehearse.replay.found import RecordedWay
from ingot.report.diagnose.attempts import attempt_of, recorded_way
from ingot.report.diagnose.troubled import skipped_steps
from ingot.report.facts import RunData, gather, no_run_folder
from ingot.schema.accepted import rate_to_try
from ingot.schema.run import RunConfig
from ingot.trainer.checkpoint.tensor_file import STATE_NOT_FINITE
from ingot.trainer.resilience.lock import is_locked

WINDOW = 10  # steps of the log that are shown before the step


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """A step of the event log. loss and grad_norm may be NaN or infinite."""

    step: int
    loss: float
    grad_norm: float
    lr: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class NotFiniteCase:
    """A run and its step whose numbers are to be explained.

    step: that step. reason: how it was found, as text. logged: the steps of the log up to it, the newest WINDOW of them
    and it. largest: the logged step before it with the largest loss; None if there is none. guess: the loss of a
    uniform guess, ln(vocabulary). limit: a larger loss is that of useless weights. healthy: the log has nothing
    against the step.
    skipped: the steps whose updates the run skipped, in the attempt of the step. way: of the run to the step.
    running: a process trains the run now. rate_to_try: the value of optim.lr to continue with if it is too high.
    """

    root: Path
    run: RunConfig
    step: int
    reason: str
    logged: tuple[LoggedStep, ...]
    largest: LoggedStep | None
    guess: float
    limit: float
    healthy: bool
    skipped: tuple[int, ...]
    way: RecordedWay
    running: bool
    rate_to_try: float

    @property
    def exploded_before(self) -> bool:
        """True if an earlier loss was above the limit of the guard."""
        return self.largest is not None and self.largest.loss > self.limit


def find_case(root: Path, step: int | None = None) -> NotFiniteCase:
    """Return the case of the run folder `root`. step: the step to explain; None: the first of the newest steps in a row
    whose loss or gradient is not finite, else a step whose state could not be saved, or whose loss exploded.

    Raises UsageError if `root` is not a run folder, DataMissing if no step is given and the log names none.
    """
    data = gather(root)
    if data.run is None:
        raise no_run_folder(root)
    logged = _logged(data)
    guess = math.log(max(data.run.model.vocab_size, 2))
    limit = data.run.guard.loss_limit(data.run.model.vocab_size)
    found, reason = (step, "named with --step") if step is not None else _find(data, logged, guess, limit)
    before = [one for one in logged if one.step < found]
    finite = [one for one in before if math.isfinite(one.loss)]
    return NotFiniteCase(
        root=root,
        run=data.run,
        step=found,
        reason=reason,
        logged=(*before[-WINDOW:], *(one for one in logged if one.step == found)),
        largest=max(finite, key=lambda one: one.loss, default=None),
        guess=guess,
        limit=limit,
        healthy=any(one.step == found and one.is_finite and one.loss <= limit for one in logged)
        and found not in _unsaved(data),
        skipped=tuple(own for own in skipped_steps(data, found) if own < found),
        way=recorded_way(data, attempt_of(data, found)),
        running=is_locked(data.folder.lock),
        rate_to_try=rate_to_try(data.folder.accepted, data.run.optim.lr),
    )


def _logged(data: RunData) -> list[LoggedStep]:
    return [
        LoggedStep(step=step, loss=event["loss"], grad_norm=event["grad_norm"], lr=event["lr"])
        for step, event in sorted(data.steps.items())
    ]


def _find(data: RunData, logged: Iterable[LoggedStep], guess: float, limit: float) -> tuple[int, str]:
    bad = [one.step for one in logged if not one.is_finite]
    if bad:
        first = _first_in_a_row(bad)
        own = next(one for one in logged if one.step == first)
        return first, f"the log has loss {own.loss:.4g} and gradient norm {own.grad_norm:.4g}"
    unsaved = _unsaved(data)
    if unsaved:
        return max(unsaved), f"its state could not be saved ({STATE_NOT_FINITE})"
    exploded = [one.step for one in logged if one.loss > limit]
    if exploded:
        first = _first_in_a_row(exploded)
        own = next(one for one in logged if one.step == first)
        return first, f"the log has a finite loss of {own.loss:.4g}, and a uniform guess has {guess:.4g}"
    raise DataMissing(
        "E-NAN-NO-STEP",
        f"the log of {data.folder.root} has no loss or gradient norm that is not finite, up to step {data.last_step}",
        rule="steps are found in the log, which has one line every watch.log_every steps",
        fix=f"name the step: ingot explain nan {data.folder.root} --step N",
        run=str(data.folder.root),
        last_step=data.last_step,
    )


def _unsaved(data: RunData) -> list[int]:
    """Return the steps whose state was not finite when it was to be saved."""
    return [event["step"] for event in data.unsaved if event.get("code") == STATE_NOT_FINITE]


def _first_in_a_row(steps: list[int]) -> int:
    """Return the first of the newest steps that follow each other."""
    first = steps[-1]
    while first - 1 in steps:
        first -= 1
    return first
