"""`ingot train` as a function: find the run, check everything, then keep it running until it ends."""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.config import to_toml
from ingot.errors import EXIT_OK, EXIT_PREEMPTED, CheckpointError, ConfigError, ConfirmationNeeded, UsageError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.theory.layout import resolve_parallel
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.retention import remove_leftovers
from ingot.trainer.launch.continuity import record_accepted, require_same_experiment
from ingot.trainer.launch.job import training_job
from ingot.trainer.launch.preflight import preflight
from ingot.trainer.launch.supervise import Outcome, newest_step, resume_step, supervise
from ingot.trainer.resilience.lock import RunLock


def train(
    run_file: Path,
    out: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    accept: Collection[str] = (),
    fresh: bool = False,
    archive: bool = False,
    until_step: int | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Start the run of `run_file` in folder `out`, or continue what is there: the same call does both.

    run_file: a run file, or the folder of a run. out: default `runs/NAME` beside the run file. overrides: "a.b=c".
    accept: changed settings that may apply to the running experiment. fresh: start at step 0; what is there is moved
    aside if `archive`, else it is refused. until_step: save and stop there, as if asked to.
    quiet: the ranks print nothing. say: gets what happens, a line at a time.

    Returns how it ended (see Outcome). Raises any IngotError; KeyboardInterrupt after a second Ctrl-C.
    """
    if archive and not fresh:
        raise UsageError("--archive without --fresh", rule="a run that continues is not moved", fix="add --fresh")
    path, config = read_run(run_file, overrides)
    _check_until_step(until_step, config)
    folder = find_folder(run_file, path, out, config)
    config = _with_paths_from(config, path.parent, folder.root)
    with RunLock(folder.lock):
        plan = path.parent / folder.plan.name
        if fresh:
            moved = _move_aside(folder, archive)
            plan = moved / folder.plan.name if moved and path.parent == folder.root else plan
        remove_leftovers(folder)
        tokens = preflight(folder, config, say)
        changes = require_same_experiment(folder, config, tokens.fingerprint(), accept)
        step = newest_step(folder)
        if step >= config.train.steps and any(read_events(folder.events, events.FINISHED)):
            say(f"{folder.root} is finished: step {step} of {config.train.steps}")
            if changes or (folder.config.exists() and load_run(folder.config) != config):
                say("its settings stay as they were; to train on with others, raise train.steps or take another --out")
            return Outcome(exit_code=EXIT_OK, step=step, saved_step=step, restarts=0, seconds=0.0, run=folder.root)
        if past := _past_step(folder, config, until_step):
            say(f"{folder.root} is already past it: step {past} is saved, --until-step {until_step} starts nothing")
            return Outcome(
                exit_code=EXIT_PREEMPTED, step=past, saved_step=past, restarts=0, seconds=0.0, run=folder.root
            )
        record_accepted(folder, config, tokens.fingerprint(), changes)
        _keep_run_file(folder, config)
        # A plan is of the run file as it stands: what --set makes of it takes other time and memory.
        changed = any(override.startswith(("model.", "train.", "parallel")) for override in overrides)
        if plan.exists() and not changed and plan.resolve() != folder.plan.resolve():
            shutil.copyfile(plan, folder.plan)
        say(_opening(folder, config, resume_step(folder)))
        job = training_job(folder, config, until_step=until_step, quiet=quiet)
        return supervise(folder, job, max_restarts=config.launch.max_restarts, say=say, show_output=not quiet)


def _check_until_step(until_step: int | None, config: RunConfig) -> None:
    if until_step is not None and not 1 <= until_step <= config.train.steps:
        raise UsageError(
            f"--until-step {until_step}",
            rule=f"a run stops at one of its steps: 1 to {config.train.steps} (train.steps)",
            fix="name one of them, or leave it out to train to the end",
        )


def _past_step(folder: RunFolder, config: RunConfig, until_step: int | None) -> int:
    """The step that is saved, verified and not before `until_step`; 0 if there is still something to do."""
    if until_step is None or until_step == config.train.steps:
        return 0  # to the end: after the last step comes the evaluation
    step = resume_step(folder)
    if step < until_step:
        return 0
    try:
        verify_checkpoint(folder.checkpoint(step))
    except CheckpointError:
        return 0  # the ranks will refuse it, and train on from an older one
    return step


def read_run(run_file: Path, overrides: Sequence[str] = ()) -> tuple[Path, RunConfig]:
    """The run file that `run_file` (itself, or the folder of a run) means, and what is in it."""
    path = run_file / "run.toml" if run_file.is_dir() else run_file
    if not path.exists() and run_file.is_dir():
        raise UsageError(f"{run_file} has no run.toml", rule="ingot train takes a run file or the folder of a run")
    return path, load_run(path, overrides)


def find_folder(run_file: Path, path: Path, out: Path | None, config: RunConfig) -> RunFolder:
    """Where the run lives: `out`, or the folder that was given, or `runs/NAME` beside the run file."""
    if out is not None:
        return RunFolder(out)
    if run_file.is_dir() or RunFolder(path.parent).events.exists():
        return RunFolder(path.parent)
    if not re.fullmatch(r"[\w][\w.-]*", config.name):
        raise ConfigError(
            f"{path}: name = {config.name!r} cannot name a folder",
            rule="letters, digits, '_', '-' and '.'",
            fix="change name, or say where the run shall live: --out DIR",
        )
    return RunFolder(path.parent / "runs" / config.name)


def _with_paths_from(config: RunConfig, base: Path, root: Path) -> RunConfig:
    """Relative paths start at the run file; the run's own copy of it lies elsewhere. Absolute ones stay."""

    def moved(value: str) -> str:
        if not value or Path(value).is_absolute():
            return value
        return os.path.relpath((base / value).resolve(), root.resolve())

    data = config.data
    data = replace(data, tokens=moved(data.tokens), heldout=moved(data.heldout), tokenizer=moved(data.tokenizer))
    parallel = replace(config.parallel, offload_folder=moved(config.parallel.offload_folder))
    return replace(config, init=moved(config.init), data=data, parallel=parallel)


def _keep_run_file(folder: RunFolder, config: RunConfig) -> None:
    if not folder.config.exists() or load_run(folder.config) != config:
        write_atomic(folder.config, to_toml(config))


def _move_aside(folder: RunFolder, archive: bool) -> Path | None:
    """Empty the run folder, but for its lock. Returns where the old run is now, None if there was none."""
    old = [p for p in folder.root.iterdir() if p != folder.lock]
    if not any(p in (folder.events, folder.checkpoints) for p in old):
        return None
    if not archive:
        raise ConfirmationNeeded(
            f"--fresh: there is a run in {folder.root}, at step {newest_step(folder)}",
            rule="a run is never overwritten",
            fix="add --archive to move it aside, or train into another folder (--out DIR)",
        )
    target = folder.root.with_name(f"{folder.root.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    target.mkdir()
    for path in old:
        path.rename(target / path.name)
    return target


def _opening(folder: RunFolder, config: RunConfig, step: int) -> str:
    what = f"continue  after step {step} of {config.train.steps}" if step else f"start     {config.train.steps} steps"
    return (
        f"run       {folder.root} (process {os.getpid()})\n"
        f"{what} · seed {config.seed} · config {config.training_sha256()[:8]} · {_ranks(resolve_parallel(config))}"
    )


def _ranks(parallel: Parallel) -> str:
    """ "ranks 8: dp_shard 2 x cp 2 (ring) x tp 2, ep 2"; data-parallel ranks alone are only counted.

    parallel: resolved.
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    form = {"cp": f" ({parallel.context_form})"}
    divided = [f"{axis} {degree}{form.get(axis, '')}" for axis, degree in degrees.items() if degree > 1]
    count = f"ranks {parallel.world_size}"
    experts = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    if not experts and divided in ([], [f"dp_shard {parallel.dp_shard}"]):
        return count
    return f"{count}: {' x '.join(divided)}{experts}"
