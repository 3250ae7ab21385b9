"""The steps of a run in which its log has trouble."""

import math
from dataclasses import dataclass
from statistics import median

from ingot.report.facts import RunData


@dataclass(frozen=True, kw_only=True)
class TroubledStep:
    """A step in which the run found trouble. found: the kinds. loss, grad_norm: NaN if they are not in the log.
    loss_sigmas, norm_sigmas: deviations above the median of healthy steps. skipped: its update was not made.
    later_loss, later_grad_norm: of the same step when the run went back and trained it again; NaN if it did not.
    time: of this training of the step, or just after it, in Unix seconds; infinite: the last one that the log has."""

    step: int
    found: tuple[str, ...]
    loss: float = math.nan
    grad_norm: float = math.nan
    loss_sigmas: float = 0.0
    norm_sigmas: float = 0.0
    skipped: bool = False
    later_loss: float = math.nan
    later_grad_norm: float = math.nan
    time: float = math.inf

    @property
    def size(self) -> float:
        """The size of the trouble: infinite for values that are not finite, else in deviations."""
        bad = any("not finite" in kind for kind in self.found)
        return math.inf if bad else max(self.loss_sigmas, self.norm_sigmas)


def troubled_steps(data: RunData) -> list[TroubledStep]:
    """Return the steps in which the log has a finding or a skipped update, or values that are not finite; the worst
    first."""
    steps: dict[int, TroubledStep] = {}
    for event in data.findings:
        newest = data.steps.get(event["step"], event)
        later = newest if newest["time"] > event["time"] else {}
        own = TroubledStep(
            step=event["step"],
            found=tuple(event["found"]),
            loss=event["loss"],
            grad_norm=event["grad_norm"],
            loss_sigmas=event["loss_sigmas"],
            norm_sigmas=event["norm_sigmas"],
            skipped=bool(event.get("skipped")),
            later_loss=later.get("loss", math.nan),
            later_grad_norm=later.get("grad_norm", math.nan),
            time=event["time"],
        )
        if own.step not in steps or own.size > steps[own.step].size:  # it may have been trained again
            steps[own.step] = own
    skipped = {step for event in data.vetoes for step in event["steps"]}
    for step, event in data.steps.items():
        kinds = [f"{name} not finite" for name in ("loss", "grad_norm") if not math.isfinite(event[name])]
        if step not in steps and (kinds or step in skipped):
            found = tuple(kind.replace("grad_norm", "gradient") for kind in kinds) or ("update skipped",)
            loss, norm = event["loss"], event["grad_norm"]
            steps[step] = TroubledStep(step=step, found=found, loss=loss, grad_norm=norm, skipped=step in skipped)
    return sorted(steps.values(), key=lambda one: (-one.size, one.step))


def usual_levels(data: RunData, step: int, level: int) -> tuple[float, float]:
    """Return the median loss and gradient norm of the `level` healthy steps of the log before `step`; NaN without any.

    The guard compares a step with those (docs/guard.md).
    """
    bad = {one.step for one in troubled_steps(data)}
    before = [event for own, event in sorted(data.steps.items()) if own < step and own not in bad][-level:]
    losses, norms = ([event[name] for event in before if math.isfinite(event[name])] for name in ("loss", "grad_norm"))
    return (median(losses) if losses else math.nan), (median(norms) if norms else math.nan)


def skipped_steps(data: RunData, step: int, reached: float = math.inf) -> list[int]:
    """Return the steps up to `step` whose updates are missing in the weights with which the run trained `step`,
    ascending: skipped, and not trained again after the run went back.

    reached: the time of this training of the step; infinite: the last one.
    """
    if math.isinf(reached) and step in data.steps:
        reached = data.steps[step]["time"]
    back = [(one["time"], one["from_step"]) for one in data.starts]
    back += [(one["time"], one["to_step"]) for one in data.roll_backs]
    # What is logged after the run left `step` again is of later weights. Its own log line may follow its numbers.
    left = min((time for time, to in back if time > reached and to < step), default=math.inf)
    return sorted(
        {
            own
            for event in data.vetoes
            for own in event["steps"]
            if own <= step
            and event["time"] < left
            and not any(event["time"] <= time < left and to < own for time, to in back)
        }
    )
