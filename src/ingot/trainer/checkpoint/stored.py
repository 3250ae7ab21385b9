"""The checkpoints of a run in a store: their names, the listing, and which of them count. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ingot.errors import CheckpointError
from ingot.schema.checkpoint import CheckpointManifest, LedgerSegment, SaveKind
from ingot.schema.guard_record import NO_DOUBT, Doubt
from ingot.schema.run_folder import RunFolder
from ingot.stores.store import BlobStore, NotStored, ObjectTooLarge, StoredObject, read_object
from ingot.trainer.checkpoint.fence import Epoch, newest_epoch
from ingot.trainer.checkpoint.headers import manifest_problem, most_text
from ingot.trainer.checkpoint.manifest import MANIFEST, doubt_about, measures_beside, parse_manifest
from ingot.trainer.checkpoint.places import with_hash
from ingot.trainer.checkpoint.rules import FOLDER, damaged

_SEGMENT = re.compile(r"steps-\d{8,}-(\d{8,})-[0-9a-f]{16}\.i64")
_NONE: Mapping[int, CheckpointManifest] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint in the listing of a store. stored_at: Unix seconds of its last object, as the store counts.

    whole: it has a manifest; otherwise its upload has not ended. late: it was published too late (fence.py). damage:
    the reason why it cannot be fetched, by its manifest and the listing; "" if there is none. doubt: about its
    weights. manifest: None if it cannot be read.
    """

    step: int
    bytes: int
    stored_at: float
    whole: bool
    late: bool = False
    damage: str = ""
    doubt: Doubt = NO_DOUBT
    manifest: CheckpointManifest | None = None


