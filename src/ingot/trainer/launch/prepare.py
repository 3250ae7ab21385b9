"""The way from the arguments of `ingot train` to a run folder in which ranks can start: find the run, check everything,
record what the user accepted. No torch."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.config import to_dict, to_toml
from ingot.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError, ConfirmationNeeded, ResourceError, UsageError
from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.changes import SettingChange
from ingot.schema.checkpoint import CheckpointManifest
from ingot.schema.launch import Launch
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import FOLDER_NAME_RULE, RunFolder, is_folder_name
from ingot.storage import write_atomic
from ingot.theory.layout import resolve_parallel
from ingot.theory.rules import load_run, recorded_run
from ingot.toml import toml_value
from ingot.trainer.checkpoint.folders import remove_leftovers
from ingot.trainer.checkpoint.manifest import candidate_folders, newest_step
from ingot.trainer.checkpoint.remote import RemoteTier, open_tier
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.checkpoint.tiers import fetch_newest, require_empty
from ingot.trainer.checkpoint.vanished import require_checkpoints, saved_steps
from ingot.trainer.given import NOTHING_GIVEN, GivenCallbacks
from ingot.trainer.launch.checks import (
    check_until_step,
    drop_measures_of_another_rate,
    is_sound,
    past_step,
    preflight,
    record_accepted,
    require_same_experiment,
    require_same_in_store,
    require_settings,
    run_in_store,
    warn_of_past,
)
from ingot.trainer.launch.outcome import JobResult
from ingot.trainer.lease import RunLease
from ingot.trainer.mesh.start import rank_threads
from ingot.units import counted


class RunRequest:
    """A request to start a run or to continue it. The arguments are those of `train`.

    folder: the run folder. config: the settings with which ranks train, with the callbacks that are given. written: the
    settings that the folder's run.toml gets. Raises UsageError or ConfigError; nothing is written.
    """

    def __init__(
        self,
        run_file: Path,
        out: Path | None = None,
        *,
        overrides: Sequence[str] = (),
        accept: Collection[str] = (),
        fresh: bool = False,
        archive: bool = False,
        until_step: int | None = None,
        given: GivenCallbacks = NOTHING_GIVEN,
    ):
        if archive and not fresh:
            raise UsageError(
                "E-ARCHIVE-ALONE",
                "--archive is given without --fresh",
                rule="an existing run is moved aside only if a new one starts",
                fix="add --fresh, or remove --archive",
            )
        self.path, config = read_run(run_file, overrides)
        if fresh and config.launch.nodes > 1:
            raise UsageError(
                "E-FRESH-NODES",
                f"--fresh is given for a run on {config.launch.nodes} nodes",
                rule="every node gets the same command, and the one that comes late would move the new run aside",
                fix="train into another folder (--out DIR), or move the old one yourself",
                nodes=config.launch.nodes,
            )
        check_until_step(until_step, config)
        require_settings(accept)
        rank_threads(config.parallel.world_size)  # raises ConfigError for an OMP_NUM_THREADS that is not a number
        self.folder = find_folder(run_file, self.path, out, config)
        self.written = with_paths_from(config, self.path.parent, self.folder.root)
        self.config = given.added_to(self.written)
        self.overrides, self.accept, self.fresh, self.archive = overrides, accept, fresh, archive
        self.until_step = until_step

    def prepare(self, lease: RunLease, say: Callable[[str], None]) -> JobResult | None:
        """Check that ranks can start, take the lease, and write the run file and accepted changes. Returns the run's
        end if no step is left to train. The caller holds the run's lock.
        """
        folder, config, plan = self.folder, self.config, self.path.parent / self.folder.plan.name
        tier = open_tier(folder, config.checkpoint)
        lease.wait(say)
        if self.fresh:
            require_empty(folder, tier)
            moved = _move_aside(folder, self.archive)
            if moved:
                say(f"archived  the old run is now in {moved}")
            plan = moved / folder.plan.name if moved and self.path.parent == folder.root else plan
        self._fetch(tier, lease, say)
        require_checkpoints(folder)  # before leftovers are removed: they may be all that is left
        remove_leftovers(folder)
        tokens = preflight(folder, self.written, say)
        changes = require_same_experiment(folder, config, tokens.fingerprint(), self.accept)
        for key in dict.fromkeys(self.accept):
            # With a --set of its own, the flag is as it was printed: it is not needed before the first checkpoint.
            if key not in [change.key for change in changes] and not self._sets(key):
                say(f"note: --accept-change {key} has no effect: there is no change to confirm")
        if ended := self._ended(changes, say):
            return ended
        lease.take()
        record_accepted(folder, config, tokens.fingerprint(), changes)
        _keep_run_file(folder, self.written)
        # The plan describes the run file without --set: a changed run needs different time and memory.
        changed = any(override.startswith(("model.", "train.", "parallel")) for override in self.overrides)
        if plan.exists() and not changed and plan.resolve() != folder.plan.resolve():
            shutil.copyfile(plan, folder.plan)
        if ended := self._ended_elsewhere(changes, say):
            return ended
        drop_measures_of_another_rate(folder, config.optim.lr, say)
        step = resume_step(folder)
        say(_opening(folder, config, step))
        for change in changes:
            say(f"changed   {change}   {change.kind}{'' if change.kind.is_free else ', accepted'}")
        warn_of_past(step, changes, say)
        if kept := self._kept_launch_settings():
            say(f"kept      {', '.join(kept)}   as in {folder.config}; change it with --set")
        return None

    def _sets(self, key: str) -> bool:
        """Return whether --set gives the setting `key`, or an entry of it."""
        given = [override.partition("=")[0].strip() for override in self.overrides]
        return any(one == key or one.startswith(f"{key}.") for one in given)

    def _kept_launch_settings(self) -> list[str]:
        """Return the settings of [launch] that the run has from its folder, without the defaults and those that this
        command sets. Another run file shows its own."""
        if self.path.resolve() != self.folder.config.resolve():
            return []
        default, given = to_dict(Launch()), {override.partition("=")[0].strip() for override in self.overrides}
        return [
            f"launch.{key} = {toml_value(value)}"
            for key, value in to_dict(self.written.launch).items()
            if value != default[key] and f"launch.{key}" not in given
        ]

    def _fetch(self, tier: RemoteTier | None, lease: RunLease, say: Callable[[str], None]) -> None:
        """Fetch a newer checkpoint from the store, unless it is of another run: then nothing comes into the folder."""
        folder, described = self.folder, ""

        def compare(stored: CheckpointManifest) -> None:
            nonlocal described
            assert tier is not None
            require_same_in_store(folder, tier, lease, stored, self.config, self.accept)
            described = run_in_store(tier, stored)

        is_new = not folder.events.exists()
        if fetch_newest(folder, tier, self._log, say, compare) and is_new:
            assert tier is not None
            say(f"store     the folder is new; continue after {described}, from {tier.url}")
            say("note      the store has no log and no metrics: those of earlier steps are not in this folder")

    def _ended_elsewhere(self, changes: Sequence[SettingChange], say: Callable[[str], None]) -> JobResult | None:
        """Return the run's end if its last checkpoint came from the store and ranks have nothing left to do, and write
        that down; otherwise None. A final evaluation may be left, because its result would be in the log that is lost.
        """
        folder, config, step = self.folder, self.config, resume_step(self.folder)
        kinds = (events.RANK_STARTED, events.RUN_STARTED, events.FINISHED)
        was_fetched = next(read_events(folder.events, events.CHECKPOINT_FETCHED), None) is not None
        if step < config.train.steps or not was_fetched or next(read_events(folder.events, *kinds), None) is not None:
            return None
        if config.data.heldout or config.evaluate.prompts or config.evaluate.background.tasks:
            return None
        if not all(change.kind.is_free for change in changes) or not is_sound(folder, step):
            return None
        self._log(events.FINISHED, step=step, tokens=step * config.tokens_per_step, seconds=0.0)
        say(
            f"{folder.root} is finished: step {step} of {config.train.steps} came from the store; nothing is left to do"
        )
        return JobResult(exit_code=EXIT_OK, step=step, saved_step=step, restarts=0, seconds=0.0, run=folder.root)

    def _log(self, kind: str, **facts) -> None:
        with EventLog(self.folder.events) as log:
            log.write(kind, **facts)

    def _ended(self, changes: Sequence[SettingChange], say: Callable[[str], None]) -> JobResult | None:
        """Return the run's end if it is finished, or past the step to stop after; otherwise None."""
        folder, steps = self.folder, self.config.train.steps
        step, code = resume_step(folder), EXIT_OK
        finished = step >= steps and _has_finished(folder)
        if finished and is_sound(folder, step):  # otherwise the ranks refuse it, and train its steps again
            say(f"{folder.root} is finished: step {step} of {steps}")
            if changes or (folder.config.exists() and recorded_run(folder.config) != self.written):
                say("its settings stay as they were; to train with new settings, raise train.steps or change --out")
        elif step := past_step(folder, self.config, self.until_step):
            code = EXIT_PREEMPTED
            where = "at" if step == self.until_step else "past"
            say(f"{folder.root} is already {where} step {self.until_step}: step {step} is saved, nothing is started")
        else:
            return None
        return JobResult(exit_code=code, step=step, saved_step=step, restarts=0, seconds=0.0, run=folder.root)


