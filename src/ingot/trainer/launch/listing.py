"""The checkpoints of a run on both tiers, its disk and its store, as one list: `ingot ckpt ls`.

Only manifests, listings, file sizes and the event log are read. No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, KINDS, WEIGHTS, CheckpointManifest, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint import pins
from ingot.trainer.checkpoint.fence import TOO_LATE
from ingot.trainer.checkpoint.manifest import MANIFEST, ListedCheckpoint, list_checkpoints
from ingot.trainer.checkpoint.remote import open_tier
from ingot.trainer.checkpoint.resumable import first_usable, judged_checkpoints
from ingot.trainer.checkpoint.stored import StoredCheckpoint, StoredCheckpoints
from ingot.trainer.launch.inspect import nothing_found

NOT_ENDED = "its upload has not ended"
_VERIFIED = {events.CHECKPOINT: FULL, events.CHECKPOINT_FETCHED: FULL, events.WEIGHTS_SAVED: WEIGHTS}


@dataclass(frozen=True, kw_only=True)
class TierCopy:
    """A checkpoint on one tier.

    verified_at: Unix seconds of the comparison of its bytes with what was saved; None for an upload that has not ended.
    verified_by: the record of that: "events", the event that the run logs after a save was read back, a fetch or an
    upload was compared; without one "manifest", the time of the manifest, which is written after the same comparison.
    late: an attempt published it after another one had begun (checkpoint/fence.py). damage: why it cannot be used.
    """

    bytes: int
    verified_at: float | None
    verified_by: str
    late: bool = False
    damage: str = ""


@dataclass(frozen=True, kw_only=True)
class ListedSave:
    """A checkpoint, or a save of the weights alone, on the tiers that have it; a tier that lacks it is None.

    tokens, layout: None if no manifest can be read. layout: the degrees of the mesh, by axis. suspect: why the weights
    are suspect. resumes_here: the next start of the run continues from this checkpoint.
    """

    step: int
    kind: SaveKind
    tokens: int | None
    layout: dict[str, int] | None
    pinned: bool
    suspect: str
    resumes_here: bool
    disk: TierCopy | None
    store: TierCopy | None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The saves of a run, newest last. store: the address of its store, "" if it has none. store_problem: the error of
    a store that does not answer, of which nothing is listed then."""

    saves: tuple[ListedSave, ...]
    store: str
    store_problem: IngotError | None

    @property
    def exit_code(self) -> int:
        """0, or 21 if a save is damaged or late on one of the tiers. An upload that has not ended is no damage."""
        copies = [copy for save in self.saves for copy in (save.disk, save.store) if copy]
        damaged = any(copy.damage not in ("", NOT_ENDED) for copy in copies)
        return CheckpointError.exit_code if damaged else EXIT_OK

    def as_dict(self) -> dict:
        store: dict = {"url": self.store}
        if problem := self.store_problem:
            store |= {"error": problem.code, "found": problem.found}
        return {
            "checkpoints": [asdict(save) for save in self.saves],
            "store": store if self.store or problem else None,
            "exit_code": self.exit_code,
        }


def list_run(path: Path) -> Listing:
    """List the saves of the run folder `path`. A store that does not answer leaves those of the disk.

    Raises UsageError if `path` is not the folder of a run, CheckpointError if neither tier has a checkpoint.
    """
    folder = RunFolder(path)
    listed, weights = judged_checkpoints(folder), list_checkpoints(folder.weights.checkpoints)
    pinned, url, problem = pins.pinned_steps(folder), "", None
    stored: dict[SaveKind, list[StoredCheckpoint]] = {FULL: [], WEIGHTS: []}
    try:
        tier = open_tier(folder, recorded_run(folder.config).checkpoint) if folder.config.is_file() else None
        if tier:
            url = tier.url
            pinned |= tier.pins.pinned()
            alone = StoredCheckpoints(folder.weights, tier.store)
            stored = {FULL: tier.stored(_sound(listed)), WEIGHTS: alone.stored(_sound(weights))}
    except IngotError as error:
        problem = error
    if not listed and not weights and not any(stored.values()):
        raise problem or nothing_found(path)
    times = _verified_times(folder)
    resumes = _resume_step(listed, stored[FULL])
    saves = []
    for kind in KINDS:
        local = listed if kind == FULL else weights
        disk, there = {one.step: one for one in local}, {one.step: one for one in stored[kind]}
        marked, here = (pinned, resumes) if kind == FULL else (set(), None)
        saves += [
            _save(step, kind, disk.get(step), there.get(step), times, pinned=step in marked, resumes=step == here)
            for step in disk.keys() | there.keys()
        ]
    saves.sort(key=lambda save: (save.step, save.kind))
    return Listing(saves=tuple(saves), store=url, store_problem=problem)


