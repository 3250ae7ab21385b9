"""The remote tier: checkpoints of a run in a store, below the names that they have in the run folder. No torch.

A checkpoint goes up after it was saved and verified on the local disk: its tensor files, the samples of its steps, the
run file, and the manifest last, by a write that fails if the manifest exists. So a checkpoint is in the store if its
manifest is. Saves of the weights alone go the same way, in a folder of their own. A store that loses or changes a byte
is noticed when the checkpoint comes back: every byte is compared with the hashes of the manifest on the way.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import FULL, WEIGHTS, CheckpointManifest, LedgerSegment, SaveKind
from ingot.schema.guard_record import SUSPECT, GuardState, back_to
from ingot.schema.run import Checkpoint, RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.places import open_store
from ingot.stores.store import AlreadyStored, BlobStore, NotStored, StoreUnreachable
from ingot.trainer.checkpoint.fence import Epoch, lease_lost, newest_epoch, newest_local_epoch
from ingot.trainer.checkpoint.fetch import FetchedCheckpoints
from ingot.trainer.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
)
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.pins import StoredPins, pinned_steps
from ingot.trainer.checkpoint.places import Places, node
from ingot.trainer.checkpoint.retention import retained
from ingot.trainer.checkpoint.rules import damaged, proven_steps

_CHUNK = 8 << 20
_Job = tuple[IO[bytes], str, str]  # an open file, the name of its object, its hash


class NotYetStored(StoreUnreachable):
    """Files of a checkpoint are not in the store yet that other nodes upload."""


def open_tier(folder: RunFolder, checkpoint: Checkpoint, epoch: int = 0, meter: Meter = SILENT) -> "RemoteTier | None":
    """Return the remote tier of a run, for the saves of the kind that `folder` names; None if the run has none.

    Saves of the weights alone are kept by checkpoint.weights_keep, as on the disk. Raises ConfigError and
    MissingPartError.
    """
    remote = checkpoint.remote
    if not remote.url:
        return None
    if folder.kind == WEIGHTS:
        remote = replace(remote, keep=checkpoint.weights_keep, keep_every=0)
    return RemoteTier(folder, open_store(remote.url), remote, epoch, meter)


class RemoteTier(FetchedCheckpoints):
    """The checkpoints of the run `folder` in `store`, or its saves of the weights alone: upload, fetch and remove them.

    epoch: the number of the attempt that uses it; 0: none, as in commands. meter: counts the bytes that move. commits:
    True if uploads of this node end with the manifest. With files on disks of nodes, each node uploads its own, and
    node 0 commits when all are there.
    """

    def __init__(
        self, folder: RunFolder, store: BlobStore, remote: RemoteCheckpoints, epoch: int = 0, meter: Meter = SILENT
    ):
        super().__init__(folder, store, remote, epoch, meter)
        self.commits = not node()
        self.pins = StoredPins(store, folder.saves)
        self._segments: set[LedgerSegment] | None = None  # those that were sent and verified
        self._was_recorded = False  # the store had the record of this attempt

    def push(self, step: int, *, compare: bool = False) -> int:
        """Upload the local checkpoint of `step`, and return the bytes sent: 0 if the store has it.

        compare: if the store has it, read it, and send again what is missing or differs from the local files, which the
        caller has verified. Without it, what the store lists counts as there.
        With files on disks of nodes: those of this node; then, on the node that commits, the manifest. Raises
        CheckpointError if a local file is not as it was saved, or if the store has another checkpoint of this step;
        RunBusyError if another attempt has taken over the run; NotYetStored if other nodes have not uploaded theirs.
        """
        path, name = self._folder.checkpoint(step), self._name(step, MANIFEST)
        places = Places(path)
        with ExitStack() as opened:  # open files survive the removal of an old checkpoint during its upload
            try:
                manifest, text = read_manifest(path), (path / MANIFEST).read_bytes()
                jobs: list[_Job] = [
                    (opened.enter_context(found.open("rb")), self._tensor_name(step, file, entry.sha256), entry.sha256)
                    for file, entry in manifest.files.items()
                    if (found := places.find(file, entry.sha256)) is not None
                    if self.commits or found.parent != path  # all nodes see the files in the folder of the checkpoint
                ]
            except (CheckpointError, FileNotFoundError):
                if path.is_dir():
                    raise
                raise _removed(path, step, self.kind) from None
            self._require_newest()
            listed = self._listed()
            if step in self._finished(listed) and not self._is_superseded(name, text, manifest):
                self._require_same(name, text)
                return self._send_damaged(path, manifest, jobs) if compare else 0
            if not self.commits:
                return self._send_absent(path, jobs, step)
            replaces = name in (one.name for one in listed.get(step, ()))
            known = self._known_segments()
            new = [segment for segment in manifest.ledger if segment not in known]
            ledger = sum((self._folder.ledger / segment.file).stat().st_size for segment in new)
            self._meter.begin("uploading", ledger + sum(os.fstat(job[0].fileno()).st_size for job in jobs))
            with self._pace.workers() as pool:
                sent = self._send_absent(path, jobs, step) if places.striped else self._send_all(path, jobs)
                sent += sum(pool.map(lambda segment: self._send_segment(path, segment), new))
        if len(jobs) < len(manifest.files):
            self._require_all(step, manifest)
        self._require_sent(step, manifest)
        self._require_newest()
        self.store.write(self._folder.config.name, [self._folder.config.read_bytes()])
        if replaces:  # superseded, or published too late, so that it is nobody's checkpoint
            self.store.remove(name)
        try:
            self.store.write(name, [text], new=True)
        except AlreadyStored:  # by another writer; or by the first attempt of a request whose answer was lost
            self._require_same(name, text)
        known.update(new)
        self._remember(manifest)
        return sent

    def _send_damaged(self, checkpoint: Path, manifest: CheckpointManifest, jobs: list[_Job]) -> int:
        """Send those files of a checkpoint in the store again that it lacks or has with other bytes."""
        self._meter.begin("comparing", sum(os.fstat(job[0].fileno()).st_size for job in jobs))
        with self._pace.workers() as pool:
            sound = list(pool.map(lambda job: self.is_stored(job[1], job[2]), jobs))
            known = list(
                pool.map(lambda one: self.is_stored(self._ledger_name(one), one.sha256, counts=False), manifest.ledger)
            )
            again = [job for job, is_sound in zip(jobs, sound, strict=True) if not is_sound]
            segments = [one for one, is_sound in zip(manifest.ledger, known, strict=True) if not is_sound]
            if again:
                self._meter.begin("uploading", sum(os.fstat(job[0].fileno()).st_size for job in again))
            return self._send_all(checkpoint, again) + sum(
                pool.map(lambda segment: self._send_segment(checkpoint, segment), segments)
            )

    def _send_all(self, checkpoint: Path, jobs: list[_Job]) -> int:
        with self._pace.workers() as pool:
            return sum(pool.map(lambda job: self._send(checkpoint, *job), jobs))

    def _send_absent(self, checkpoint: Path, jobs: list[_Job], step: int) -> int:
        """Send those of `jobs` that the store lacks: the attempts of an upload that waits for others send them once."""
        there = self._there(step)
        absent = [job for job in jobs if there.get(job[1]) != os.fstat(job[0].fileno()).st_size]
        self._meter.add(sum(there[name] for _, name, _ in jobs if name not in {name for _, name, _ in absent}))
        return self._send_all(checkpoint, absent)

    def _there(self, step: int) -> dict[str, int]:
        """Return the objects of a checkpoint that its upload has sent so far -> their bytes.

        If the upload replaces a checkpoint, objects from before its manifest are left out: they may be damaged, and a
        step that is trained again has the same bits, so the same names.
        """
        listed, manifest = self._listed().get(step, ()), self._name(step, MANIFEST)
        replaced = max((one.modified for one in listed if one.name == manifest), default=float("-inf"))
        return {one.name: one.bytes for one in listed if one.modified > replaced}

    def _require_all(self, step: int, manifest: CheckpointManifest) -> None:
        """Raise NotYetStored unless the store lists every file of the checkpoint, with its size."""
        there = self._there(step)
        absent = [
            file
            for file, entry in sorted(manifest.files.items())
            if there.get(self._tensor_name(step, file, entry.sha256)) != entry.bytes
        ]
        if absent:
            raise NotYetStored(
                "E-TIER-INCOMPLETE",
                f"{self.url} lacks {len(absent)} of {len(manifest.files)} files of step {step}, like {absent[0]}, and "
                "they are on no disk of this node",
                rule="each node uploads the files on its disks, and the first node the manifest when all are there",
                fix="none is needed while the other nodes upload; without a run, ingot ckpt push RUN on each of them",
                store=self.url,
                step=step,
                absent=absent,
            )

    def _require_sent(self, step: int, manifest: CheckpointManifest) -> None:
        """Raise StoreUnreachable if the store lacks an object of the checkpoint, which somebody removed since it was
        sent. A listing can be late, so what it lacks is looked for by its name."""
        names = {self._tensor_name(step, file, entry.sha256) for file, entry in manifest.files.items()}
        names |= {self._ledger_name(segment) for segment in manifest.ledger}
        there = self._ledger_listed() | {one.name for one in self._listed().get(step, ())}
        if gone := sorted(name for name in names - there if not self._is_there(name)):
            raise StoreUnreachable(
                "E-TIER-EMPTIED",
                f"{self.url} lacks {len(gone)} of {len(names)} objects of step {step} again, like {gone[0]}: somebody "
                "removes objects there",
                rule="a checkpoint gets its manifest when the store has all its objects",
                fix="none is needed: all of it is sent again. If the store is emptied for room, lower "
                "checkpoint.remote.keep",
                store=self.url,
                step=step,
                gone=gone,
            )

    def _require_newest(self) -> None:
        """Raise RunBusyError if another attempt has taken over the run, StoreUnreachable if the store has no record of
        this one."""
        newest, own = newest_epoch(self.store), newest_local_epoch(self._folder.root)
        number = self._epoch or (own.epoch if own else 0)
        if newest is not None and (newest.epoch > number or (newest.epoch == number and newest.holder != _holder(own))):
            raise lease_lost(self.url, newest, number)
        if self._epoch and (newest is None or newest.epoch < number):
            why = "it lost it" if self._was_recorded else "it did not answer when the run was started, or lost it"
            raise StoreUnreachable(
                "E-LEASE-PENDING",
                f"{self.url} has no record of this attempt: {why}",
                rule="the launcher records its attempt in the store before checkpoints are uploaded",
                fix="none is needed: both are tried again",
                store=self.url,
                epoch=number,
                had_it=self._was_recorded,
            )
        self._was_recorded = True

    def _is_superseded(self, name: str, text: bytes, manifest: CheckpointManifest) -> bool:
        """Return whether the local save takes the place of the stored one, because its step was trained again.

        A checkpoint does if the stored one is of the same attempt, as after a roll-back, or of an earlier one, or has a
        damaged manifest. Weights alone always do: training never continues from them.
        """
        if self._holds(name, text):
            return False
        try:
            return self.kind == WEIGHTS or 0 < self.manifest(manifest.step).epoch <= manifest.epoch
        except CheckpointError:
            return True

    def _holds(self, name: str, text: bytes) -> bool:
        """Return whether the object `name` has the bytes `text`. It is read up to the first difference, in chunks."""
        rest = memoryview(text)
        for chunk in self.store.stream(name):
            if rest[: len(chunk)] != chunk:
                return False
            rest = rest[len(chunk) :]
        return not rest

    def _require_same(self, name: str, text: bytes) -> None:
        if not self._holds(name, text):
            raise CheckpointError(
                "E-TIER-OTHER",
                f"{self.url}/{name} is another checkpoint than the local one of this step",
                rule="a place in a store holds the checkpoints of one run",
                fix="set checkpoint.remote.url to a place of its own; or, if the other one is not needed, remove it "
                "from the store",
                store=self.url,
                name=name,
            )

    def _known_segments(self) -> set[LedgerSegment]:
        """Return the ledger segments that need not be sent: a stored checkpoint has them, and the store lists them.

        The listing alone also has what a write left that failed.
        """
        if self._segments is None:
            self._segments = set()
            for step in self.steps()[:1]:
                with contextlib.suppress(CheckpointError):  # a damaged one shows nothing
                    self._segments.update(self.manifest(step).ledger)
        there = self._ledger_listed() if self._segments else set()
        self._segments = {segment for segment in self._segments if self._ledger_name(segment) in there}
        return self._segments

    def _ledger_listed(self) -> set[str]:
        """Return the names of the ledger segments that the store lists: hashes are a part of them."""
        return {one.name for one in self.store.list(self._folder.ledger.name)}

    def _send_segment(self, checkpoint: Path, segment: LedgerSegment) -> int:
        with (self._folder.ledger / segment.file).open("rb") as file:
            return self._send(checkpoint, file, self._ledger_name(segment), segment.sha256)

    def _send(self, checkpoint: Path, file: IO[bytes], name: str, sha256: str) -> int:
        sent, digest = 0, hashlib.sha256()

        def chunks() -> Iterator[bytes]:
            nonlocal sent
            while chunk := file.read(_CHUNK):
                self._pace.take(len(chunk))
                digest.update(chunk)
                sent += len(chunk)
                self._meter.add(len(chunk))
                yield chunk

        self.store.write(name, chunks())
        if digest.hexdigest() != sha256:
            self.store.remove(name)
            short = Path(file.name).name
            raise damaged(checkpoint, f"{short} differs from the bytes that were saved", "E-CKPT-HASH", file=short)
        return sent

    def retained(self) -> dict[int, str]:
        """Return step -> why the rules of the tier keep it, "" if they do not (`retained`), newest first.

        Pinned are the steps that are pinned in the store or in the run folder.
        """
        steps = self.steps()
        proven, guard = self._guard_of_newest(steps)
        return retained(
            steps,
            keep=self.remote.keep,
            keep_every=self.remote.keep_every,
            pinned=self.pins.pinned() | pinned_steps(self._folder),
            is_sound=lambda step: self._doubt(step) is not None,
            is_suspect=lambda step: (doubt := self._doubt(step)) is not None and doubt.grade == SUSPECT,
            back_to=back_to(self._folder.guard, guard, proven),
            proven_steps=proven,
        )

    def _guard_of_newest(self, steps: Sequence[int]) -> tuple[int, GuardState]:
        """Return guard.proven_steps, 0 if it has none, and the guard of the newest checkpoint whose manifest is
        sound."""
        for step in steps:
            with contextlib.suppress(CheckpointError, NotStored):
                return proven_steps(facts := self._facts_of(step)), facts.guard
        return 0, GuardState()

    def half_uploads(self) -> dict[int, list[str]]:
        """Return step -> the objects that an upload left which never ended and was not repeated: of steps older than
        the newest checkpoint."""
        listed = self._listed()
        finished = self._finished(listed)
        return {
            step: [one.name for one in objects]
            for step, objects in sorted(listed.items())
            if step not in finished and step < max(finished, default=0)
            if self._name(step, MANIFEST) in (one.name for one in objects) or not self._has_manifest(step)
        }

    def retract(self, step: int) -> None:
        """Remove the manifest and the pin of a stored save: it is none any more, and is uploaded again if it is named.
        Its other objects stay until the tier is pruned."""
        self.pins.unpin(step)
        self.store.remove(self._name(step, MANIFEST))

    def prune(self) -> list[int]:
        """Remove the checkpoints that the rules of the tier do not keep, and what uploads that never ended left.

        Returns the steps of the checkpoints. Pins of the run folder go to the store first. The manifest goes first, so
        that a half-removed checkpoint is none.
        """
        for step in pinned_steps(self._folder) - self.pins.pinned():
            self.pins.mark(step)
        listed, removed = self._listed(), []
        for step in [step for step, reason in self.retained().items() if not reason]:
            if self.pins.begin_removal(step):
                for one in sorted(listed[step], key=lambda one: one.name != self._name(step, MANIFEST)):
                    self.store.remove(one.name)
                removed.append(step)
        for names in self.half_uploads().values():
            for name in names:
                self.store.remove(name)
        self.pins.end_removals()
        return removed


def _holder(record: Epoch | None) -> str:
    return record.holder if record else ""


def _removed(path: Path, step: int, kind: SaveKind) -> CheckpointError:
    keep = "checkpoint.keep" if kind == FULL else "checkpoint.weights_keep"
    return CheckpointError(
        "E-TIER-REMOVED",
        f"{path} was removed before its upload began: newer checkpoints displaced it",
        rule=f"the run keeps the newest {keep} of them on its disk",
        fix=f"none is needed if newer ones are stored; else raise {keep}, or save less often",
        path=str(path),
        step=step,
    )