def _has_finished(folder: RunFolder) -> bool:
    """Return whether the newest attempt finished. An earlier one may have, before more steps or damaged ones were
    trained."""
    kinds = [event["kind"] for event in read_events(folder.events, events.RUN_STARTED, events.FINISHED)]
    return kinds[-1:] == [events.FINISHED]


def read_run(run_file: Path, overrides: Sequence[str] = ()) -> tuple[Path, RunConfig]:
    """Load the run file `run_file`, or the run file in the folder `run_file`. Returns its path and the config."""
    path = run_file / "run.toml" if run_file.is_dir() else run_file
    if not path.exists() and run_file.is_dir():
        raise UsageError(
            "E-RUN-NOT-FOUND",
            f"{run_file} has no run.toml",
            rule="ingot train takes a run file or the folder of a run",
            fix="name a run file; ingot init DIR makes a project with one",
            path=str(run_file),
        )
    return path, load_run(path, overrides)


def find_folder(run_file: Path, path: Path, out: Path | None, config: RunConfig) -> RunFolder:
    """Return the run folder: `out`, or the folder of `path` if that is a run folder, or `runs/NAME` next to `path`.

    run_file: the user's argument, a run file or a run folder. path: the run file. NAME is config.name.
    """
    if out is not None:
        return RunFolder(out)
    if run_file.is_dir() or RunFolder(path.parent).events.exists():
        return RunFolder(path.parent)
    if not is_folder_name(config.name):
        raise ConfigError(
            "E-RUN-NAME",
            f"{path}: name = {config.name!r} cannot be the name of a folder",
            rule=FOLDER_NAME_RULE,
            fix="change name, or choose the run folder with --out DIR",
            name=config.name,
        )
    return RunFolder(path.parent / "runs" / config.name)


