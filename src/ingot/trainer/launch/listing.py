"""The checkpoints of a run on both tiers, its disk and its store, as one list: `ingot ckpt ls`.

Only manifests, listings, file sizes and the event log are read. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, IngotError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, KINDS, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint import pins
from ingot.trainer.checkpoint.absent import AbsentFiles, absent_files
from ingot.trainer.checkpoint.fence import TOO_LATE
from ingot.trainer.checkpoint.folders import no_checkpoint
from ingot.trainer.checkpoint.health import CheckpointHealth, guard_of, health_of, position_of
from ingot.trainer.checkpoint.manifest import MANIFEST, ListedCheckpoint, list_checkpoints
from ingot.trainer.checkpoint.resumable import judged_checkpoints
from ingot.trainer.checkpoint.stored import StoredCheckpoint
from ingot.trainer.launch.both_tiers import list_store, resume_step
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
    absent: which of its tensor files are not on this machine, and where they should be; "" if all are here, as they are
    without `checkpoint.disks`. lost: how many of these this machine wrote itself.
    """

    bytes: int
    verified_at: float | None
    verified_by: str
    late: bool = False
    damage: str = ""
    absent: str = ""
    lost: int = 0


@dataclass(frozen=True, kw_only=True)
class ListedSave:
    """A checkpoint, or a save of the weights alone, on the tiers that have it; a tier that lacks it is None.

    tokens, layout: None if no manifest can be read. layout: the degrees of the mesh, by axis. doubt: why the weights
    are in doubt. health: of the weights, by what was trained after them; None for weights alone, and without a
    manifest. resumes_here: the next start of the run continues from this checkpoint.
    """

    step: int
    kind: SaveKind
    tokens: int | None
    layout: dict[str, int] | None
    pinned: bool
    doubt: str
    health: CheckpointHealth | None
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
        """0, or 21 if a save is damaged or late on one of the tiers, or files that this machine wrote are not there. An
        upload that has not ended is no damage."""
        copies = [copy for save in self.saves for copy in (save.disk, save.store) if copy]
        damaged = any(copy.damage not in ("", NOT_ENDED) or copy.lost for copy in copies)
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
    local: dict[SaveKind, list[ListedCheckpoint]] = {
        FULL: judged_checkpoints(folder),
        WEIGHTS: list_checkpoints(folder.weights.checkpoints),
    }
    store = list_store(folder, local)
    if not any(local.values()) and not any(store.saves.values()):
        raise store.problem or _nothing_listed(path, store.url)
    absent = absent_files(folder, local[FULL])
    pinned = pins.pinned_steps(folder) | store.pinned
    times = _verified_times(folder)
    resumes = resume_step(local[FULL], store, [step for step, files in absent.items() if files.lost])
    guard, position = guard_of(folder), position_of(folder)
    saves = []
    for kind in KINDS:
        disk, there = {one.step: one for one in local[kind]}, {one.step: one for one in store.saves[kind]}
        marked, here, missing = (pinned, resumes, absent) if kind == FULL else (set(), None, {})
        saves += [
            _save(
                kind,
                disk.get(step),
                there.get(step),
                times,
                lambda one: health_of(one.manifest, one.doubt, position, guard) if one.manifest else None,
                absent=missing.get(step),
                pinned=step in marked,
                resumes=step == here,
            )
            for step in disk.keys() | there.keys()
        ]
    saves.sort(key=lambda save: (save.step, save.kind))
    return Listing(saves=tuple(saves), store=store.url, store_problem=store.problem)


def _nothing_listed(path: Path, store: str) -> IngotError:
    error = nothing_found(path)
    if not store or error.code == "E-CKPT-VANISHED":
        return error
    error = no_checkpoint(path)
    error.found = f"neither {path} nor its store {store} has a checkpoint"
    error.fix += "; or correct checkpoint.remote.url, if the run has saved checkpoints to another place"
    error.facts["store"] = store
    return error


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


def _save(
    kind: SaveKind,
    disk: ListedCheckpoint | None,
    store: StoredCheckpoint | None,
    times: _Times,
    health: Callable[[ListedCheckpoint | StoredCheckpoint], CheckpointHealth | None],
    *,
    absent: AbsentFiles | None,
    pinned: bool,
    resumes: bool,
) -> ListedSave:
    tiers = sorted((one for one in (disk, store) if one), key=lambda one: one.manifest is None)
    manifest = tiers[0].manifest  # of the first tier that has one
    step = tiers[0].step
    return ListedSave(
        step=step,
        kind=kind,
        tokens=manifest.tokens if manifest else None,
        layout=dict(manifest.layout) if manifest else None,
        pinned=pinned,
        doubt=tiers[0].doubt.reason,
        health=health(tiers[0]) if kind == FULL else None,
        resumes_here=resumes,
        disk=_on_disk(disk, times.get(("disk", kind, step)), absent) if disk else None,
        store=_in_store(store, times.get(("store", kind, step))) if store else None,
    )


def _on_disk(listed: ListedCheckpoint, logged: float | None, absent: AbsentFiles | None) -> TierCopy:
    manifest = listed.path / MANIFEST
    written = manifest.stat().st_mtime if manifest.exists() else None
    return TierCopy(
        bytes=listed.bytes,
        verified_at=written if logged is None else logged,
        verified_by="events" if logged is not None else "manifest" if written is not None else "",
        late=listed.damage == TOO_LATE,
        damage=listed.damage,
        absent=absent.text if absent else "",
        lost=len(absent.lost) if absent else 0,
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
