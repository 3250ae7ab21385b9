"""Accepted changes of settings as the cause of a spike: which count, in words, and the way back."""

from collections.abc import Sequence
from pathlib import Path

from ingot.rehearse.replay.found import ReplayedSpike
from ingot.report.diagnose.attempts import ChangedSetting, StepAttempt
from ingot.report.diagnose.spike import SpikeBatch
from ingot.report.facts import RunData
from ingot.units import counted


def changes_before(
    data: RunData, batch: SpikeBatch, replayed: ReplayedSpike, attempt: StepAttempt
) -> list[ChangedSetting]:
    """Return the changes that may have made the spike, the newest first: since the checkpoint of the replay, or in the
    `guard.level` steps before, with which the guard compares the step."""
    assert data.run is not None
    return attempt.changed_since(min(replayed.checkpoint, batch.step.step - data.run.guard.level))


def blamed(change: ChangedSetting, step: int) -> str:
    """Return a change before `step` as a sentence."""
    numbers = all(isinstance(one, int | float) for one in (change.before, change.after))
    verb = "changed" if not numbers else "raised" if change.after > change.before else "lowered"
    what = f"{change.key} was {verb} from {change.before} to {change.after} by an accepted change"
    return f"{what} after step {change.step}, {counted(step - change.step, 'step')} before"


def way_back(root: Path, changed: Sequence[ChangedSetting], checkpoint: int) -> list[str]:
    """Return how to take the changes back, as sentences. changed: the newest first. checkpoint: where the replay began;
    0: the first weights."""
    first = changed[-1].step
    before = {one.key: one.before for one in changed}  # the oldest value of each
    back = " ".join(f"--set {key}={value}" for key, value in before.items() if isinstance(value, int | float | str))
    if 0 < checkpoint <= first:
        where, to = f"checkpoint of step {checkpoint}", str(checkpoint)
    else:
        where, to = f"newest checkpoint up to step {first} (ingot ckpt ls {root})", "STEP"
    return [
        f"go back to the {where}: ingot ckpt rewind {root} --to {to}",
        f"and train on without the change: ingot train {root} {back}".rstrip(),
        "if the spike comes without the change, too, check the machines: ingot doctor --bench on each",
    ]
