"""The manifest of a checkpoint, and the check that the files contain exactly the bytes that were saved.

    checkpoints/step-00000400/
        rank-00000.safetensors    what one rank wrote; plain safetensors
        rank-00001.safetensors
        manifest.json             written last, contains a hash of itself

A cut is the division of a tensor into blocks, which tensors of equal shape may share. No torch: listing and verifying
work on machines that do not train. Nothing is ever unpickled.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ingot.config import from_dict, to_dict
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError
from ingot.schema.checkpoint import (
    FULL,
    WEIGHTS,
    CheckpointManifest,
    file_of,
)
from ingot.schema.guard_record import NO_DOUBT, SUSPECT, Doubt, Measure, doubt, guard_state, read_measures
from ingot.schema.run_folder import RunFolder
from ingot.storage import canonical_json, sha256_bytes, sha256_file, write_atomic
from ingot.trainer.checkpoint.fence import TOO_LATE, Epoch, newest_local_epoch
from ingot.trainer.checkpoint.headers import (
    BlockNumber,
    check_header,
    damaged_part,
    manifest_problem,
    takes_too_much,
)
from ingot.trainer.checkpoint.places import Places, with_hash
from ingot.trainer.checkpoint.rules import FOLDER, check_rules, check_size, damaged, elsewhere, upgraded
from ingot.trainer.checkpoint.segments import check_segment_sizes, verify_segments

MANIFEST = "manifest.json"
VERSION = 2
T = TypeVar("T")
_SUSPECT = "suspect"  # the state of the health of weights that a policy doubts


@dataclass(frozen=True)
class ListedCheckpoint:
    """A folder with the name of a checkpoint.

    damage: the reason why it cannot be used, "" if none is known. manifest: None if the manifest or a tensor file is
    damaged; a checkpoint whose ledger is damaged has a manifest. measures: of the guard, in the record of the run.
    """

    path: Path
    step: int
    manifest: CheckpointManifest | None
    damage: str
    measures: tuple[Measure, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.manifest.files.values()) if self.manifest else 0

    @property
    def doubt(self) -> Doubt:
        """The doubt about the weights; none if the manifest cannot be read."""
        return doubt_about(self.manifest, self.measures) if self.manifest else NO_DOUBT


def doubt_about(manifest: CheckpointManifest, measures: Sequence[Measure]) -> Doubt:
    """Return the doubt about the weights of a checkpoint: they were judged suspect when they were saved, or the guard's
    `measures`, those of the record of the run, went back to before it."""
    if manifest.health.state == _SUSPECT:
        return Doubt(SUSPECT, manifest.health.reason or _SUSPECT)
    return doubt(measures, manifest.step, manifest.guard.measures)


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write the manifest with one line per key, which people can read and `is_finished` can search. Raises
    FileNotFoundError without its folder: a folder below a mount point whose mount has just gone is none of the run."""
    values = to_dict(manifest)
    lines = [f"{canonical_json(k)}:{canonical_json(v)}" for k, v in (values | {"sha256": _hash(values)}).items()]
    write_atomic(folder / MANIFEST, "{\n" + ",\n".join(lines) + "\n}\n", make_folder=False)


