"""The checkpoints of a run as a table: which exist, which are damaged, and where training would resume. No torch."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, IngotError, UsageError
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.absent import AbsentFiles, absent_files
from ingot.trainer.checkpoint.folders import no_checkpoint
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    ListedCheckpoint,
    list_checkpoints,
    verify_here,
)
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.resumable import judged_checkpoints
from ingot.trainer.checkpoint.segments import ledger_beside
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.launch.both_tiers import StoreListing, copy_command, list_store, read_store, resume_step
from ingot.units import format_bytes

RESUMES_HERE = "<- training resumes here"
WEIGHTS_ALONE = "the weights alone: for evaluation and export, training cannot continue from them"
IN_STORE = "in the store"
A_COPY = "a copy outside a run: only its own files are checked, not the ledger of its run"


@dataclass(frozen=True, kw_only=True)
class InspectedCheckpoint:
    """A row of the table. saved_at: Unix seconds. state: "yes" if undamaged; "part" if the files on this machine are,
    and others are on disks of other nodes; otherwise "NO".

    kind: "full", or "weights" for a save of the weights alone. note: the damage, or which files are not on this
    machine, and the command that fetches a copy from the store; otherwise WEIGHTS_ALONE, or why the weights are
    suspect, and RESUMES_HERE where training resumes; or A_COPY. unchecked: the number of files that are not on this
    machine.
    """

    step: int
    kind: SaveKind
    path: str
    saved_at: float
    bytes: int
    state: str
    note: str
    unchecked: int = 0

    @property
    def size(self) -> str:
        return format_bytes(self.bytes) if self.bytes else "-"


@dataclass(frozen=True)
class Inspected:
    """The checkpoints, newest last. store: the address of the store of the run, "" if it has none. store_problem: why
    it was not listed, "" if it was. resumes_at: the step from which training continues, on the disk or in the store;
    0: from none of a run, or `checkpoints` are not all of a run.

    exit_code: 0, or 21 if a checkpoint is damaged, or lacks files that this machine wrote.
    """

    checkpoints: tuple[InspectedCheckpoint, ...]
    store: str = ""
    store_problem: str = ""
    resumes_at: int = 0

    @property
    def exit_code(self) -> int:
        return CheckpointError.exit_code if any(c.state == "NO" for c in self.checkpoints) else EXIT_OK

    @property
    def resumes_elsewhere(self) -> bool:
        """True if training continues from a checkpoint that is in the store alone."""
        return bool(self.resumes_at) and not any(RESUMES_HERE in c.note for c in self.checkpoints)

    def as_dict(self) -> dict:
        return asdict(self) | {"checkpoints": [asdict(c) for c in self.checkpoints], "exit_code": self.exit_code}


Load = Callable[[list[ListedCheckpoint]], Mapping[Path, str]]  # path of a save -> why training would refuse it


def inspect_checkpoints(
    path: Path, *, hash_files: bool, meter: Meter = SILENT, load: Load = lambda saves: {}, stored: bool = False
) -> Inspected:
    """Inspect all checkpoints of a run folder, or one checkpoint folder. hash_files: read and hash every byte, which
    `meter` counts. load: also load those that have no damage and are whole on this machine. stored: also read every
    byte of the saves in the store, of all of the run or of this one.

    Raises UsageError if `path` is neither of these, CheckpointError if the run has no checkpoint, or they vanished;
    with `stored`, ConfigError if the run has no store, and the errors of the store.
    """
    listed: list[ListedCheckpoint] = []
    weights: list[ListedCheckpoint] = []
    folder, is_run = RunFolder(path), True
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        folder, is_run = RunFolder(path.absolute().parent.parent), False
        found = [c for c in list_checkpoints(path.parent) if c.path == path]
        (weights if path.resolve().parent.name == WEIGHTS else listed).extend(found)
    else:
        listed = list_checkpoints(folder.checkpoints) if hash_files else judged_checkpoints(folder)
        weights = list_checkpoints(folder.weights.checkpoints)
    if not listed + weights:
        raise nothing_found(path)
    if hash_files:
        meter.begin("verifying", sum(c.bytes for c in listed + weights if not c.damage))
        listed, weights = (
            [c if c.damage else replace(c, damage=_hash_damage(c.path, meter)) for c in saves]
            for saves in (listed, weights)
        )
    absent = absent_files(folder, listed)
    problems = load([c for c in [*(one for one in listed if one.step not in absent), *weights] if not c.damage])
    listed, weights = (
        [replace(c, damage=problems[c.path]) if problems.get(c.path) else c for c in saves]
        for saves in (listed, weights)
    )
    store = list_store(folder, {FULL: listed, WEIGHTS: weights})
    if stored:
        wanted: dict[SaveKind, list[int]] = {
            FULL: [one.step for one in listed],
            WEIGHTS: [one.step for one in weights],
        }
        store = read_store(folder, store, None if is_run else wanted, meter)
    lost = [step for step, files in absent.items() if files.lost]
    resumes = resume_step(listed, store, lost) if is_run else 0
    rows = [_inspected(one, absent.get(one.step), resumes=one.step == resumes) for one in listed]
    rows += [_inspected(one, None, kind=WEIGHTS) for one in weights]
    rows = [_with_copy(row, store, folder.root) for row in rows]
    if stored:
        rows += _stored_rows(folder, store, {(row.kind, row.step) for row in rows if row.state == "yes"})
    return Inspected(
        tuple(sorted(rows, key=lambda row: row.step)),
        store=store.url,
        store_problem=store.problem.found if store.problem else "",
        resumes_at=resumes,
    )


def nothing_found(path: Path) -> IngotError:
    """Return the error for a folder in which no checkpoint is: of a run that has none yet, whose checkpoints vanished,
    or of no run."""
    if RunFolder(path).events.exists():
        try:
            require_checkpoints(RunFolder(path))
        except CheckpointError as error:
            return error
        return no_checkpoint(path)
    return UsageError(
        "E-RUN-NOT-FOUND",
        f"{path} is not the folder of a run or of a checkpoint",
        rule="the path is the folder of a run that has checkpoints, or of one checkpoint",
        fix="name the folder that ingot train wrote",
        path=str(path),
    )


def _note(listed: ListedCheckpoint, absent: AbsentFiles | None, *, resumes: bool) -> str:
    if listed.damage or not ledger_beside(listed.path):
        return listed.damage or A_COPY
    doubt = listed.doubt.reason and f"weights are in doubt: {listed.doubt.reason}"
    parts = (doubt, absent.text if absent else "", RESUMES_HERE if resumes else "")
    return "  ".join(part for part in parts if part)


def _stored_rows(
    folder: RunFolder, store: StoreListing, sound: Collection[tuple[SaveKind, int]]
) -> list[InspectedCheckpoint]:
    """Return a row for each save that was read in the store. sound: the kind and the step of those on the disk."""
    rows = []
    for kind, saves in store.saves.items():
        for one in saves:
            weights = " --weights" if kind == WEIGHTS else ""
            push = f"; send it again: ingot ckpt push {folder.root} --step {one.step}{weights}"
            damage = one.damage and one.damage + (push if (kind, one.step) in sound else "")
            rows.append(
                InspectedCheckpoint(
                    step=one.step,
                    kind=kind,
                    path=f"{store.url}/{folder.of(kind).checkpoint(one.step).relative_to(folder.root)}",
                    saved_at=one.stored_at,
                    bytes=one.bytes,
                    state="NO" if damage else "yes",
                    note=f"{IN_STORE}: {damage}" if damage else IN_STORE,
                )
            )
    return rows


def _with_copy(row: InspectedCheckpoint, store: StoreListing, run: Path) -> InspectedCheckpoint:
    """Return `row` with the copy in the store, if the save is not whole on this machine."""
    copy = copy_command(store, run, row.step, row.kind) if row.state != "yes" else ""
    if not copy:
        return row
    note = row.note.removesuffix(RESUMES_HERE).rstrip()
    return replace(row, note=f"{note}; {copy}" + (f"  {RESUMES_HERE}" if RESUMES_HERE in row.note else ""))


def _hash_damage(path: Path, meter: Meter) -> str:
    """Return the damage of the files that are on this node."""
    try:
        verify_here(path, meter.add)
    except CheckpointError as error:
        return error.found.partition(": ")[2]
    return ""


def _inspected(
    listed: ListedCheckpoint, absent: AbsentFiles | None, kind: SaveKind = FULL, *, resumes: bool = False
) -> InspectedCheckpoint:
    manifest = listed.path / MANIFEST
    lost = bool(absent and absent.lost)
    return InspectedCheckpoint(
        step=listed.step,
        kind=kind,
        path=str(listed.path),
        saved_at=(manifest if manifest.exists() else listed.path).stat().st_mtime,
        bytes=listed.bytes,
        state="NO" if listed.damage or lost else "part" if absent else "yes",
        note=listed.damage or WEIGHTS_ALONE if kind == WEIGHTS else _note(listed, absent, resumes=resumes),
        unchecked=absent.number if absent else 0,
    )
