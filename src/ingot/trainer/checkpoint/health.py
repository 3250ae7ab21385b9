"""The health of checkpoints, for people: what is known of their weights, by the steps that were trained after them.

Nothing is marked in a checkpoint: what happens after a save cannot be in it. The health follows from its manifest, the
record of the guard and the event log, so it is the same on both tiers, and known before there is any trouble. No torch.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ingot.errors import CheckpointError, IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.guard import Guard
from ingot.schema.guard_record import SUSPECT, Doubt
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.manifest import doubt_about, measures_beside, read_manifest
from ingot.units import counted


@dataclass(frozen=True)
class CheckpointHealth:
    """The knowledge of the weights of a checkpoint.

    state: "proven" (guard.proven_steps good steps followed, and held-out text raised no doubt, if the run scores it),
    "young" (fewer followed so far), "unproven" (trouble came before so many followed), "suspect" (the guard went back
    to before it, or held-out text lost too much). reason: for people.
    """

    state: Literal["proven", "young", "unproven", "suspect"]
    reason: str

    @property
    def text(self) -> str:
        return f"{self.state}: {self.reason}"


def health_of(manifest: CheckpointManifest, doubt: Doubt, good: int, guard: Guard) -> CheckpointHealth:
    """Return the health of a checkpoint. doubt: about it. good: how many good steps followed, as `good_steps` counts.
    guard: of the run."""
    if doubt.grade:
        return CheckpointHealth("suspect" if doubt.grade == SUSPECT else "unproven", doubt.reason)
    sanity, scored = manifest.guard.sanity, ""
    if sanity.unfit:
        scored = ", held-out text is of no use"
    elif sanity.loss is not None:
        scored = f", held-out text {sanity.loss:.4g} at step {sanity.step}"
    if good >= guard.proven_steps:
        return CheckpointHealth("proven", f"{counted(guard.proven_steps, 'good step')} and more after it{scored}")
    return CheckpointHealth("young", f"{good} of the {guard.proven_steps} good steps after it that prove it{scored}")


def good_steps(folder: RunFolder, steps: Iterable[int], enough: int) -> dict[int, int]:
    """Return, for the checkpoint of each of `steps`, how many good steps were trained after it, by the event log; at
    most `enough`.

    A good step is one whose loss and gradient are finite, and in which the guard found nothing. Steps that the run went
    back from do not count for checkpoints that are trained again.
    """
    found: dict[int, set[int]] = {step: set() for step in steps}
    line: set[int] = set()  # its steps: what was found in them comes after them in the log
    kinds = (events.STEP, events.FINDING, events.SKIPPED, events.PROGRESS)
    back = {events.RUN_STARTED: "from_step", events.ROLLED_BACK: "to_step", events.REWOUND: "step"}
    for event in read_events(folder.events, *kinds, *back):
        kind = event["kind"]
        with suppress(KeyError, TypeError):  # of a version that wrote other fields
            if kind == events.STEP:
                if math.isfinite(event["loss"]) and math.isfinite(event["grad_norm"]):
                    line.add(event["step"])
            elif kind == events.FINDING:
                line.discard(event["step"])
            elif kind == events.SKIPPED:
                line.difference_update(event["steps"])
            elif kind == events.PROGRESS:
                for step, after in found.items():
                    if len(after) < enough:
                        after.update(one for one in line if one > step)
                line = set()
            else:
                line, to = set(), event[back[kind]]
                found.update({step: set() for step in found if step > to})
    return {step: min(len(after), enough) for step, after in found.items()}


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
        return health_of(manifest, doubt, good_steps(folder, [step], guard.proven_steps)[step], guard)
    except (CheckpointError, OSError):
        return None
