"""The files of one checkpoint, from an empty folder to the manifest. No torch: the writer process has none.

The order: rank 0 calls `make_folder`, then every rank `write`, then rank 0 `finish`. The folder has a temporary name
until everything in it was written and read back.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ingot.errors import ResourceError
from ingot.schema.accepted import read_accepted
from ingot.schema.checkpoint import FULL, CheckpointManifest, FileEntry, Health, LedgerSegment, SaveKind, file_of
from ingot.schema.guard_record import GuardState, guard_state
from ingot.schema.quarantine_record import Quarantined, quarantined_of
from ingot.schema.run_folder import RunFolder
from ingot.storage import fsync_dir, require_free, write_atomic
from ingot.stores.local import LocalStore
from ingot.trainer.checkpoint.fence import require_newest
from ingot.trainer.checkpoint.folder_lost import require_folder
from ingot.trainer.checkpoint.folders import SAVING, prune, publish
from ingot.trainer.checkpoint.manifest import write_manifest
from ingot.trainer.checkpoint.part import Kind, Numbers, RankBlocks, assemble
from ingot.trainer.checkpoint.places import Places, local_rank, make_folder, with_hash
from ingot.trainer.checkpoint.rules import proven_steps
from ingot.trainer.checkpoint.tensor_file import FilePart, write_parts

_LEDGER_BYTES = 16 << 20  # free space for the ledger
_EXTRA_BYTES_PER_RANK = 64 << 10  # free space for a rank's file header, random state and part of the manifest
R = TypeVar("R")


@dataclass(frozen=True)
class CheckpointFacts:
    """The fields of a checkpoint's manifest (schema/checkpoint.py) that do not depend on its tensors."""

    step: int
    tokens: int
    settings: dict[str, Any]
    config_sha256: str
    data_fingerprint: str
    layout: dict[str, int]
    health: Health = field(default_factory=Health)
    callbacks: dict[str, Any] = field(default_factory=dict)
    guard: GuardState = field(default_factory=GuardState)
    quarantine: tuple[Quarantined, ...] = ()
    epoch: int = 0
    kind: SaveKind = FULL


def facts_of(values: Mapping[str, Any]) -> CheckpointFacts:
    """Return the facts whose JSON is `values`."""
    health, guard = Health(**values["health"]), guard_state(values["guard"])
    quarantine = tuple(map(quarantined_of, values["quarantine"]))
    return CheckpointFacts(**dict(values) | {"health": health, "guard": guard, "quarantine": quarantine})


@dataclass(frozen=True)
class FileContents:
    """The tensors of one rank's file, without their bytes.

    parts: in the order of the file; those after the blocks in `written` are random states, which only full checkpoints
    have. written: (tensor, offsets, sizes) of each block. kinds: (dtype, whole shape) of every tensor of which the rank
    holds a block.
    """

    parts: tuple[FilePart, ...]
    written: tuple[tuple[str, Numbers, Numbers], ...]
    kinds: Mapping[str, Kind]


