"""The checkpoints of a run as a table: what is there, what is damaged, where training would resume. No torch."""

from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, UsageError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.manifest import MANIFEST, Listed, list_checkpoints, verify_checkpoint
from ingot.units import format_bytes

RESUMES_HERE = "<- training resumes here"


@dataclass(frozen=True, kw_only=True)
class InspectedCheckpoint:
    """saved_at: Unix seconds. state: "yes" or "NO"; note: the damage, or where training resumes."""

    step: int
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
    """Newest last, as people read a history. exit_code: 0, or 21 if one of them is damaged."""

    checkpoints: tuple[InspectedCheckpoint, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_OK if all(c.state == "yes" for c in self.checkpoints) else CheckpointError.exit_code

    def as_dict(self) -> dict:
        return {"checkpoints": [asdict(c) for c in self.checkpoints], "exit_code": self.exit_code}


def inspect_checkpoints(path: Path, *, hash_files: bool) -> Inspected:
    """Of a run folder all checkpoints, of a checkpoint folder that one. hash_files: read every byte.

    Raises UsageError when `path` is neither, or a run without a checkpoint.
    """
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        listed = [c for c in list_checkpoints(path.parent) if c.path == path]
    else:
        listed = list_checkpoints(RunFolder(path).checkpoints)
    if not listed:
        what = (
            "has no checkpoint yet" if RunFolder(path).events.exists() else "is not the folder of a run or checkpoint"
        )
        raise UsageError(f"{path} {what}", fix="ingot train writes checkpoints; ingot status RUN shows where it stands")
    damage = {c.path: c.damage or (_hash_damage(c.path) if hash_files else "") for c in listed}
    resume = next((c.path for c in listed if not damage[c.path]), None)
    return Inspected(tuple(_inspected(c, damage[c.path], c.path == resume) for c in reversed(listed)))


def _hash_damage(path: Path) -> str:
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        return error.found.partition(": ")[2]
    return ""


def _inspected(listed: Listed, damage: str, resumes: bool) -> InspectedCheckpoint:
    manifest = listed.path / MANIFEST
    return InspectedCheckpoint(
        step=listed.step,
        path=str(listed.path),
        saved_at=(manifest if manifest.exists() else listed.path).stat().st_mtime,
        bytes=listed.bytes,
        state="NO" if damage else "yes",
        note=damage or (RESUMES_HERE if resumes else ""),
    )
