"""Files that belong to no checkpoint: `ingot ckpt gc` finds them on the disk and in the store, and removes them.

Killed saves and fetches leave folders and files whose names no reader knows, also on disks of nodes; a run that went
back leaves segments of the ledger that no checkpoint lists; a killed upload leaves objects without a manifest. No
torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.run_folder import RunFolder
from ingot.storage import unfinished_files
from ingot.trainer.checkpoint.folders import SAVING, remove_leftovers, unlisted_on_disks
from ingot.trainer.checkpoint.manifest import MANIFEST, candidate_folders, is_finished, late_folders, parse_manifest
from ingot.trainer.checkpoint.pins import REMOVED, pinned_steps
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.rules import FOLDER
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.launch.stored import held, open_run
from ingot.trainer.resilience.lock import RunLock

KILLED, TEMPORARY = "a save, fetch or removal that was killed", "a write that was killed"
SEGMENT, UPLOAD = "samples that no checkpoint lists", "an upload that never ended"
UNLISTED = "tensors that no checkpoint lists"
_SEGMENT = re.compile(r"steps-\d{8,}-(\d{8,})\.i64")


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """A file or folder of the run folder, or an object of its store, that belongs to no checkpoint.

    place: "disk", or the address of the store. name: its path below that; on a disk of a node, the absolute path.
    what: where it comes from.
    """

    place: str
    name: str
    bytes: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The garbage that was removed, or with dry_run was found. store: the address of the store, "" if there is none."""

    garbage: tuple[Garbage, ...]
    store: str
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.garbage)

    def as_dict(self) -> dict:
        return asdict(self) | {"bytes": self.bytes, "exit_code": EXIT_OK}


def collect_garbage(path: Path, *, dry_run: bool, say: Callable[[str], None] = lambda text: None) -> Collected:
    """Remove from the disk and the store of the run `path` what belongs to no checkpoint.

    Every complete checkpoint stays, also a late or a damaged one, with all that its manifest lists. dry_run: remove
    nothing; the run must not be training either, because its writers have files without a known name as well. say:
    called with the line that says why the command waits. Raises UsageError, RunBusyError if the run is training or a
    command uploads one of its checkpoints, CheckpointError if its checkpoints vanished, and the errors of the store.
    """
    folder, tier = open_run(path)
    tiers = [tier, open_run(path, kind=WEIGHTS)[1]] if tier else []
    with held(folder, tier, say) as lease, RunLock(folder.upload_lock):
        require_checkpoints(folder)  # the ledger may be all that shows what the run had saved
        if not dry_run:
            lease.take()
        on_disk, in_store = list(_on_disk(folder)), list(_in_store(folder, [one for one in tiers if one]))
        if not dry_run:
            remove_leftovers(folder)
            for one in on_disk:
                if not (folder.root / one.name).is_dir():
                    (folder.root / one.name).unlink(missing_ok=True)
            if tier:
                for one in in_store:
                    tier.store.remove(one.name)
    return Collected(garbage=(*on_disk, *in_store), store=tier.url if tier else "", dry_run=dry_run)


def _on_disk(folder: RunFolder) -> Iterator[Garbage]:
    def garbage(path: Path, what: str) -> Garbage:
        files = path.rglob("*") if path.is_dir() else [path]
        size = sum(one.stat().st_size for one in files if one.is_file())
        name = path.relative_to(folder.root) if path.is_relative_to(folder.root) else path
        return Garbage(place="disk", name=str(name), bytes=size, what=what)

    pinned = _removed_but_pinned(folder)
    for kind in (FULL, WEIGHTS):
        saves = folder.of(kind).checkpoints
        for prefix in (SAVING, REMOVED):
            yield from (garbage(one, KILLED) for one in sorted(saves.glob(f"{prefix}*")) if one not in pinned)
        for place in (saves, *sorted(saves.glob("step-*"))):
            yield from (garbage(one, TEMPORARY) for one in unfinished_files(place))
    restored = {one.name.removeprefix(REMOVED) for one in pinned}
    for one in unlisted_on_disks(folder):
        if not restored & {one.name, one.parent.name}:
            yield garbage(one, UNLISTED)
    unfinished = unfinished_files(folder.ledger)
    for file in (folder.config, folder.accepted):  # only the holder of the lock writes these
        unfinished += unfinished_files(folder.root, file.name)
    yield from (garbage(one, TEMPORARY) for one in unfinished)
    needed, unknown = _needed_segments(folder)
    for file in sorted(folder.ledger.glob("steps-*")):
        match = _SEGMENT.fullmatch(file.name)
        if match and file.name not in needed and int(match[1]) > unknown:
            yield garbage(file, SEGMENT)


def _removed_but_pinned(folder: RunFolder) -> set[Path]:
    """Return the folders whose removal had begun when their checkpoint was pinned: they get their names back."""
    names = [folder.checkpoint(step) for step in pinned_steps(folder)]
    removed = [path.with_name(REMOVED + path.name) for path in names if not path.exists()]
    return {path for path in removed if is_finished(path)}


def _needed_segments(folder: RunFolder) -> tuple[set[str], int]:
    """Return the names of the segments that checkpoints list, and the newest step whose manifest cannot be read: it may
    list any segment up to its step."""
    paths = [*candidate_folders(folder.checkpoints), *late_folders(folder.checkpoints), *_removed_but_pinned(folder)]
    needed, unknown = set(), 0
    for path in paths:
        try:
            manifest = parse_manifest(path.name, (path / MANIFEST).read_bytes())
        except (CheckpointError, OSError):
            match = FOLDER.fullmatch(path.name.removeprefix(REMOVED))
            unknown = max(unknown, int(match[1]) if match else 0)
            continue
        needed.update(segment.file for segment in manifest.ledger)
    return needed, unknown


def _in_store(folder: RunFolder, tiers: Iterable[RemoteTier]) -> Iterator[Garbage]:
    for tier in tiers:
        pinned = tier.pins.pinned() | pinned_steps(folder.of(tier.kind))
        sizes = {one.name: one.bytes for one in tier.store.list(folder.of(tier.kind).saves)}
        for step, names in tier.half_uploads().items():
            if step in pinned or any(name.endswith(f"/{MANIFEST}") for name in names):  # pinned, or complete but late
                continue
            for name in names:
                yield Garbage(place=tier.url, name=name, bytes=sizes.get(name, 0), what=UPLOAD)
        for one in tier.orphaned_segments() if tier.kind == FULL else ():
            yield Garbage(place=tier.url, name=one.name, bytes=one.bytes, what=SEGMENT)
