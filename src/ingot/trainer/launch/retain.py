"""Retention by command: pin a checkpoint of a run, so that it stays for ever, and remove what the rules do not keep.

No torch.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, IngotError, UsageError
from ingot.schema.checkpoint import FULL, KINDS, SaveKind
from ingot.schema.guard_record import SUSPECT, back_to
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import StoreUnreachable
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint import pins
from ingot.trainer.checkpoint.folders import remove_checkpoints
from ingot.trainer.checkpoint.manifest import candidate_folders, is_finished, list_checkpoints, read_manifest
from ingot.trainer.checkpoint.resumable import judged_checkpoints
from ingot.trainer.checkpoint.retention import retained
from ingot.trainer.launch.stored import held, open_run


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A checkpoint whose pin was set or removed, and the places that have it: "disk", or the address of the store.

    waits: why the store does not have the mark yet; "" if it does, or if the run has no store. lacks: the address of a
    store that does not have this checkpoint; "" if it has, did not answer, or if the run has none.
    """

    step: int
    pinned: bool
    places: tuple[str, ...]
    waits: str = ""
    lacks: str = ""

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def pin_checkpoint(path: Path, step: int) -> Pinned:
    """Pin the checkpoint of `step`, on the disk and in the store of the run `path`. The run may be training.

    Raises UsageError if neither has this checkpoint, and the errors of the store. If the store does not answer, and the
    disk has the checkpoint, the next upload of the run pins it in the store.
    """
    folder, tier = open_run(path)
    before = step in pins.pinned_steps(folder)
    local = pins.pin(folder, step) and is_finished(folder.checkpoint(step))
    places, waits = ["disk"] if local else [], ""
    try:
        if tier is not None and tier.pins.pin(step, lambda: step in tier.steps()):
            places.append(tier.url)
    except StoreUnreachable as error:
        if not local:
            _take_back(folder, step, before)
            raise
        waits = error.found
    if not places:
        _take_back(folder, step, before)
        if tier is not None:
            tier.pins.unpin(step)
        raise unknown_step(
            folder,
            step,
            tier.steps() if tier else (),
            rule="a checkpoint must exist to be pinned; saves of the weights alone are kept by checkpoint.weights_keep",
            without="pin one after the run saved it",
        )
    lacks = tier.url if tier is not None and not waits and tier.url not in places else ""
    return Pinned(step=step, pinned=True, places=tuple(places), waits=waits, lacks=lacks)


def _take_back(folder: RunFolder, step: int, before: bool) -> None:
    if not before:
        pins.unpin(folder, step)


def unknown_step(folder: RunFolder, step: int, stored: Iterable[int], *, rule: str, without: str) -> UsageError:
    """Return the error of a step of which neither the disk nor the store has a checkpoint. stored: the steps in the
    store. without: the way out of a run without checkpoints."""
    steps = sorted({*finished_steps(folder), *stored})
    alone = is_finished(folder.weights.checkpoint(step))
    return UsageError(
        "E-CKPT-STEP-UNKNOWN",
        f"{folder.root} has no finished checkpoint of step {step}{', only the weights alone' if alone else ''}",
        rule=rule,
        fix=f"name one of the steps {', '.join(map(str, steps))}" if steps else without,
        step=step,
        steps=steps,
    )


def finished_steps(folder: RunFolder) -> list[int]:
    """Return the steps of the finished saves on the disk, newest first."""
    return [int(p.name.removeprefix("step-")) for p in candidate_folders(folder.checkpoints) if is_finished(p)]


def unpin_checkpoint(path: Path, step: int) -> Pinned:
    """Remove the pin of the checkpoint of `step`, on the disk and in the store. The run may be training.

    Raises UsageError if it is not pinned, and the errors of the store, in which it then stays pinned.
    """
    folder, tier = open_run(path)
    local = pins.unpin(folder, step)  # first: a run that trains copies this mark to the store
    stored = tier is not None and tier.pins.unpin(step)
    if not (local or stored):
        steps = sorted(pins.pinned_steps(folder) | (tier.pins.pinned() if tier else set()))
        raise UsageError(
            "E-CKPT-NOT-PINNED",
            f"the checkpoint of step {step} of {path} is not pinned",
            rule="only a pinned checkpoint can be unpinned",
            fix=f"name one of the steps {', '.join(map(str, steps))}" if steps else "none is needed: no step is pinned",
            step=step,
            steps=steps,
        )
    places = [name for name, was in (("disk", local), (tier.url if tier else "", stored)) if was]
    return Pinned(step=step, pinned=False, places=tuple(places))


@dataclass(frozen=True, kw_only=True)
class Retained:
    """A checkpoint, or weights alone, and what the rules decide. reason: why it stays; "" if it goes."""

    step: int
    kind: SaveKind
    place: str
    reason: str


def prune_checkpoints(
    path: Path, *, dry_run: bool, say: Callable[[str], None] = lambda text: None
) -> tuple[Retained, ...]:
    """Apply the rules of retention to the disk and the store of the run `path`. Returns all checkpoints, then all saves
    of the weights alone, newest first in each place.

    dry_run: remove nothing, which is also possible while the run trains. The newest sound checkpoint of each tier stays
    in any case. say: called with the line that says why the command waits. Raises UsageError, RunBusyError if the run
    is training, on this machine or another one, and the errors of the store.
    """
    runs = [open_run(path, kind=kind) for kind in KINDS]
    found: list[tuple[SaveKind, str, dict[int, str]]] = []
    with nullcontext() if dry_run else held(*runs[0], say) as lease:
        if lease:
            lease.take()
        for folder, tier in runs:
            local = _retained_on_disk(folder, recorded_run(folder.config))
            found.append((folder.kind, "disk", local))
            if tier:
                found.append((folder.kind, tier.url, tier.retained()))
            if not dry_run:
                remove_checkpoints(folder, [step for step, reason in local.items() if not reason])
                if tier:
                    tier.prune()
    return tuple(
        Retained(step=step, kind=kind, place=place, reason=reason)
        for kind, place, reasons in found
        for step, reason in reasons.items()
    )


def _retained_on_disk(folder: RunFolder, run: RunConfig) -> dict[int, str]:
    """Return what the rules decide. Unlike a save, which has just verified its own checkpoint, a command trusts the
    manifests, the sizes of the files, and what the ranks refused."""
    full, rules = folder.kind == FULL, run.checkpoint
    found = judged_checkpoints(folder) if full else list_checkpoints(folder.checkpoints)
    listed = {one.step: one for one in found}
    proven_steps, guard = run.guard.proven_steps if full else 0, None
    with suppress(IngotError):  # a damaged manifest has no guard
        guard = read_manifest(folder.checkpoint(max(listed, default=0))).guard
    return retained(
        listed,
        keep=rules.keep if full else rules.weights_keep,
        keep_every=rules.keep_every if full else 0,
        pinned=pins.pinned_steps(folder),
        is_sound=lambda step: not listed[step].damage,
        is_suspect=lambda step: listed[step].doubt.grade == SUSPECT,
        back_to=back_to(folder.guard, guard, proven_steps),
        proven_steps=proven_steps,
    )
