"""The checkpoints of a run in its store: list, upload and fetch them by command. No torch."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError, UsageError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, SaveKind
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.folders import no_checkpoint, remove_leftovers
from ingot.trainer.checkpoint.manifest import candidate_folders, is_finished, read_manifest, verify_here
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.places import disks_of, name_run, recorded_names, report_damage
from ingot.trainer.checkpoint.remote import RemoteTier, open_tier
from ingot.trainer.launch.both_tiers import no_store
from ingot.trainer.launch.checks import require_model_of_run
from ingot.trainer.lease import RunLease
from ingot.trainer.resilience.lock import RunLock


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A checkpoint, or weights alone, that was uploaded or fetched. bytes: moved; 0 if it was there."""

    step: int
    kind: SaveKind
    store: str
    bytes: int
    seconds: float

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def push_checkpoint(path: Path, step: int | None = None, meter: Meter = SILENT, kind: SaveKind = FULL) -> Moved:
    """Verify the local checkpoint of `step` (None: the newest), and upload it, or the files of it that are on this
    node. If the store has it, its bytes are compared, and damaged files are sent again. The run may be training.

    kind: WEIGHTS for a save of the weights alone. meter: counts the bytes. Raises UsageError, RunBusyError if another
    command uploads, ConfigError if the run has no store, CheckpointError if there is no such checkpoint or it is
    damaged, and the errors of the store.
    """
    folder, tier = _run(path, meter, kind)
    steps = [int(p.name.removeprefix("step-")) for p in candidate_folders(folder.checkpoints) if is_finished(p)]
    if not steps:
        raise no_checkpoint(path, kind)
    step = _chosen(step, steps, str(folder.checkpoints), _other_kind(folder, step))
    checkpoint = folder.checkpoint(step)
    meter.begin("verifying", sum(entry.bytes for entry in read_manifest(checkpoint).files.values()))
    verify_here(checkpoint, meter.add)
    began = time.perf_counter()
    with RunLock(folder.upload_lock):  # `ingot ckpt gc` takes an upload without a manifest for one that was killed
        sent = tier.push(step, compare=True)
    return Moved(step=step, kind=kind, bytes=sent, store=tier.url, seconds=time.perf_counter() - began)


def fetch_checkpoint(
    path: Path,
    step: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    meter: Meter = SILENT,
    kind: SaveKind = FULL,
) -> Moved:
    """Fetch the stored checkpoint of `step` (None: the newest) into the run folder, in place of a local one.

    kind: WEIGHTS for a save of the weights alone. say: called with the line that says why the command waits. meter:
    counts the bytes. If the command is interrupted, the local checkpoints are as before. Raises what `push_checkpoint`
    raises, ConfigError if the run file has another model than the stored save, and RunBusyError if the run is training,
    on this machine or another one.
    """
    folder, tier = _run(path, meter, kind)
    with held(folder, tier, say) as lease:
        steps = tier.steps()
        if not steps:
            raise CheckpointError(
                "E-CKPT-NONE",
                f"{tier.url} has no {'checkpoint' if kind == FULL else 'save of the weights alone'} yet",
                rule="a checkpoint is uploaded after it was saved",
                fix=f"train the run, or upload its newest checkpoint: ingot ckpt push {path}",
                run=str(path),
            )
        step, began = _chosen(step, steps, tier.url, _other_kind(folder, step)), time.perf_counter()
        require_model_of_run(folder, tier, tier.manifest(step), recorded_run(folder.config).settings())
        lease.take()
        received = tier.fetch(step)
        moved = Moved(step=step, kind=kind, bytes=received, store=tier.url, seconds=time.perf_counter() - began)
        with EventLog(folder.events) as log:
            about = {"what": kind, "store": tier.url, "bytes": received, "seconds": moved.seconds}
            log.write(events.CHECKPOINT_FETCHED, step=step, **about)
        remove_leftovers(folder)  # the copy that was replaced
        return moved


@contextlib.contextmanager
def held(folder: RunFolder, tier: RemoteTier | None, say: Callable[[str], None]) -> Iterator[RunLease]:
    """Hold the run within the context against launchers on this machine and on others: by its lock, and by its lease as
    soon as the caller takes it. Waits until the last holder of the lease is known to be gone. A damaged record of the
    run's names on disks is written again.

    say: called with the lines that say why. Raises RunBusyError if the run is training, and the errors of the store.
    """
    seconds = recorded_run(folder.config).launch.lease_seconds
    with RunLock(folder.lock), RunLease(folder, tier, seconds) as lease:
        lease.wait(say)
        if disks_of(folder.root) and recorded_names(folder.root)[1]:
            report_damage(folder, name_run(folder), say)
        yield lease


def open_run(path: Path, meter: Meter = SILENT, kind: SaveKind = FULL) -> tuple[RunFolder, RemoteTier | None]:
    """Return the run folder `path`, and its remote tier if it has one. Raises UsageError if it is not one.

    meter: counts the bytes that the tier moves. kind: of the saves that both name.
    """
    folder = RunFolder(path).of(kind)
    if not folder.config.is_file():
        raise UsageError(
            "E-RUN-NOT-FOUND",
            f"{path} has no run.toml",
            rule="the path is the folder of a run",
            fix="name the folder that ingot train wrote; on an empty disk, a folder with a copy of its run.toml",
            path=str(path),
        )
    return folder, open_tier(folder, recorded_run(folder.config).checkpoint, meter=meter)


def _run(path: Path, meter: Meter, kind: SaveKind) -> tuple[RunFolder, RemoteTier]:
    folder, tier = open_run(path, meter, kind)
    if tier is None:
        raise no_store(folder)
    return folder, tier


def _other_kind(folder: RunFolder, step: int | None) -> str:
    """Return the command line flag with which `step` is found on the disk; "" if there is no save of the other kind."""
    other = folder.of(FULL if folder.kind == WEIGHTS else WEIGHTS)
    if step is None or not is_finished(other.checkpoint(step)):
        return ""
    return "add --weights" if other.kind == WEIGHTS else "leave --weights out"


def _chosen(step: int | None, steps: list[int], place: str, other_kind: str) -> int:
    if step is None:
        return max(steps)
    if step not in steps:
        what = {"": "", "add --weights": ": it is a save of the weights alone"}.get(other_kind, ": it is a checkpoint")
        raise UsageError(
            "E-CKPT-STEP-UNKNOWN",
            f"{place} has no finished save of this kind of step {step}{what}",
            rule="a checkpoint, or with --weights a save of the weights alone, must exist to be moved",
            fix=f"{other_kind + ', or ' if other_kind else ''}name one of the steps "
            f"{', '.join(map(str, sorted(steps)))}",
            step=step,
            steps=sorted(steps),
        )
    return step
