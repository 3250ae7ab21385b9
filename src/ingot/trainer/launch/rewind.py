"""Go back to an older checkpoint of a run by command: newer ones are set aside, and the next start continues there.

No torch.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, CheckpointError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import KINDS, CheckpointManifest, SaveKind
from ingot.schema.guard_record import write_measures
from ingot.schema.run import setting_changes
from ingot.schema.run_folder import RunFolder
from ingot.storage import fsync_dir
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint import pins
from ingot.trainer.checkpoint.manifest import doubt_about, verify_here
from ingot.trainer.checkpoint.manifest import read_manifest as read_here
from ingot.trainer.checkpoint.meter import SILENT, Meter
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.launch.retain import finished_steps, unknown_step
from ingot.trainer.launch.stored import held, open_run


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """A run that went back by command. step: of the checkpoint from which it continues. set_aside: the steps of newer
    checkpoints, and weights: of newer saves of the weights alone, which are in `folder`; "" if there was none. changed:
    a sentence for each setting that differs from those of the checkpoint and needs confirmation."""

    step: int
    set_aside: tuple[int, ...]
    weights: tuple[int, ...]
    folder: str
    changed: tuple[str, ...]

    def as_dict(self) -> dict:
        return asdict(self) | {"exit_code": EXIT_OK}


def rewind_run(path: Path, step: int, say: Callable[[str], None] = lambda text: None, meter: Meter = SILENT) -> Rewound:
    """Let the next start of the run `path` continue from the checkpoint of `step`, of which every byte is compared.

    Newer checkpoints and weights go to a folder in RUN/set-aside, with the record of the guard: nothing is deleted. In
    the store they lose their manifests, so that no start fetches them; those that only the store has are fetched first.
    The guard forgets measures that it took after the checkpoint was saved.

    say: called with lines about what is done. Raises UsageError if neither tier has the checkpoint, RunBusyError if the
    run is training, CheckpointError if the checkpoint is damaged or was suspect when it was saved, and the errors of
    the store.
    """
    runs: dict[SaveKind, tuple[RunFolder, RemoteTier | None]] = {kind: open_run(path, meter, kind) for kind in KINDS}
    folder, tier = runs["full"]
    with held(folder, tier, say) as lease:
        stored = tier.steps() if tier else []
        if step not in (*finished_steps(folder), *stored):
            rule = "a run goes back to a checkpoint, on its disk or in its store"
            raise unknown_step(folder, step, stored, rule=rule, without="train until the first checkpoint")
        lease.take()
        for one in sorted({*stored} - {*finished_steps(folder)}):
            if one >= step and tier is not None:
                say(f"fetched   step {one}: only {tier.url} had it")
                tier.fetch(one)
        verify_here(folder.checkpoint(step), meter.add)
        manifest = read_here(folder.checkpoint(step))
        if doubt := doubt_about(manifest, ()).reason:
            raise _suspect(folder, step, doubt)
        aside = _new_folder(folder)
        moved: dict[SaveKind, tuple[int, ...]] = {}
        for kind, (saves, saves_tier) in runs.items():
            newer = tuple(one for one in finished_steps(saves) if one > step)
            _take_from_store(saves_tier, step)
            moved[kind] = tuple(sorted(newer))
            for one in newer:  # the newest first: a kill leaves a run that continues from the newest of the rest
                _set_aside(saves, one, aside)
        _forget_measures(folder, manifest, aside)
        where = str(aside.relative_to(folder.root)) if aside.exists() else ""
        with EventLog(folder.events) as log:
            log.write(
                events.REWOUND,
                step=step,
                set_aside=moved["full"],
                weights=moved["weights"],
                folder=where,
                reason="set aside by the user",
            )
    return Rewound(
        step=step,
        set_aside=moved["full"],
        weights=moved["weights"],
        folder=where,
        changed=_changed(folder, manifest),
    )


def _suspect(folder: RunFolder, step: int, reason: str) -> CheckpointError:
    return CheckpointError(
        "E-CKPT-REWIND-SUSPECT",
        f"the checkpoint of step {step} was in doubt when it was saved: {reason}",
        rule="a run does not continue from weights in doubt while it has others",
        fix=f"name an older step that ingot ckpt ls {folder.root} shows without the mark suspect",
        step=step,
        reason=reason,
    )


def _new_folder(folder: RunFolder) -> Path:
    """Return the name of a new folder in RUN/set-aside; nothing is written."""
    number = 1 + max((int(one.name) for one in folder.set_aside.glob("[0-9]*") if one.name.isdecimal()), default=0)
    return folder.set_aside / f"{number:04d}"


def _take_from_store(tier: RemoteTier | None, step: int) -> None:
    """Remove the manifests of the saves after `step` from the store, the newest first, so that they count no more."""
    if tier is None:
        return
    for one in tier.steps():
        if one > step:
            tier.retract(one)


def _set_aside(folder: RunFolder, step: int, aside: Path) -> None:
    source = folder.checkpoint(step)
    target = aside / folder.saves / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if folder.kind == "full":
        pins.unpin(folder, step)  # the mark would be that of another checkpoint, once the step is trained again
    source.rename(target)
    fsync_dir(target.parent)
    fsync_dir(source.parent)


def _forget_measures(folder: RunFolder, manifest: CheckpointManifest, aside: Path) -> None:
    """Let the record of the guard be that of the checkpoint: later measures would put it in doubt."""
    if not folder.guard.exists():
        return
    aside.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder.guard, aside / folder.guard.name)
    write_measures(folder.guard, manifest.guard.measures)


def _changed(folder: RunFolder, manifest: CheckpointManifest) -> tuple[str, ...]:
    changes = setting_changes(manifest.settings, recorded_run(folder.config).settings())
    return tuple(str(one) for one in changes if not one.kind.is_free)
