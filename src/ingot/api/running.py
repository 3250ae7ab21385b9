"""Training as functions: `ingot.train` starts a run or continues it, `ingot.resume` only continues one."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from ingot.api.fallbacks import keep_fallbacks
from ingot.errors import UsageError
from ingot.schema.run_folder import RunFolder
from ingot.trainer.given import Given, given_callbacks
from ingot.trainer.launch import train as launch
from ingot.trainer.launch.outcome import JobResult


def train(
    run_file: str | Path = "run.toml",
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    accept: Collection[str] = (),
    fresh: bool = False,
    archive: bool = False,
    until_step: int | None = None,
    callbacks: Iterable[Given] = (),
    quiet: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> JobResult:
    """Start the run of a run file, or continue it, and return when it has ended. The ranks are other processes, except
    that a run with one rank and with `callbacks` trains in this process.

    run_file: a run file, or the folder of a run. out: the run folder (default: runs/NAME next to the run file).
    overrides: changes like "train.steps=200". accept: the keys of settings whose change is confirmed for an existing
    run. fresh: start at step 0; with `archive` an existing run is moved aside, without it that is an error. until_step:
    save and stop after this step. callbacks: classes or instances of StepCallback (plugins/callback.py), and functions,
    which are called at log lines with the numbers of the steps. quiet: the ranks print nothing; False: they print
    progress to this process's output. say: called with each line about starts, restarts and the end; in a run in this
    process, with each line of progress.

    A class or instance is a part of the run: checkpoints record it under the name of its class, with its state, and to
    continue without it needs accept=["callbacks"], as for a table [callbacks.NAME]. A class is made with options None;
    an instance is used as it is, so give a new one to a new run. Functions are not a part of the run. With several
    ranks, only a class that can be imported by module and name is possible. A run in this process is not restarted.

    Ctrl-C asks the ranks to save and stop; the result then has `finished` False. Only the main thread of a program may
    train, because it handles signals. Raises UsageError, ConfigError, DataError, CheckpointError, ConfirmationNeeded
    for a changed setting, RunBusyError if another process trains this run, RunFailed if a restart would not help.

        result = ingot.train("run.toml", overrides=["train.steps=200"], say=print)
        result.finished, result.step, result.run
        ingot.train("run.toml", callbacks=[lambda steps: print(steps[-1].step, steps[-1].loss)])
    """
    return launch.train(
        Path(run_file),
        Path(out) if out is not None else None,
        overrides=overrides,
        accept=accept,
        fresh=fresh,
        archive=archive,
        until_step=until_step,
        given=given_callbacks(callbacks),
        quiet=quiet,
        say=say,
        plan_fallbacks=keep_fallbacks,
    )


def resume(
    run: str | Path,
    *,
    overrides: Sequence[str] = (),
    accept: Collection[str] = (),
    until_step: int | None = None,
    callbacks: Iterable[Given] = (),
    quiet: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> JobResult:
    """Continue an existing run from its newest verified checkpoint; a finished run is returned as it is.

    run: the run folder. The other arguments and the result are those of `train`. Raises UsageError if the folder has no
    run yet, and the errors of `train`.

        result = ingot.resume("runs/demo", overrides=["optim.lr=1e-3"], accept=["optim.lr"])
    """
    folder = RunFolder(Path(run))
    if not (folder.config.is_file() and folder.events.is_file()):
        raise UsageError(
            "E-RESUME-NOTHING",
            f"{run} has no run to continue",
            rule="a run folder has a run.toml and an events.jsonl, which training writes",
            fix='start the run: ingot.train("run.toml")',
            run=str(run),
        )
    return train(
        folder.root,
        overrides=overrides,
        accept=accept,
        until_step=until_step,
        callbacks=callbacks,
        quiet=quiet,
        say=say,
    )
