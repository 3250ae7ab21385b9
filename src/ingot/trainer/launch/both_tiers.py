"""The store of a run beside its disk, for commands that look at checkpoints: the listing of the store, the step from
which the next start continues, and the sound copy of a save that is damaged on the disk. No torch.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.schema.checkpoint import FULL, KINDS, WEIGHTS, CheckpointManifest, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, list_checkpoints
from ingot.trainer.checkpoint.meter import Meter
from ingot.trainer.checkpoint.remote import RemoteTier, open_tier
from ingot.trainer.checkpoint.resumable import first_usable
from ingot.trainer.checkpoint.rules import FOLDER
from ingot.trainer.checkpoint.stored import StoredCheckpoint, StoredCheckpoints


@dataclass(frozen=True, kw_only=True)
class StoreListing:
    """The saves of a run in its store, by kind, oldest first. url: "" if the run has no store. problem: why the store
    was not listed. pinned: the steps whose pin is in the store."""

    url: str = ""
    problem: IngotError | None = None
    saves: Mapping[SaveKind, list[StoredCheckpoint]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    pinned: frozenset[int] = frozenset()

    def sound_steps(self, kind: SaveKind) -> list[int]:
        """Return the steps of the saves that can be fetched, as far as manifests and the listing show."""
        return [one.step for one in self.saves[kind] if one.whole and not one.damage and not one.late]


def list_store(folder: RunFolder, local: Mapping[SaveKind, Collection[ListedCheckpoint]]) -> StoreListing:
    """List the store of the run `folder`. No error of the store is raised: it is the listing's `problem`.

    local: the saves on the disk; the manifests of sound ones are not read again in the store.
    """
    url = ""
    try:
        tier = open_tier(folder, recorded_run(folder.config).checkpoint) if folder.config.is_file() else None
        if tier is None:
            return StoreListing()
        url, alone = tier.url, StoredCheckpoints(folder.weights, tier.store)
        saves: dict[SaveKind, list[StoredCheckpoint]] = {
            FULL: tier.stored(_sound(local[FULL])),
            WEIGHTS: alone.stored(_sound(local[WEIGHTS])),
        }
        return StoreListing(url=url, saves=saves, pinned=frozenset(tier.pins.pinned()))
    except IngotError as error:
        return StoreListing(url=url, problem=error)


def read_store(
    folder: RunFolder, listing: StoreListing, wanted: Mapping[SaveKind, Collection[int]] | None, meter: Meter
) -> StoreListing:
    """Read every byte of the saves in `listing` that have no damage so far. Returns these, with the damage found.

    wanted: the steps of the saves to read, by kind; None: all. meter: counts the bytes. Raises ConfigError if the
    run has no store, and the errors of the store.
    """
    if listing.problem:
        raise listing.problem
    chosen: dict[SaveKind, list[StoredCheckpoint]] = {
        kind: [one for one in saves if one.whole and not one.late and (wanted is None or one.step in wanted[kind])]
        for kind, saves in listing.saves.items()
    }
    meter.begin("reading the store", sum(one.bytes for saves in chosen.values() for one in saves))
    found: dict[SaveKind, list[StoredCheckpoint]] = {}
    for kind, saves in chosen.items():
        tier = open_tier(folder.of(kind), recorded_run(folder.config).checkpoint, meter=meter)
        if tier is None:
            raise no_store(folder)
        found[kind] = [one if one.damage else _read(tier, one) for one in saves]
    return replace(listing, saves=found)


def _read(tier: RemoteTier, stored: StoredCheckpoint) -> StoredCheckpoint:
    damaged = tier.damaged_objects(stored.step)
    if not damaged:
        return stored
    others = f", and so do {len(damaged) - 1} more files" if len(damaged) > 1 else ""
    return replace(stored, damage=f"{damaged[0]} differs from what was saved{others}")


def _sound(listed: Iterable[ListedCheckpoint]) -> dict[int, CheckpointManifest]:
    return {one.step: one.manifest for one in listed if one.manifest and not one.damage}


def no_store(folder: RunFolder) -> ConfigError:
    """Return the error of a command on the store of a run that has none."""
    return ConfigError(
        "E-TIER-NONE",
        f"{folder.config} names no store",
        rule="checkpoints go to the store of checkpoint.remote.url",
        fix=f"continue the run with one: ingot train {folder.root} --set checkpoint.remote.url=s3://bucket/prefix",
        run=str(folder.root),
    )


def resume_step(local: Iterable[ListedCheckpoint], store: StoreListing, lost: Collection[int]) -> int:
    """Return the step from which the next start continues: over both tiers the newest, those in doubt last. 0: none.

    local: the checkpoints on the disk. lost: the steps of those that lack files.
    """
    first = first_usable(one for one in local if one.step not in lost)
    found = [(first.doubt.grade, -first.step)] if first else []
    sound = store.sound_steps(FULL)
    found += [(one.doubt.grade, -one.step) for one in store.saves[FULL] if one.step in sound]
    return -min(found, default=(0, 0))[1]


def copy_command(store: StoreListing, run: Path, step: int, kind: SaveKind) -> str:
    """Return the sentence that names the copy of a save in the store and fetches it; "" if the store has none."""
    if step not in store.sound_steps(kind):
        return ""
    weights = " --weights" if kind == WEIGHTS else ""
    return f"the store has step {step}: ingot ckpt fetch {run} --step {step}{weights}"


def name_copy(error: IngotError) -> None:
    """Add to the fix of an error about a save on the disk the copy of it in the store of its run, or the newest one.

    Nothing is added if the run has no store, the store does not answer, or it has no sound copy.
    """
    named = error.facts.get("path") or error.facts.get("folder") or error.facts.get("run")
    if not isinstance(error, CheckpointError) or not isinstance(named, str) or error.code == "E-CKPT-NONE-USABLE":
        return  # a start has looked into the store before it found that none is usable
    path = Path(named).absolute()
    run = next((one for one in (path, path.parent, path.parent.parent) if (one / "run.toml").is_file()), None)
    if run is None:
        return
    folder = RunFolder(run)
    kind = WEIGHTS if WEIGHTS in (path.name, path.parent.name) else FULL
    store = list_store(folder, {one: list_checkpoints(folder.of(one).checkpoints) for one in KINDS})
    steps = store.sound_steps(kind)
    step = int(path.name.removeprefix("step-")) if FOLDER.fullmatch(path.name) else max(steps, default=0)
    if command := copy_command(store, run, step, kind):
        error.fix = f"{command}; or {error.fix}" if error.fix else command
        error.facts |= {"stored_step": step, "store": store.url}