@dataclass(frozen=True)
class PublishedSave:
    """A save that is whole. bytes: of all tensor files. verify_seconds: how long the slowest rank read its file back
    and compared it, most of it while it wrote."""

    bytes: int
    verify_seconds: float


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of the save of `step` in the run `folder`, whose `saves` are those of its kind.

    epoch: the number of the attempt that saves it.
    """

    folder: RunFolder
    step: int
    epoch: int = 0

    @property
    def path(self) -> Path:
        return self.folder.checkpoint(self.step)

    @property
    def temporary(self) -> Path:
        # Another attempt, which was suspended in its save of this step, may go on at any moment.
        return self.path.with_name(f"{SAVING}{self.path.name}" + (f".{self.epoch}" if self.epoch else ""))

    def make_folder(self, bytes_by_rank: Sequence[int]) -> None:
        """Check that the disk has room, and make the temporary folder. Raises ResourceError."""
        needed = _LEDGER_BYTES + _EXTRA_BYTES_PER_RANK * len(bytes_by_rank)
        needed += 0 if Places(self.path).own_folder(0) else sum(bytes_by_rank)  # each rank looks at its own disk
        purpose, checkpoints = (
            f"the checkpoint of step {self.step}, its manifest and the ledger",
            self.folder.checkpoints,
        )
        self._on_disk(checkpoints, lambda: require_free(checkpoints, needed, purpose))
        self.discard()
        if not self.folder.checkpoints.is_dir():
            self._require_folder()
            self._on_disk(self.folder.checkpoints, lambda: self.folder.checkpoints.mkdir(parents=True, exist_ok=True))
        self._on_disk(self.temporary, self.temporary.mkdir)

    def write(self, rank: int, contents: FileContents, data: Iterable[memoryview]) -> RankBlocks:
        """Write and verify the file of `rank`. data: see `write_parts`. Returns the rank's part of the manifest.

        Raises ResourceError if the file cannot be written, and the errors of `write_parts`.
        """
        path = self.temporary / file_of(rank)
        own = Places(self.path).own_folder(local_rank())
        if own:
            path = own / f".{file_of(rank)}.{os.getpid()}.tmp"
            self._on_disk(own, lambda: make_folder(own))
            size = sum(part.bytes for part in contents.parts) + _EXTRA_BYTES_PER_RANK
            require_free(own, size, f"the file of rank {rank} in the checkpoint of step {self.step}")

        def write_it() -> tuple[FileEntry, list[int], float]:
            path.unlink(missing_ok=True)
            entry, checksums, seconds = write_parts(path, contents.parts, data)
            if own:
                path.replace(own / with_hash(file_of(rank), entry.sha256))
                fsync_dir(own)
            return entry, checksums, seconds

        try:
            entry, checksums, seconds = self._on_disk(path, write_it)
        except BaseException:
            if own:
                path.unlink(missing_ok=True)
            raise
        return RankBlocks.pack(entry, contents.kinds, contents.written, checksums[: len(contents.written)], seconds)

    def finish(
        self,
        facts: CheckpointFacts,
        parts: Sequence[RankBlocks],
        ledger: tuple[LedgerSegment, ...],
        segment: bytes | None,
        keep: int,
        keep_every: int = 0,
    ) -> PublishedSave:
        """Write the manifest, rename the folder, and remove the checkpoints that `keep` and `keep_every` do not keep.

        parts: the ranks' parts of the manifest, after every rank has written and verified its file. segment: the
        content of the last file of `ledger`, or None if the file exists; a save of the weights alone has no ledger.
        Raises RunBusyError if another attempt has taken over the run, and ResourceError if the checkpoint cannot be
        written. Old checkpoints that cannot be removed stay until the next save.
        """
        self.require_newest()
        if segment is not None and ledger:
            file = self.folder.ledger / ledger[-1].file
            self._on_disk(file, lambda: write_atomic(file, segment))
        cuts, tensors = assemble(parts)
        manifest = CheckpointManifest(
            **{name: getattr(facts, name) for name in facts.__dataclass_fields__},
            world=len(parts),
            files={file_of(rank): part.file for rank, part in enumerate(parts)},
            cuts=cuts,
            tensors=tensors,
            ledger=ledger,
            accepted=tuple(read_accepted(self.folder.accepted)),
        )

        def publish_it() -> None:
            write_manifest(self.temporary, manifest)
            fsync_dir(self.temporary)
            self.require_newest()
            publish(self.temporary, self.path)

        self._on_disk(self.temporary, publish_it)
        self.require_newest()  # this process may have been suspended since: then the checkpoints are another's
        try:
            prune(self.folder, self.step, keep, keep_every, proven_steps(manifest), manifest.guard)
        except OSError as error:  # the checkpoint is there, and the next save tries again
            print(f"{self.folder.checkpoints}: old checkpoints were not removed: {error}", file=sys.stderr)
        return PublishedSave(
            sum(file.bytes for file in manifest.files.values()), max(part.verify_seconds for part in parts)
        )

    def require_newest(self) -> None:
        """Raise RunBusyError if another attempt has taken over the run, ResourceError if the run folder is lost: where
        its mount is gone, a folder without its run file is at its path."""
        self._require_folder()
        require_newest(LocalStore(self.folder.root), self.epoch)

    def _require_folder(self) -> None:
        if self.epoch:  # otherwise it is a folder of a program's own
            self._on_disk(self.folder.config, lambda: require_folder(self.folder))

    def discard(self) -> None:
        """Remove what a failed save has left."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def is_striped(self) -> bool:
        """True if ranks write their files to disks of their nodes."""
        return Places(self.path).striped

    def discard_own(self, rank: int) -> None:
        """Remove the file that `rank` wrote to a disk of its node in a save that failed, and was not published."""
        name = file_of(rank)
        if own := Places(self.path).own_folder(local_rank()):
            for path in (*own.glob(with_hash(name, "*")), *own.glob(f".{name}.*")):
                path.unlink(missing_ok=True)

    def _on_disk(self, path: Path, write: Callable[[], R]) -> R:
        try:
            return write()
        except OSError as error:
            raise ResourceError(
                "E-CKPT-WRITE",
                f"{path} cannot be written ({error.strerror})",
                rule="a checkpoint is saved completely or not at all; the last checkpoint is unchanged",
                fix="free space on that disk or repair the disk, then run the same command: the run continues",
                path=str(path),
                cause=error.strerror,
            ) from None
