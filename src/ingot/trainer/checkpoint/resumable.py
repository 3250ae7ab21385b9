"""The checkpoint that training would resume from, by manifests, file sizes and the event log; no tensor is hashed.

No torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.guard_answer import question_of_stopped
from ingot.schema.guard_record import NO_DOUBT, Measure
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from ingot.trainer.checkpoint.places import Places


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
    """List the checkpoints of a run, newest first. Damage includes that the ranks refused a checkpoint on loading, as
    long as nothing of it was written since, and no attempt started from it."""
    return _judged(folder, _read_log(folder)[1])


def _judged(folder: RunFolder, refused: "dict[int, _Refusal]") -> list[ListedCheckpoint]:
    listed = []
    for one in list_checkpoints(folder.checkpoints):
        refusal = refused.get(one.step)
        if refusal and not one.damage and not _written_since(folder, one, refusal.time):
            one = replace(one, damage=f"refused on loading ({refusal.reason})")
        listed.append(one)
    return listed


@dataclass(frozen=True)
class _Refusal:
    time: float
    reason: str


_READ = (events.CHECKPOINT, events.CHECKPOINT_REFUSED, events.RUN_STARTED, events.REWOUND)


def _read_log(folder: RunFolder) -> tuple[int, dict[int, _Refusal]]:
    """Return the newest step saved, and step -> the refusal of checkpoints that were neither saved nor loaded since."""
    saved, refused = 0, {}
    for event in read_events(folder.events, *_READ):
        step = event.get("from_step" if event["kind"] == events.RUN_STARTED else "step")
        if not isinstance(step, int):
            continue
        if event["kind"] == events.REWOUND:  # what was newer is set aside, and missed by nobody
            saved, refused = step, {one: why for one, why in refused.items() if one < step}
        elif event["kind"] == events.CHECKPOINT_REFUSED:
            reason, time = str(event.get("reason", "")), event.get("time")
            refused[step] = _Refusal(
                time if isinstance(time, int | float) else 0.0, reason.partition(": ")[2] or reason
            )
        else:
            saved = max(saved, step)
            refused.pop(step, None)
    return saved, refused


def _written_since(folder: RunFolder, listed: ListedCheckpoint, seconds: float) -> bool:
    """Return whether a file of the checkpoint was written or put in place after a time, as a restored copy is. The time
    of the last change of an inode is used, which a copy does not preserve."""
    segments = listed.manifest.ledger if listed.manifest else ()
    files = [*listed.path.iterdir(), *(folder.ledger / segment.file for segment in segments)]
    if listed.manifest and (places := Places(listed.path)).striped:
        files += filter(None, (places.find(name, one.sha256) for name, one in listed.manifest.files.items()))
    return any(file.stat().st_ctime > seconds for file in files if file.exists())


def went_on_after(folder: RunFolder, measure: Measure) -> bool:
    """Return whether the run saved a checkpoint after this measure of its guard."""
    listed = list_checkpoints(folder.checkpoints)
    return any(one.manifest and measure in one.manifest.guard.measures for one in listed)


def open_question(folder: RunFolder, measures: Sequence[Measure]) -> Measure | None:
    """Return the measure that stopped the run of `folder`, in whose place a person may choose another one; None if none
    did, or if the run went on without. measures: the record of its guard."""
    question = question_of_stopped(measures)
    return None if question is None or went_on_after(folder, question) else question


def first_usable(listed: Iterable[ListedCheckpoint]) -> ListedCheckpoint | None:
    """Return the checkpoint that a resume takes first: the newest without damage, those in doubt last."""
    return next((c for c in sorted(listed, key=lambda c: c.doubt.grade) if not c.damage), None)


@dataclass(frozen=True)
class RollBackChoice:
    """The reason why a run went back to a checkpoint. why: as the rest of a sentence, "it is the newest"; "": unknown,
    the folder could not be read. passed_over: newer checkpoints, the newest first, as (step, reason why it did not go
    back to them)."""

    why: str
    passed_over: tuple[tuple[int, str], ...]


def roll_back_choice(folder: RunFolder, step: int, sound: str = "") -> RollBackChoice:
    """Return why the run went back to the checkpoint of `step`, which it has just loaded.

    sound: why the weights of a checkpoint without doubt are sound, as the rest of a sentence; "": nothing is known.
    """
    try:
        listed = judged_checkpoints(folder)
    except OSError:  # the state is loaded: a disk that fails now costs the reason, not a rank that others wait for
        return RollBackChoice("", ())
    newer = [one for one in listed if one.step > step]
    passed_over = tuple(
        (one.step, one.damage or one.doubt.reason or "it was damaged when it was read") for one in newer
    )
    doubt = next((one.doubt for one in listed if one.step == step), NO_DOUBT)
    if doubt.grade:
        return RollBackChoice(f"none is in less doubt: {doubt.reason}", passed_over)
    why = "it is the newest without doubt" if newer else "it is the newest, and in no doubt"
    return RollBackChoice(why + (f"; {sound}" if sound else ""), passed_over)


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
    return ResumePoint(step, newest, there.damage or f"its weights are in doubt ({there.doubt.reason})")


def resume_step(folder: RunFolder) -> int:
    """Return the step of the checkpoint that training would resume from; 0 if there is none."""
    return find_resume_point(folder).step
