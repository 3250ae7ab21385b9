"""The folders of checkpoints: publish a new folder, remove old folders, find the checkpoint of a path. No torch.

A folder is renamed before it is removed, so that a half-removed folder is never taken for a checkpoint.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

from ingot.errors import CheckpointError, UsageError
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.guard_record import SUSPECT, GuardState, back_to
from ingot.schema.run_folder import CHECKPOINTS, RunFolder
from ingot.storage import fsync_dir, remove_unfinished
from ingot.trainer.checkpoint.manifest import candidate_folders, grade_of_doubt, is_finished, late_folders, listed_names
from ingot.trainer.checkpoint.pins import REMOVED, pinned_steps
from ingot.trainer.checkpoint.places import sweep, unlisted
from ingot.trainer.checkpoint.retention import retained
from ingot.trainer.checkpoint.rules import FOLDER
from ingot.trainer.checkpoint.vanished import require_checkpoints

SAVING = ".saving-"  # a folder with this prefix was never a checkpoint


def publish(temporary: Path, path: Path) -> None:
    """Rename the complete folder `temporary` to `path`, the name of the checkpoint of its step."""
    aside = path.with_name(REMOVED + path.name)
    replaces = path.exists()  # a damaged checkpoint of this step, because of which the step was trained again
    try:
        if replaces:
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        temporary.rename(path)
    except BaseException:  # also Ctrl-C between both: without its name, the old checkpoint would be a leftover
        if replaces and aside.exists() and not path.exists():
            aside.rename(path)
        raise
    fsync_dir(path.parent)


def prune(
    folder: RunFolder,
    step: int,
    keep: int,
    keep_every: int = 0,
    proven_steps: int = 0,
    guard: GuardState | None = None,
) -> None:
    """Remove the checkpoints up to `step`, which was just saved, that the rules of the run do not keep (`retained`).

    A folder of a later step was refused when this run resumed, although its files may have the right sizes (a flipped
    bit does not change them). Such a folder does not count: it would displace usable checkpoints. Those
    that were published too late go. guard: as it was saved with `step`.
    """
    for path in late_folders(folder.checkpoints):
        path.rename(path.with_name(REMOVED + path.name))
    found = [int(path.name.removeprefix("step-")) for path in candidate_folders(folder.checkpoints)]
    reasons = retained(
        [one for one in found if one <= step],
        keep=keep,
        keep_every=keep_every,
        pinned=pinned_steps(folder),
        is_sound=lambda one: one == step or is_finished(folder.checkpoint(one)),
        is_suspect=lambda one: grade_of_doubt(folder.checkpoint(one)) == SUSPECT,
        back_to=back_to(folder.guard, guard, proven_steps),
        proven_steps=proven_steps,
    )
    remove_checkpoints(folder, [one for one, reason in reasons.items() if not reason])


def remove_checkpoints(folder: RunFolder, steps: Iterable[int]) -> None:
    """Remove the checkpoints of `steps`, except those that are pinned meanwhile, and what killed saves left.

    Only the owner of the run's lock may call this, and not during a save.
    """
    for step in steps:
        path = folder.checkpoint(step)
        path.rename(path.with_name(REMOVED + path.name))
    remove_leftovers(folder)


def remove_leftovers(folder: RunFolder) -> list[str]:
    """Remove the leftovers of killed saves and prunes, also on the disks of this node, and return their names.

    A checkpoint that was pinned after its removal was decided gets its name back. Only the owner of the run's lock may
    call this, and not during a save.
    """
    removed = []
    found: list[tuple[SaveKind, str]] = [(kind, prefix) for kind in (FULL, WEIGHTS) for prefix in (SAVING, REMOVED)]
    for kind, prefix in found:
        for path in sorted(folder.of(kind).checkpoints.glob(prefix + "*")):
            name = path.with_name(path.name.removeprefix(prefix))
            pinned = kind == FULL and prefix == REMOVED and _is_pinned(folder, name)
            if pinned and not name.exists() and is_finished(path):
                path.rename(name)
                continue
            shutil.rmtree(path)
            removed.append(path.name)
    return removed + remove_unfinished(folder.ledger) + sweep(folder, _kept(folder))


def remove_saves_of(folder: RunFolder, epoch: int) -> None:
    """Remove the unfinished saves of attempt `epoch`, all of whose processes are gone: the names of other attempts'
    saves are other ones, so the owner of the run may be at work."""
    for kind in (FULL, WEIGHTS):
        for path in folder.of(kind).checkpoints.glob(f"{SAVING}*.{epoch}"):
            shutil.rmtree(path, ignore_errors=True)


def unlisted_on_disks(folder: RunFolder) -> list[Path]:
    """Return what the run has on the disks of this node that belongs to no checkpoint (`unlisted`)."""
    return unlisted(folder, _kept(folder))


def _kept(folder: RunFolder) -> dict[str, set[str] | None]:
    """Return what stays on disks: the files of every checkpoint of the run, also of those that are damaged, late or set
    aside."""
    checkpoints = folder.of(FULL).checkpoints
    found = [*checkpoints.iterdir()] if checkpoints.is_dir() else []
    kept: dict[str, set[str] | None] = {}
    for path in (*found, *folder.set_aside.glob(f"*/{CHECKPOINTS}/*")):
        if FOLDER.fullmatch(path.name):
            names, before = listed_names(path), kept.get(path.name, set())
            kept[path.name] = None if names is None or before is None else names | before
    return kept


def _is_pinned(folder: RunFolder, path: Path) -> bool:
    match = FOLDER.fullmatch(path.name)
    return match is not None and int(match[1]) in pinned_steps(folder)


def is_saving(folder: RunFolder) -> bool:
    """Return whether a save of either kind is being written, or a killed one left its folder (`remove_leftovers`)."""
    return any(any(folder.of(kind).checkpoints.glob(SAVING + "*")) for kind in (FULL, WEIGHTS))


def find_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """Return the run folder and the checkpoint that `path` names; a run folder means its newest checkpoint.

    Raises UsageError if `path` is neither a run folder nor a checkpoint in one, CheckpointError for a run that has none
    yet, or whose checkpoints vanished.
    """
    folder = RunFolder(path)
    if folder.config.is_file():
        candidates = candidate_folders(folder.checkpoints)
        if not candidates:
            require_checkpoints(folder)
            raise no_checkpoint(path)
        return folder, candidates[0]
    run = RunFolder(path.resolve().parent.parent)
    if run.config.is_file() and path.resolve().parent == run.checkpoints.resolve() and path.is_dir():
        return run, path
    raise UsageError(
        "E-RUN-NOT-FOUND",
        f"{path} is neither a run folder nor a checkpoint in one",
        rule="a run folder contains run.toml, and its checkpoints are the folders checkpoints/step-*",
        fix="name the folder that ingot train wrote",
        path=str(path),
    )


def find_weights(path: Path) -> tuple[RunFolder, Path]:
    """Return the run folder and the save that `path` names, for a reader of the weights: a checkpoint or a save of the
    weights alone; a run folder means the save of its last step, whatever its kind. Raises as `find_checkpoint`.
    """
    folder = RunFolder(path)
    if folder.config.is_file():
        saves = candidate_folders(folder.checkpoints) + candidate_folders(folder.weights.checkpoints)
        if saves:
            return folder, max(saves, key=lambda save: int(save.name.removeprefix("step-")))
    run = RunFolder(path.resolve().parent.parent)
    if run.config.is_file() and path.resolve().parent == run.weights.checkpoints.resolve() and path.is_dir():
        return run, path
    return find_checkpoint(path)


def no_checkpoint(run: Path, kind: SaveKind = FULL) -> CheckpointError:
    """Return the error for a run folder without a checkpoint, or without a save of the weights alone."""
    what = "checkpoint" if kind == FULL else "save of the weights alone"
    every = "checkpoint.every or checkpoint.every_steps" if kind == FULL else "checkpoint.weights_every"
    return CheckpointError(
        "E-CKPT-NONE",
        f"{run} has no {what} yet",
        rule=f"a run makes its first {what} after {every}",
        fix=f"continue the run: ingot train {run}",
        run=str(run),
    )
