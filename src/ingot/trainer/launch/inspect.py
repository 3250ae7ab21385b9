"""The checkpoints of a run as a table: which exist, which are damaged, and where training would resume. No torch."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, IngotError, UsageError
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import no_checkpoint
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    ListedCheckpoint,
    files_elsewhere,
    list_checkpoints,
    verify_here,
)
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.resumable import first_usable, judged_checkpoints
from ingot.trainer.checkpoint.segments import ledger_beside
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.units import format_bytes

RESUMES_HERE = "<- training resumes here"
WEIGHTS_ALONE = "the weights alone: for evaluation and export, training cannot continue from them"
_NAMED = 3  # files in a note
A_COPY = "a copy outside a run: only its own files are checked, not the ledger of its run"


@dataclass(frozen=True, kw_only=True)
class InspectedCheckpoint:
    """A row of the table. saved_at: Unix seconds. state: "yes" if undamaged, otherwise "NO".

    kind: "full", or "weights" for a save of the weights alone. note: the damage; otherwise WEIGHTS_ALONE, or why the
    weights are suspect, and RESUMES_HERE where training resumes; or A_COPY.
    """

    step: int
    kind: str
    path: str
    saved_at: float
    bytes: int
    state: str
    note: str

    @property
    def size(self) -> str:
        return format_bytes(self.bytes) if self.bytes else "-"


@dataclass(frozen=True)
class Inspected:
    """The checkpoints, newest last. exit_code: 0, or 21 if a checkpoint is damaged."""

    checkpoints: tuple[InspectedCheckpoint, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_OK if all(c.state == "yes" for c in self.checkpoints) else CheckpointError.exit_code

    def as_dict(self) -> dict:
        return {"checkpoints": [asdict(c) for c in self.checkpoints], "exit_code": self.exit_code}


def inspect_checkpoints(path: Path, *, hash_files: bool, meter: Meter = SILENT) -> Inspected:
    """Inspect all checkpoints of a run folder, or one checkpoint folder. hash_files: read and hash every byte, which
    `meter` counts.

    Raises UsageError if `path` is neither of these, CheckpointError if the run has no checkpoint, or they vanished.
    """
    listed: list[ListedCheckpoint] = []
    weights: list[ListedCheckpoint] = []
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        found = [c for c in list_checkpoints(path.parent) if c.path == path]
        (weights if path.resolve().parent.name == WEIGHTS else listed).extend(found)
    else:
        folder = RunFolder(path)
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
    usable = first_usable(listed)
    rows = [_inspected(c, FULL, _note(c, resumes=c is usable)) for c in listed]
    rows += [_inspected(c, WEIGHTS, c.damage or WEIGHTS_ALONE) for c in weights]
    return Inspected(tuple(sorted(rows, key=lambda row: row.step)))


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


def _note(listed: ListedCheckpoint, *, resumes: bool) -> str:
    if listed.damage or not ledger_beside(listed.path):
        return listed.damage or A_COPY
    suspect = listed.suspect and f"weights are suspect: {listed.suspect}"
    return "  ".join(part for part in (suspect, _elsewhere(listed), RESUMES_HERE if resumes else "") if part)


def _elsewhere(listed: ListedCheckpoint) -> str:
    """Return which files are on disks of other nodes, as far as this one can know; "" if none is."""
    every = listed.manifest.files if listed.manifest else {}
    absent = files_elsewhere(listed.path, listed.manifest) if listed.manifest else []
    if not absent:
        return ""
    names = ", ".join(absent[:_NAMED]) + (", ..." if len(absent) > _NAMED else "")
    return f"{len(absent)} of {len(every)} files are on no disk of this node, and unchecked: {names}"


def _hash_damage(path: Path, meter: Meter) -> str:
    """Return the damage of the files that are on this node."""
    try:
        verify_here(path, meter.add)
    except CheckpointError as error:
        return error.found.partition(": ")[2]
    return ""


def _inspected(listed: ListedCheckpoint, kind: SaveKind, note: str) -> InspectedCheckpoint:
    manifest = listed.path / MANIFEST
    return InspectedCheckpoint(
        step=listed.step,
        kind=kind,
        path=str(listed.path),
        saved_at=(manifest if manifest.exists() else listed.path).stat().st_mtime,
        bytes=listed.bytes,
        state="NO" if listed.damage else "yes",
        note=note,
    )
