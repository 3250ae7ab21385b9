"""The checkpoint that training would resume from, by manifests, file sizes and the event log; no tensor is hashed.

No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that training would resume from, and whether the run saved a later one.

    step: of that checkpoint; 0: there is none. newest_step: the newest step that was saved, by the event log and the
    folders; 0: none. problem: why training does not resume from it, "" if it does.
    """

    step: int
    newest_step: int
    problem: str


def judged_checkpoints(folder: RunFolder) -> list[ListedCheckpoint]:
    """List the checkpoints of a run, newest first. Damage includes that the ranks refused a checkpoint on loading and
    did not save it again since."""
    return _judged(folder, _read_log(folder)[1])


def _judged(folder: RunFolder, refused: dict[int, str]) -> list[ListedCheckpoint]:
    listed = list_checkpoints(folder.checkpoints)
    return [c if c.damage or c.step not in refused else replace(c, damage=refused[c.step]) for c in listed]


def _read_log(folder: RunFolder) -> tuple[int, dict[int, str]]:
    """Return the newest step saved, and step -> reason of the checkpoints refused on loading since their last save."""
    saved, refused = 0, {}
    for event in read_events(folder.events, events.CHECKPOINT, events.CHECKPOINT_REFUSED):
        if not isinstance(step := event.get("step"), int):
            continue
        if event["kind"] == events.CHECKPOINT:
            saved = max(saved, step)
            refused.pop(step, None)
        else:
            reason = str(event.get("reason", ""))
            refused[step] = f"refused on loading ({reason.partition(': ')[2] or reason})"
    return saved, refused


def first_usable(listed: Iterable[ListedCheckpoint]) -> ListedCheckpoint | None:
    """Return the checkpoint that a resume takes first: the newest without damage, suspect ones last."""
    return next((c for c in sorted(listed, key=lambda c: c.suspect) if not c.damage), None)


def find_resume_point(folder: RunFolder) -> ResumePoint:
    """Return where training of the run in `folder` would resume."""
    saved, refused = _read_log(folder)
    listed = _judged(folder, refused)
    first = first_usable(listed)
    step = first.step if first else 0
    newest = max([saved, *(c.step for c in listed)])
    if newest == step:
        return ResumePoint(step, newest, "")
    there = next((c for c in listed if c.step == newest), None)
    if there is None:
        return ResumePoint(step, newest, "its folder is missing")
    return ResumePoint(step, newest, there.damage or f"its weights are suspect ({there.suspect})")


def resume_step(folder: RunFolder) -> int:
    """Return the step of the checkpoint that training would resume from; 0 if there is none."""
    return find_resume_point(folder).step
