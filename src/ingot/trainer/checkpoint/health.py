"""The health of checkpoints, for people: what is known of their weights, by the steps that were trained after them.

Nothing is marked in a checkpoint: what happens after a save cannot be in it. The health follows from its manifest, the
record of the guard and the event log, so it is the same on both tiers, and known before there is any trouble. No torch.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ingot.errors import CheckpointError, IngotError
from ingot.events import read_events_back
from ingot.schema import events
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SUSPECT, Doubt, proven_to
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.accepted import last_recorded_change
from ingot.trainer.checkpoint.manifest import doubt_about, measures_beside, read_manifest
from ingot.units import counted

_MOST_STEPS = 10**12  # more are damage of the log


@dataclass(frozen=True)
class CheckpointHealth:
    """The knowledge of the weights of a checkpoint.

    state: "proven" (guard.proven_steps steps followed, or an accepted change holds after it, and held-out text, if the
    run scores it, raised no doubt), "young" (fewer followed so far), "unproven" (trouble came before so many followed),
    "suspect" (the guard went back to before it, or held-out text lost too much). reason: for people.
    """

    state: Literal["proven", "young", "unproven", "suspect"]
    reason: str

    @property
    def text(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """The training of a run so far, as its guard would judge it in the next step.

    trouble: the first step of the trouble that may come next: after the last log line, or the first of the skipped
    updates that it ends with. changed_after: the step after which the newest accepted change holds; 0: there is none.
    """

    trouble: int
    changed_after: int = 0


def position_of(folder: RunFolder) -> RunPosition:
    """Return the position of the run `folder`, from the end of its event log and its record of accepted changes."""
    changed_after = 0
    with suppress(IngotError):  # of a record that cannot be read, which `ingot train` reports
        changed_after = last_recorded_change(read_accepted(folder.accepted))
    return RunPosition(trouble=_next_trouble(folder), changed_after=changed_after)


def _next_trouble(folder: RunFolder) -> int:
    back = {events.RUN_STARTED: "from_step", events.ROLLED_BACK: "to_step", events.REWOUND: "step"}
    reached, skipped = None, set[int]()
    for event in read_events_back(folder.events, events.STEP, events.SKIPPED, events.PROGRESS, *back):
        kind = event["kind"]
        if kind == events.SKIPPED:  # after the steps of its line
            if isinstance(steps := event.get("steps"), list):
                skipped.update(one for one in steps if type(one) is int)
            continue
        step = event.get(back.get(kind, "step"))
        is_open = reached is None and kind == events.STEP  # its line was never written
        if type(step) is not int or not 0 <= step < _MOST_STEPS or is_open:
            continue
        reached = step if reached is None else reached
        if kind in back or (kind == events.STEP and step not in skipped):
            break
    first = (reached or 0) + 1
    while first - 1 in skipped:
        first -= 1
    return first


def health_of(manifest: CheckpointManifest, doubt: Doubt, position: RunPosition, guard: Guard) -> CheckpointHealth:
    """Return the health of a checkpoint. doubt: about it. position: of its run. guard: of the run.

    A checkpoint is proven if trouble in the next step would leave it without doubt (guard_record.proven_to).
    """
    if doubt.grade:
        return CheckpointHealth("suspect" if doubt.grade == SUSPECT else "unproven", doubt.reason)
    sanity, scored = manifest.guard.sanity, ""
    if sanity.unfit:
        scored = ", held-out text is of no use"
    elif sanity.loss is not None:
        scored = f", held-out text {sanity.loss:.4g} at step {sanity.step}"
    needed = guard.proven_steps
    if manifest.step <= proven_to(position.trouble, needed, 0):
        return CheckpointHealth("proven", f"{counted(needed, 'step')} and more after it{scored}")
    if manifest.step <= proven_to(position.trouble, needed, position.changed_after):
        return CheckpointHealth("proven", f"an accepted change holds after step {position.changed_after}{scored}")
    # The last step may be the begin of the next trouble.
    followed = max(position.trouble - 2 - manifest.step, 0)
    reason = f"{followed} of the {needed} steps after it that prove it" if needed else "no step followed it yet"
    return CheckpointHealth("young", reason + scored)


def guard_of(folder: RunFolder) -> Guard:
    """Return the guard of the run file in `folder`; that of the defaults if it cannot be read."""
    try:
        return recorded_run(folder.config).guard
    except (IngotError, OSError):
        return Guard()


def health_of_step(folder: RunFolder, step: int, guard: Guard) -> CheckpointHealth | None:
    """Return the health of the checkpoint of `step` on the disk of the run `folder`; None if there is none, or if its
    manifest cannot be read."""
    path = folder.checkpoint(step)
    try:
        manifest = read_manifest(path)
        doubt = doubt_about(manifest, measures_beside(path.parent))
        return health_of(manifest, doubt, position_of(folder), guard)
    except (CheckpointError, OSError):
        return None