def _sound(listed: list[ListedCheckpoint]) -> dict[int, CheckpointManifest]:
    return {one.step: one.manifest for one in listed if one.manifest and not one.damage}


_Times = Mapping[tuple[str, SaveKind, int], float]  # ("disk" or "store", kind, step) -> Unix seconds


def _verified_times(folder: RunFolder) -> _Times:
    times = {}
    for event in read_events(folder.events, *_VERIFIED, events.CHECKPOINT_STORED):
        step, time = event.get("step"), event.get("time")
        if event["kind"] == events.CHECKPOINT_STORED and event.get("bytes") == 0:
            continue  # it was there, and an earlier attempt verified it
        if isinstance(step, int) and isinstance(time, int | float):
            kind = event.get("what", _VERIFIED.get(event["kind"], FULL))
            times["disk" if event["kind"] in _VERIFIED else "store", kind, step] = float(time)
    return times


def _resume_step(listed: list[ListedCheckpoint], stored: list[StoredCheckpoint]) -> int:
    """Return the step from which the next start continues: over both tiers the newest, suspect ones last. 0: none."""
    first = first_usable(listed)
    found = [(bool(first.suspect), -first.step)] if first else []
    found += [(bool(_suspect(s.manifest)), -s.step) for s in stored if s.whole and not s.damage and not s.late]
    return -min(found, default=(False, 0))[1]


def _save(
    step: int,
    kind: SaveKind,
    disk: ListedCheckpoint | None,
    store: StoredCheckpoint | None,
    times: _Times,
    *,
    pinned: bool,
    resumes: bool,
) -> ListedSave:
    manifests = [one.manifest for one in (disk, store) if one and one.manifest]
    manifest = manifests[0] if manifests else None
    return ListedSave(
        step=step,
        kind=kind,
        tokens=manifest.tokens if manifest else None,
        layout=dict(manifest.layout) if manifest else None,
        pinned=pinned,
        suspect=disk.suspect if disk else _suspect(manifest),
        resumes_here=resumes,
        disk=_on_disk(disk, times.get(("disk", kind, step))) if disk else None,
        store=_in_store(store, times.get(("store", kind, step))) if store else None,
    )


def _suspect(manifest: CheckpointManifest | None) -> str:
    return ListedCheckpoint(Path(), 0, manifest, "").suspect


def _on_disk(listed: ListedCheckpoint, logged: float | None) -> TierCopy:
    manifest = listed.path / MANIFEST
    written = manifest.stat().st_mtime if manifest.exists() else None
    return TierCopy(
        bytes=listed.bytes,
        verified_at=written if logged is None else logged,
        verified_by="events" if logged is not None else "manifest" if written is not None else "",
        late=listed.damage == TOO_LATE,
        damage=listed.damage,
    )


def _in_store(stored: StoredCheckpoint, logged: float | None) -> TierCopy:
    if not stored.whole:
        return TierCopy(bytes=stored.bytes, verified_at=None, verified_by="", damage=NOT_ENDED)
    return TierCopy(
        bytes=stored.bytes,
        verified_at=stored.stored_at if logged is None else logged,
        verified_by="manifest" if logged is None else "events",
        late=stored.late,
        damage=TOO_LATE if stored.late else stored.damage,
    )
