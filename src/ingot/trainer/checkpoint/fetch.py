"""Checkpoints come back from the store: every byte is compared with the manifest on its way to the disk. No torch."""

import hashlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import CheckpointError, IngotError
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.guard_record import NO_DOUBT
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.storage import atomic_file, require_free, sha256_file, write_atomic
from ingot.stores.store import BlobStore, NotStored
from ingot.trainer.checkpoint.fence import adopt
from ingot.trainer.checkpoint.folders import SAVING, publish
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    candidate_folders,
    claimed_hash,
    grade_of_doubt,
    is_finished,
    parse_manifest,
)
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.pace import Pace
from ingot.trainer.checkpoint.places import Places, disks_of, make_folder, name_run, recorded_names, with_hash
from ingot.trainer.checkpoint.rules import damaged, wrong_size
from ingot.trainer.checkpoint.stored import StoredCheckpoints

Order = tuple[int, int]  # grade of doubt, -step: a resume tries the smallest first, on the disk and in the store
OnRefused = Callable[[int, IngotError], object]
OnManifest = Callable[[CheckpointManifest], object]  # called before anything is fetched; what it raises ends the fetch


@dataclass(frozen=True)
class Fetched:
    """A checkpoint that came from the store. bytes: received."""

    step: int
    bytes: int
    seconds: float


def place_in_order(checkpoint: Path) -> Order:
    """Return the place of a local checkpoint in the order in which a resume tries them."""
    return grade_of_doubt(checkpoint), -int(checkpoint.name.removeprefix("step-"))