class StoredCheckpoints:
    """The checkpoints of the run `folder` in `store`, or its saves of the weights alone if those are the `saves` of
    `folder`. The errors of the store pass through every method."""

    def __init__(self, folder: RunFolder, store: BlobStore):
        self._folder, self.store = folder, store
        self._facts: dict[int, CheckpointManifest] = {}  # step -> the manifest, without what can be long
        self._bytes: dict[int, int] = {}  # step -> the most that a listing showed of it: a late one lacks objects

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def kind(self) -> SaveKind:
        return self._folder.kind

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that have a manifest, newest first."""
        return sorted(self._finished(self._listed()), reverse=True)

    def stored(self, known: Mapping[int, CheckpointManifest] = _NONE) -> list[StoredCheckpoint]:
        """Return all checkpoints in the store, also those whose upload never ended, newest last.

        known: manifests of the local disk by step. The store's own is read where the listing does not fit to it, so
        that a checkpoint on both tiers costs no request. Nothing else is read.
        """
        listed = self._listed()
        ledger = {one.name: one.bytes for one in self.store.list(self._folder.ledger.name)} if listed else {}
        holder = newest_epoch(self.store) if listed else None
        return [self._judged_by_listing(step, listed[step], ledger, holder, known.get(step)) for step in sorted(listed)]

    def _judged_by_listing(
        self,
        step: int,
        objects: list[StoredObject],
        ledger: dict[str, int],
        holder: Epoch | None,
        known: CheckpointManifest | None,
    ) -> StoredCheckpoint:
        names = {one.name: one.bytes for one in objects}
        size, stored_at = sum(names.values()), max(one.modified for one in objects)
        if self._name(step, MANIFEST) not in names:
            return StoredCheckpoint(step=step, bytes=size, stored_at=stored_at, whole=False)
        late, manifest, damage = self._is_late(holder, step), known, ""
        if late or manifest is None or self._missing(step, manifest, names | ledger):
            try:
                manifest = self.manifest(step)
                damage = self._missing(step, manifest, names | ledger)
            except CheckpointError as error:
                manifest, damage = None, error.found.partition(": ")[2] or error.found
        return StoredCheckpoint(
            step=step,
            bytes=size,
            stored_at=stored_at,
            whole=True,
            late=late,
            damage=damage,
            doubt=doubt_about(manifest, measures_beside(self._folder.checkpoints)) if manifest else NO_DOUBT,
            manifest=manifest,
        )

    def _missing(self, step: int, manifest: CheckpointManifest, names: Mapping[str, int]) -> str:
        """Return which object of a checkpoint the listing `names` (name -> bytes) lacks, "" if it has all of them."""
        for file, entry in manifest.files.items():
            found = names.get(self._tensor_name(step, file, entry.sha256))
            if found != entry.bytes:
                return f"{file} has {found:,} bytes, but {entry.bytes:,} were saved" if found else f"{file} is missing"
        for segment in manifest.ledger:
            if self._ledger_name(segment) not in names:
                return f"ledger/{segment.file} is missing"
        return ""

    def orphaned_segments(self) -> list[StoredObject]:
        """Return the ledger segments in the store that no stored checkpoint lists.

        Segments that a checkpoint with an unreadable manifest may list are left out, and those after the newest
        checkpoint, whose upload may go on.
        """
        whole = [one for one in self.stored() if one.whole]
        needed = {self._ledger_name(segment) for one in whole if one.manifest for segment in one.manifest.ledger}
        unknown = max((one.step for one in whole if one.manifest is None), default=0)
        newest = max((one.step for one in whole), default=0)
        return [
            one
            for one in self.store.list(self._folder.ledger.name)
            if one.name not in needed and (match := _SEGMENT.fullmatch(one.name.rpartition("/")[2]))
            if unknown < (last := int(match[1])) < newest and not self._has_manifest(last)
        ]

    def _listed(self) -> dict[int, list[StoredObject]]:
        """Return step -> all objects of its checkpoint, also of those without a manifest."""
        found: dict[int, list[StoredObject]] = {}
        for one in self.store.list(self._folder.checkpoints.name):
            parts = one.name.split("/")
            if len(parts) == 3 and (match := FOLDER.fullmatch(parts[1])):
                found.setdefault(int(match[1]), []).append(one)
        for step, objects in found.items():
            self._bytes[step] = max(self._bytes.get(step, 0), sum(one.bytes for one in objects))
        return found

    def _finished(self, listed: dict[int, list[StoredObject]]) -> list[int]:
        """Return the steps of `listed` that have a manifest, except those that were published too late."""
        whole = [step for step, objects in listed.items() if self._name(step, MANIFEST) in (o.name for o in objects)]
        holder = newest_epoch(self.store) if whole else None
        return [step for step in whole if not self._is_late(holder, step)]

    def _is_late(self, holder: Epoch | None, step: int) -> bool:
        if holder is None or not holder.ignores(step, 1, "", self.kind):  # most are decided without reading a manifest
            return False
        try:
            return holder.ignores(step, self._facts_of(step).epoch, "", self.kind)
        except CheckpointError:  # damaged: a fetch reports that
            return False

    def _facts_of(self, step: int) -> CheckpointManifest:
        """Return what decides whether a stored checkpoint counts. Raises CheckpointError if its manifest is damaged."""
        if step not in self._facts:
            self._remember(self.manifest(step))
        return self._facts[step]

    def _remember(self, manifest: CheckpointManifest) -> None:
        short = replace(manifest, files={}, cuts=(), tensors={}, ledger=(), rng=(), callbacks={}, quarantine=())
        self._facts[manifest.step] = short

    def _name(self, step: int, file: str) -> str:
        return f"{self._folder.checkpoint(step).relative_to(self._folder.root)}/{file}"

    def _tensor_name(self, step: int, file: str, sha256: str) -> str:
        return self._name(step, with_hash(file, sha256))

    def _place(self, step: int) -> str:
        return f"{self.url}/{self._name(step, MANIFEST)}".rpartition("/")[0]

    def stored_at(self, step: int) -> float:
        """Return the time of the last write to a stored checkpoint, in Unix seconds as the store counts; 0 if a listing
        does not show it."""
        return max((one.modified for one in self._listed().get(step, ())), default=0.0)

    def manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest of a stored checkpoint. Raises CheckpointError if it is damaged, or would take more
        memory than its checkpoint permits."""
        return parse_manifest(self._place(step), self._manifest_text(step))

    def _manifest_text(self, step: int) -> bytes:
        """Return the manifest of a stored checkpoint as it is. Raises CheckpointError if it would take more memory than
        the sizes in the listing permit; of one that is longer than the listing says, no more is read."""
        if step not in self._bytes:
            self._listed()
        size = self._bytes.get(step, 0)
        try:
            text = read_object(self.store, self._name(step, MANIFEST), most_text(size))
        except ObjectTooLarge:
            problem = f"manifest.json has more than {most_text(size):,} bytes, and all files have {size:,}"
            raise damaged(self._place(step), problem, "E-CKPT-MANIFEST") from None
        if problem := manifest_problem(text, size):
            del text  # the error may live long, and has this frame
            raise damaged(self._place(step), problem, "E-CKPT-MANIFEST")
        return text

    def _ledger_name(self, segment: LedgerSegment) -> str:
        return f"{self._folder.ledger.name}/{with_hash(segment.file, segment.sha256)}"

    def _has_manifest(self, step: int) -> bool:
        """Return whether the store has the manifest of `step`, which a listing that is late may lack."""
        return self._is_there(self._name(step, MANIFEST))

    def _is_there(self, name: str) -> bool:
        """Return whether the store has the object `name`, of which no more than a chunk is read."""
        try:
            next(iter(self.store.stream(name)), None)
        except NotStored:
            return False
        return True

    def _doubt(self, step: int) -> Doubt | None:
        """Return the doubt about the weights of a stored checkpoint; None if its manifest is damaged."""
        try:
            return doubt_about(self._facts_of(step), measures_beside(self._folder.checkpoints))
        except CheckpointError:
            return None