def _hash(values: dict) -> str:
    return sha256_bytes(canonical_json(values).encode("utf-8", "surrogatepass"))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of checkpoint `folder`. Raises CheckpointError if it is missing, damaged or breaks a rule.

    Only names, and the sizes of the tensor files on this node, are checked; `verify_checkpoint` reads the files.
    """
    manifest, places = parse_manifest(folder, _read_text(folder)), Places(folder)
    for name, entry in manifest.files.items():
        if path := places.find(name, entry.sha256):
            check_size(folder, path, name, entry.bytes)
    return manifest


def files_elsewhere(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """Return the files of checkpoint `folder` that are not on this node: they are on another one, or lost."""
    places = Places(folder)
    return [name for name, entry in manifest.files.items() if places.find(name, entry.sha256) is None]


def parse_manifest(folder: Path | str, text: bytes) -> CheckpointManifest:
    """Return the manifest with the content `text`. Raises CheckpointError if it is damaged or breaks a rule.

    folder: for the error, the folder of the checkpoint or its place in a store.
    """
    values = _values(folder, text)
    try:
        manifest = from_dict(CheckpointManifest, upgraded(values) if values["version"] == 1 else values)
    except RecursionError:
        raise damaged(folder, "manifest.json is nested too deeply", "E-CKPT-MANIFEST") from None
    except ConfigError as error:
        raise damaged(folder, f"manifest.json: {error.found}", "E-CKPT-MANIFEST") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise damaged(folder, f"manifest.json of version 1: {error}", "E-CKPT-MANIFEST") from None
    check_rules(folder, manifest)
    return manifest


def is_finished(folder: Path) -> bool:
    """Return whether `folder` has a manifest and all files on this node have the sizes listed there. No hash is
    computed."""
    try:
        files, places = _read_key(folder, "files"), Places(folder)
        found = ((places.find(name, entry["sha256"]), entry["bytes"]) for name, entry in files.items())
        return all(path is None or path.stat().st_size == size for path, size in found)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def grade_of_doubt(folder: Path) -> int:
    """Return the grade of the doubt about the weights of checkpoint `folder` (`doubt_about`). A damaged manifest has
    none: reading it will name the damage. No hash is computed."""
    try:
        if _read_key(folder, "health")["state"] == _SUSPECT:
            return SUSPECT
        if not (measures := measures_beside(folder.parent)):
            return 0
        return doubt(measures, _step_of(folder), guard_state(_read_key(folder, "guard")).measures).grade
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0


def listed_names(folder: Path) -> set[str] | None:
    """Return the names that the files of checkpoint `folder` have on disks of nodes; None if its manifest is
    damaged. No hash is computed."""
    try:
        return {with_hash(name, entry["sha256"]) for name, entry in _read_key(folder, "files").items()}
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def adopted_hashes(checkpoints: Path) -> dict[str, str]:
    """Return the step of each checkpoint -> the hash of its manifest, "" if it cannot be read: what an attempt that
    begins records."""
    return {str(_step_of(path)): claimed_hash(path) for path in candidate_folders(checkpoints)}


def claimed_hash(folder: Path) -> str:
    """Return the hash that the manifest of checkpoint `folder` has of itself, "" if it cannot be read. No hash is
    computed."""
    return _claimed(folder, "sha256", "")


def _is_late(holder: Epoch | None, folder: Path) -> bool:
    """Return whether the checkpoint `folder` was published too late (fence.py). False if its manifest is damaged:
    reading it will name the damage."""
    if holder is None:
        return False
    kind = WEIGHTS if folder.parent.name == WEIGHTS else FULL
    return holder.ignores(_step_of(folder), _claimed(folder, "epoch", 0), claimed_hash(folder), kind)


def _claimed(folder: Path, key: str, default: T) -> T:
    """Return one value of the manifest, of the type of `default`, or that if it cannot be read. No hash is computed."""
    try:
        value = _read_key(folder, key)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return default
    return value if type(value) is type(default) else default


def _read_key(folder: Path, key: str) -> Any:
    """Read only one key of the manifest, which is one line."""
    mark = f'"{key}":'.encode()
    with (folder / MANIFEST).open("rb") as file:
        line = next((line for line in file if line.startswith(mark)), None)
        file.seek(-3, 2)
        if line is not None and not takes_too_much(line, 0) and file.read() == b"\n}\n":
            return json.loads(line.removeprefix(mark).rstrip(b",\n"))
    line = None  # its memory is needed
    return _values(folder, _read_text(folder))[key]  # of an earlier version, incomplete, or long


def _read_text(folder: Path) -> bytes:
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise damaged(folder, "it has no manifest.json, so it was never finished", "E-CKPT-UNFINISHED") from None
    except OSError as error:
        raise damaged(
            folder, f"manifest.json cannot be read ({error.strerror})", "E-CKPT-READ", file=MANIFEST
        ) from None
    # With disks of nodes, only the manifest is here.
    if takes_too_much(text, 0) and not Places(folder).striped:
        beside = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if problem := manifest_problem(text, beside):
            del text  # the error may live long, and has this frame
            raise damaged(folder, problem, "E-CKPT-MANIFEST")
    return text


def _values(folder: Path | str, text: bytes) -> dict:
    """Parse a manifest, check its hash, and return the values without the hash. Raises CheckpointError."""
    try:
        values = json.loads(text)
        claimed = values.pop("sha256", "") if isinstance(values, dict) else ""
        found = _hash(values)  # writing what was read can need a deeper recursion than reading it
    except (ValueError, RecursionError):
        raise damaged(folder, "manifest.json is not JSON", "E-CKPT-MANIFEST") from None
    if found != claimed:
        raise damaged(folder, "manifest.json does not match its own hash", "E-CKPT-MANIFEST-HASH")
    if values.get("version") not in (1, VERSION):
        found = values.get("version")
        raise damaged(
            folder,
            f"its format is version {found!r}, but this version of ingot reads 1 to {VERSION}",
            "E-CKPT-VERSION",
            version=found if isinstance(found, int | str) else repr(found),
        )
    return values


def verify_files(
    folder: Path, manifest: CheckpointManifest, names: Iterable[str], on_bytes: Callable[[int], object] | None = None
) -> None:
    """Read the files `names` and compare them with the manifest. Raises CheckpointError naming file and tensor.

    on_bytes: called with the size of each chunk that was read.
    """
    names = sorted(names)
    blocks = _blocks_by_file(manifest, set(names))
    for name in names:
        _verify_file(folder, manifest, name, blocks[name], on_bytes)


def _blocks_by_file(manifest: CheckpointManifest, names: set[str]) -> dict[str, list[BlockNumber]]:
    """Return file -> its blocks, only for the files `names`, which are the ones that this rank verifies."""
    tensors = defaultdict(list)
    for name, entry in manifest.tensors.items():
        tensors[entry.cut].append(name)
    blocks: dict[str, list[BlockNumber]] = {name: [] for name in names}
    for number, cut in enumerate(manifest.cuts):
        for i, rank in enumerate(cut.ranks):
            if (file := file_of(rank)) in blocks:
                blocks[file] += [(name, i) for name in tensors[number]]
    return blocks


def _verify_file(
    folder: Path,
    manifest: CheckpointManifest,
    name: str,
    blocks: list[BlockNumber],
    on_bytes: Callable[[int], object] | None,
) -> None:
    entry = manifest.files[name]
    if (path := Places(folder).find(name, entry.sha256)) is None:
        raise elsewhere(folder, name)
    check_size(folder, path, name, entry.bytes)
    try:
        same = sha256_file(path, on_bytes) == entry.sha256
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error.strerror})", "E-CKPT-READ", file=name) from None
    if not same:
        part = damaged_part(path, manifest, name, blocks)
        raise damaged(
            folder,
            f"{name} differs from the bytes that were saved (damaged: {part})",
            "E-CKPT-HASH",
            file=name,
            part=part,
        )
    check_header(folder, path, manifest, name, blocks)


def verify_checkpoint(path: Path, on_bytes: Callable[[int], object] | None = None) -> CheckpointManifest:
    """Read and hash every byte of checkpoint `path` and of its ledger. Raises CheckpointError at the first damaged
    file. on_bytes: called with the size of each chunk of a tensor file."""
    manifest = verify_tensors(path, on_bytes)
    verify_segments(path, manifest, manifest.ledger)
    return manifest


def verify_here(path: Path, on_bytes: Callable[[int], object] | None = None) -> None:
    """Read and hash every byte of checkpoint `path` that is on this node, and of its ledger. on_bytes: called with the
    bytes of each part. Raises CheckpointError."""
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files.keys() - set(files_elsewhere(path, manifest)), on_bytes)
    verify_segments(path, manifest, manifest.ledger)


def verify_tensors(path: Path, on_bytes: Callable[[int], object] | None = None) -> CheckpointManifest:
    """Read and hash every byte of checkpoint `path`, but not its ledger, which only training and lineage need."""
    manifest = read_manifest(path)
    verify_files(path, manifest, manifest.files, on_bytes)
    return manifest


def candidate_folders(checkpoints: Path) -> list[Path]:
    """Return the folders that have the name of a checkpoint, newest first, except those that were published too late.
    No file is hashed."""
    return _folders(checkpoints)[0]


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest of them; 0 if there is none. No hash is computed."""
    newest = candidate_folders(checkpoints)[:1]
    return _step_of(newest[0]) if newest else 0


