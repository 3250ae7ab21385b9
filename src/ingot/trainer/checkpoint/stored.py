"""The checkpoints of a run in a store: their names, the listing, and which of them count. No torch."""

import json
from dataclasses import dataclass

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import BlobStore, NotStored, StoredObject, read_object
from ingot.trainer.checkpoint.fence import Epoch, newest_epoch
from ingot.trainer.checkpoint.manifest import MANIFEST, SUSPECT, parse_manifest
from ingot.trainer.checkpoint.rules import FOLDER


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint in the listing of a store. stored_at: Unix seconds. whole: it has a manifest."""

    step: int
    bytes: int
    stored_at: float
    whole: bool


class StoredCheckpoints:
    """The checkpoints of the run `folder` in `store`. The errors of the store pass through every method."""

    def __init__(self, folder: RunFolder, store: BlobStore):
        self._folder, self.store = folder, store
        self._judged: dict[int, tuple[int, bool]] = {}  # step -> epoch of the stored checkpoint, whether it is suspect

    @property
    def url(self) -> str:
        return self.store.url

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that have a manifest, newest first."""
        return sorted(self._finished(self._listed()), reverse=True)

    def stored(self) -> list[StoredCheckpoint]:
        """Return all checkpoints in the store, also those whose upload never ended, newest last. No object is read."""
        return [
            StoredCheckpoint(
                step=step,
                bytes=sum(one.bytes for one in objects),
                stored_at=max(one.modified for one in objects),
                whole=self._name(step, MANIFEST) in (one.name for one in objects),
            )
            for step, objects in sorted(self._listed().items())
        ]

    def _listed(self) -> dict[int, list[StoredObject]]:
        """Return step -> all objects of its checkpoint, also of those without a manifest."""
        found: dict[int, list[StoredObject]] = {}
        for one in self.store.list(self._folder.checkpoints.name):
            parts = one.name.split("/")
            if len(parts) == 3 and (match := FOLDER.fullmatch(parts[1])):
                found.setdefault(int(match[1]), []).append(one)
        return found

    def _finished(self, listed: dict[int, list[StoredObject]]) -> list[int]:
        """Return the steps of `listed` that have a manifest, except those that were published too late."""
        whole = [step for step, objects in listed.items() if self._name(step, MANIFEST) in (o.name for o in objects)]
        holder = newest_epoch(self.store) if whole else None
        return [step for step in whole if not self._is_late(holder, step)]

    def _is_late(self, holder: Epoch | None, step: int) -> bool:
        if holder is None or not holder.ignores(step, 1, ""):  # most steps are decided without reading a manifest
            return False
        try:
            return holder.ignores(step, self._judge(step)[0], "")
        except CheckpointError:  # damaged: a fetch reports that
            return False

    def _judge(self, step: int) -> tuple[int, bool]:
        """Return the number of the attempt that saved a stored checkpoint, and whether its weights are suspect."""
        if step not in self._judged:
            manifest = self.manifest(step)
            self._judged[step] = manifest.epoch, manifest.health.state == SUSPECT
        return self._judged[step]

    def _name(self, step: int, file: str) -> str:
        return f"{self._folder.checkpoint(step).relative_to(self._folder.root)}/{file}"

    def _tensor_name(self, step: int, file: str, sha256: str) -> str:
        return self._name(step, _with_hash(file, sha256))

    def _place(self, step: int) -> str:
        return f"{self.url}/{self._name(step, MANIFEST)}".rpartition("/")[0]

    def manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest of a stored checkpoint. Raises CheckpointError if it is damaged."""
        return parse_manifest(self._place(step), read_object(self.store, self._name(step, MANIFEST)))

    def manifest_hash(self, step: int) -> str:
        """Return the hash that the manifest of a stored checkpoint has of itself, checked; "" if it is damaged."""
        text = read_object(self.store, self._name(step, MANIFEST))
        try:
            parse_manifest(self._place(step), text)
        except CheckpointError:  # a fetch reports that
            return ""
        return json.loads(text)["sha256"]

    def _ledger_name(self, segment: LedgerSegment) -> str:
        return f"{self._folder.ledger.name}/{_with_hash(segment.file, segment.sha256)}"

    def _has_manifest(self, step: int) -> bool:
        """Return whether the store has the manifest of `step`, which a listing that is late may lack."""
        try:
            return bool(read_object(self.store, self._name(step, MANIFEST)))
        except NotStored:
            return False

    def _is_suspect(self, step: int) -> bool | None:
        """Return whether the weights of a stored checkpoint were judged suspect; None if its manifest is damaged."""
        try:
            return self._judge(step)[1]
        except CheckpointError:
            return None


def _with_hash(file: str, sha256: str) -> str:
    """Return the name of a file's object. With its content in its name, an object is never replaced by another one,
    however late it is written."""
    stem, dot, suffix = file.partition(".")
    return f"{stem}-{sha256[:16]}{dot}{suffix}"