def with_paths_from(config: RunConfig, base: Path, root: Path) -> RunConfig:
    """Return `config` with its relative paths changed from relative to `base` to relative to `root`."""

    def moved(value: str) -> str:
        if not value or Path(value).is_absolute():
            return value
        return os.path.relpath((base / value).resolve(), root.resolve())

    data = config.data
    data = replace(
        data,
        tokens=moved(data.tokens),
        heldout=moved(data.heldout),
        tokenizer=moved(data.tokenizer),
        quarantine=tuple(map(moved, data.quarantine)),
    )
    parallel = replace(config.parallel, offload_folder=moved(config.parallel.offload_folder))
    background = config.evaluate.background
    background = replace(background, task_folder=moved(background.task_folder))
    evaluate = replace(config.evaluate, background=background)
    own = config.plugins
    plugins = replace(own, folder=moved(own.folder)) if own.modules else own
    changed = {"data": data, "evaluate": evaluate, "parallel": parallel, "plugins": plugins}
    return replace(config, init=moved(config.init), **changed)


def _keep_run_file(folder: RunFolder, config: RunConfig) -> None:
    if not folder.config.exists() or recorded_run(folder.config) != config:
        write_atomic(folder.config, to_toml(config))


def _move_aside(folder: RunFolder, archive: bool) -> Path | None:
    """Move all of the run folder except its lock to a new folder. Returns that folder; None if there was no run.

    Raises ConfirmationNeeded unless `archive`, ResourceError if a part cannot be moved; nothing is then moved.
    """
    old = [p for p in folder.root.iterdir() if p != folder.lock]
    if not any(p in (folder.events, folder.checkpoints, folder.weights.checkpoints, folder.ledger) for p in old):
        return None
    if not archive:
        step = max(newest_step(folder.checkpoints), *saved_steps(folder).values(), 0)
        raise ConfirmationNeeded(
            "E-FRESH-EXISTS",
            f"--fresh is given, but there is a run in {folder.root}, with {counted(step, 'saved step')}",
            rule="a run is never overwritten",
            fix="add --archive to move it aside, or train into another folder (--out DIR)",
            run=str(folder.root),
            step=step,
        )
    stamp = f"{folder.root.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
    target = next(path for name in names if not (path := folder.root.with_name(name)).exists())
    target.mkdir()
    moved: list[Path] = []
    try:
        for path in old:
            path.rename(target / path.name)
            moved.append(path)
    except OSError as error:  # the checkpoints may be a mounted volume
        for path in moved:
            (target / path.name).rename(path)
        target.rmdir()
        raise ResourceError(
            "E-ARCHIVE-MOVE",
            f"{error.filename} cannot be moved to {target} ({error.strerror})",
            rule="--archive renames everything in the run folder except its lock; nothing was moved",
            fix="unmount a volume that is mounted there, or train into another folder (--out DIR)",
            path=str(error.filename),
            cause=error.strerror,
        ) from None
    return target


def _opening(folder: RunFolder, config: RunConfig, step: int) -> str:
    steps = config.train.steps
    if step:
        what = f"continue  after step {step} of {steps}"
    elif candidate_folders(folder.checkpoints):
        what = f"continue  of {steps} steps, if the ranks can use a checkpoint"
    else:
        what = f"start     {counted(steps, 'step')}"
    return (
        f"run       {folder.root} (process {os.getpid()})\n"
        f"{what} · seed {config.seed} · config {config.training_sha256()[:8]} · {_ranks(resolve_parallel(config))}"
    )


def _ranks(parallel: Parallel) -> str:
    """Return the layout, like "ranks 8: dp_shard 2 x cp 2 (ring) x tp 2, ep 2"; only "ranks 8" if purely data-parallel.

    parallel: the degrees, with every "auto" resolved.
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    form = {"cp": f" ({parallel.context_form})"}
    divided = [f"{axis} {degree}{form.get(axis, '')}" for axis, degree in degrees.items() if degree > 1]
    count = f"ranks {parallel.world_size}"
    experts = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    if not experts and divided in ([], [f"dp_shard {parallel.dp_shard}"]):
        return count
    return f"{count}: {' x '.join(divided)}{experts}"