def late_folders(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that an attempt published after its lease was taken (fence.py), newest first."""
    return _folders(checkpoints)[1]


def _folders(checkpoints: Path) -> tuple[list[Path], list[Path]]:
    if not checkpoints.is_dir():
        return [], []
    named = [path for path in checkpoints.iterdir() if FOLDER.fullmatch(path.name)]
    holder = newest_local_epoch(checkpoints.parent) if named else None
    split: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(named, key=_step_of, reverse=True):
        split[_is_late(holder, path)].append(path)
    return split


def measures_beside(checkpoints: Path) -> tuple[Measure, ...]:
    """Return the measures in the record of the run that has the folder `checkpoints`; none if that cannot be read,
    which the run will report."""
    try:
        return tuple(read_measures(RunFolder(checkpoints.parent).guard))
    except DataError:
        return ()


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def list_checkpoints(checkpoints: Path) -> list[ListedCheckpoint]:
    """List the checkpoints in `checkpoints`, newest first. Reads manifests, but only the sizes of other files."""
    measures = measures_beside(checkpoints)
    listed, known = [], set()  # checkpoints share their earlier segments: each file is looked at once
    candidates, late = _folders(checkpoints)
    for path in sorted([*candidates, *late], key=_step_of, reverse=True):
        step, manifest, damage = _step_of(path), None, TOO_LATE if path in late else ""
        try:
            manifest = read_manifest(path)
            check_segment_sizes(path, manifest, [one for one in manifest.ledger[:-1] if one not in known])
            check_segment_sizes(path, manifest, manifest.ledger[-1:])
            known.update(manifest.ledger)
        except IngotError as error:
            damage = damage or error.found.partition(": ")[2] or error.found
        listed.append(ListedCheckpoint(path, step, manifest, damage, measures))
    return listed