class FetchedCheckpoints(StoredCheckpoints):
    """The checkpoints in `store` that can be fetched into the run `folder`.

    epoch: the number of the attempt that uses them; 0: none, as in commands. meter: counts the bytes that move.
    """

    def __init__(
        self, folder: RunFolder, store: BlobStore, remote: RemoteCheckpoints, epoch: int = 0, meter: Meter = SILENT
    ):
        super().__init__(folder, store)
        self.remote, self._epoch, self._meter = remote, epoch, meter
        self._pace = Pace(remote.bytes_per_second)
        self._refused: set[int] = set()  # those that were found damaged: fetched once, not again

    def fetch_file(self, manifest: CheckpointManifest, file: str) -> int:
        """Fetch one file of a checkpoint to a disk of this node, verified on the way, and return its bytes.

        Raises NotStored, CheckpointError if the stored one is damaged, ResourceError if the disk has no room.
        """
        entry, places = manifest.files[file], Places(self._folder.checkpoint(manifest.step))
        target = places.find(file, entry.sha256)  # a damaged one is replaced where readers find it
        if target is None:
            folder = places.own_folder(sorted(manifest.files).index(file))
            assert folder is not None
            make_folder(folder)
            target = folder / with_hash(file, entry.sha256)
        require_free(target.parent, entry.bytes, f"{file} of the checkpoint of step {manifest.step}")
        name = self._tensor_name(manifest.step, file, entry.sha256)
        return self._receive(manifest.step, target, name, entry.sha256, entry.bytes)

    def fetch_segment(self, step: int, segment: LedgerSegment) -> None:
        """Fetch one file of the ledger that the checkpoint of `step` lists, verified on the way.

        Raises NotStored, CheckpointError if the stored one is damaged, and the errors of the store.
        """
        path = self._folder.ledger / segment.file
        self._receive(step, path, self._ledger_name(segment), segment.sha256, None)

    def damaged_objects(self, step: int) -> list[str]:
        """Read every byte of a stored save, and return the names of its files that are missing or differ from what was
        saved, "ledger/..." for those of the ledger. Raises CheckpointError if its manifest is damaged, NotStored if it
        has none, and the errors of the store.
        """
        manifest = self.manifest(step)
        jobs = [
            (file, self._tensor_name(step, file, entry.sha256), entry.sha256) for file, entry in manifest.files.items()
        ]
        jobs += [(f"ledger/{one.file}", self._ledger_name(one), one.sha256) for one in manifest.ledger]
        with self._pace.workers() as pool:
            sound = pool.map(lambda job: self.is_stored(job[1], job[2], counts=not job[0].startswith("ledger/")), jobs)
            return [file for (file, _, _), is_sound in zip(jobs, sound, strict=True) if not is_sound]

    def is_stored(self, name: str, sha256: str, *, counts: bool = True) -> bool:
        """Read the object `name`, and return whether it is there with this hash. counts: whether the meter counts its
        bytes."""
        digest = hashlib.sha256()
        try:
            for chunk in self.store.stream(name):
                self._pace.take(len(chunk))
                self._meter.add(len(chunk) if counts else 0)
                digest.update(chunk)
        except NotStored:
            return False
        return digest.hexdigest() == sha256

    def fetch(self, step: int, *, whole: bool = True, on_manifest: OnManifest = lambda manifest: None) -> int:
        """Make the local checkpoint of `step` from the store, and return the bytes received.

        A local checkpoint of this step is replaced. If the run has disks, the tensor files go to those of this node;
        whole = False then leaves them to the nodes that need them. Raises CheckpointError if the stored one is damaged,
        ResourceError if the local disk has no room, RunBusyError if another attempt has taken over the run; the local
        checkpoints are then as they were.
        """
        text = self._manifest_text(step)
        manifest = parse_manifest(self._place(step), text)
        on_manifest(manifest)
        striped = bool(disks_of(self._folder.root))
        if striped and not recorded_names(self._folder.root)[1]:  # a caller that reports damage gives another name
            name_run(self._folder)
        folder = self._folder.checkpoint(step)
        places = Places(folder)
        temporary = folder.with_name(f"{SAVING}{folder.name}.fetched")
        needed = 0 if striped else sum(entry.bytes for entry in manifest.files.values())
        require_free(self._folder.checkpoints, needed, f"the checkpoint of step {step}")
        shutil.rmtree(temporary, ignore_errors=True)
        jobs = [
            (temporary / file, self._tensor_name(step, file, entry.sha256), entry.sha256, entry.bytes)
            for file, entry in manifest.files.items()
            if not striped
        ]
        absent = [
            file
            for file, entry in manifest.files.items()
            if whole and striped
            if (found := places.find(file, entry.sha256)) is None or not _has(found, entry.sha256)
        ]
        jobs += [
            (self._folder.ledger / one.file, self._ledger_name(one), one.sha256, None)
            for one in manifest.ledger
            if not _has(self._folder.ledger / one.file, one.sha256)
        ]
        try:
            self._meter.begin("fetching", needed)
            with self._pace.workers() as pool:
                received = sum(pool.map(lambda job: self._receive(step, *job), jobs))
                received += sum(pool.map(lambda file: self.fetch_file(manifest, file), absent))
            write_atomic(temporary / MANIFEST, text)
            sha256 = claimed_hash(temporary)
            adopt(self._folder.root, manifest, sha256, self._epoch)
            publish(temporary, folder)
            adopt(self._folder.root, manifest, sha256, self._epoch)  # a damaged record was repaired meanwhile
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return received

    def fetch_newest(
        self,
        on_refused: OnRefused = lambda step, error: None,
        on_manifest: OnManifest = lambda manifest: None,
    ) -> Fetched | None:
        """Fetch the stored checkpoint that a resume would take before every finished local one; None: there is none.

        on_refused: called with the step of a stored one that cannot be used, and why. Raises CheckpointError or
        NotStored if the store has only such ones and the local disk has none.
        """
        local = [path for path in candidate_folders(self._folder.checkpoints) if is_finished(path)]
        failures: list[IngotError] = []

        def refused(step: int, error: IngotError) -> None:
            failures.append(error)
            on_refused(step, error)

        fetched = self.fetch_before(min(map(place_in_order, local), default=None), (), refused, on_manifest)
        if fetched is None and failures and not local:
            raise failures[-1]
        return fetched

    def fetch_before(
        self,
        limit: Order | None,
        seen: Collection[int],
        on_refused: OnRefused,
        on_manifest: OnManifest = lambda manifest: None,
    ) -> Fetched | None:
        """Fetch the first sound checkpoint that a resume would take before `limit`; None: before nothing else.

        Those of the steps `seen`, and those that were refused before, are left out. Returns None if none is left.
        """
        for step in self._steps_before(limit):
            if step in seen or step in self._refused:
                continue
            if fetched := self._fetch_sound(step, on_refused, on_manifest):
                return fetched
        return None

    def fetch_again(self, step: int, on_refused: OnRefused) -> Fetched | None:
        """Fetch the stored checkpoint of `step` in place of a damaged local one; None if the store has no sound one."""
        return self._fetch_sound(step, on_refused) if step in self.steps() and step not in self._refused else None

    def _fetch_sound(
        self, step: int, on_refused: OnRefused, on_manifest: OnManifest = lambda manifest: None
    ) -> Fetched | None:
        began = time.perf_counter()
        try:
            received = self.fetch(step, whole=False, on_manifest=on_manifest)
            return Fetched(step, received, time.perf_counter() - began)
        except (CheckpointError, NotStored) as error:  # a listing may show what was removed
            self._refused.add(step)
            on_refused(step, error)
            return None

    def _steps_before(self, limit: Order | None) -> Iterator[int]:
        """Yield the stored steps in the order of a resume, up to `limit`. The manifests of later ones are not read."""
        doubted = []
        for step in self.steps():
            if limit is not None and (0, -step) >= limit:
                break
            try:
                doubt = self._doubt(step) or NO_DOUBT
            except NotStored:  # a fetch reports that
                doubt = NO_DOUBT
            order = (doubt.grade, -step)
            if not doubt.grade:
                yield step
            elif limit is None or order < limit:
                doubted.append(order)
        yield from (-negative for _, negative in sorted(doubted))

    def _receive(self, step: int, path: Path, name: str, sha256: str, size: int | None) -> int:
        in_ledger = path.parent == self._folder.ledger
        stored, short = self._place(step), f"{path.parent.name}/{path.name}" if in_ledger else path.name
        received, digest = 0, hashlib.sha256()
        with atomic_file(path) as file:
            for chunk in self.store.stream(name):
                self._pace.take(len(chunk))
                received += len(chunk)
                self._meter.add(0 if in_ledger else len(chunk))
                if size is not None and received > size:
                    break
                digest.update(chunk)
                file.write(chunk)
            if size is not None and received != size:
                raise wrong_size(stored, short, received, size)
            if digest.hexdigest() != sha256:
                raise damaged(stored, f"{short} differs from the bytes that were saved", "E-CKPT-HASH", file=short)
        return received


def _has(path: Path, sha256: str) -> bool:
    try:
        return sha256_file(path) == sha256
    except OSError:
        return False
