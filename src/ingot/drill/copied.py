"""The copy of a run on which a drill works: the same training, with other folders and shorter intervals. No torch.

The run itself is only read. Its data and its first weights are read where they are.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.config import to_toml
from ingot.drill.guarded import differences
from ingot.errors import UsageError
from ingot.schema.run import RemoteCheckpoints, RunConfig
from ingot.storage import write_atomic
from ingot.trainer.launch.prepare import find_folder, read_run, with_paths_from
from ingot.trainer.resilience.lock import is_locked

WATCHDOG_SECONDS = 3.0
RESULT = "drill.json"  # marks the folder of a drill
_SAVES = 6  # checkpoints of a copy, about
_MOST_RESTARTS = 10_000


@dataclass(frozen=True)
class DrillCopy:
    """The folder `root` of a drill. config: the settings of its run file."""

    root: Path
    config: RunConfig

    @property
    def run_file(self) -> Path:
        return self.root / "run.toml"


def open_copy(
    run: Path, out: Path | None, overrides: Sequence[str] = (), *, many_faults: bool = False
) -> tuple[DrillCopy, list[str]]:
    """Make the folder of a drill of `run`, a run file or the folder of a run. Returns it with the changed settings, as
    text.

    out: the folder; None: the run's folder with "-drill" after its name. overrides: settings as "a.b=c". many_faults:
    the job is restarted again and again. Raises UsageError and ConfigError for a run that cannot be read, UsageError
    also if the folder has something that is not of a drill.
    """
    path, config = read_run(run, overrides)
    own = find_folder(run, path, None, config).root
    root = (out or own.with_name(f"{own.name}-drill")).resolve()
    if is_locked(lock_of(root)):
        raise UsageError(
            "E-DRILL-FOLDER",
            f"another drill is at work in {root}",
            rule="a drill empties its folder and works there alone",
            fix="wait for its end, or name another folder with --out DIR",
            folder=str(root),
        )
    _require_own(root, own)
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(root / RESULT, "{}\n")
    config = with_paths_from(config, path.parent.resolve(), root)
    changed = _changed(config, many_faults)
    return DrillCopy(root, changed), differences(config, changed)


def lock_of(root: Path) -> Path:
    """Return the lock that a drill in the folder `root` holds."""
    return root / "drill.lock"


def _require_own(root: Path, run: Path) -> None:
    """Empty the folder of an earlier drill. Raises UsageError for another one."""
    if root == run.resolve():
        raise UsageError(
            "E-DRILL-FOLDER",
            f"--out {root} is the folder of the run itself",
            rule="a drill breaks copies of a run in a folder of its own",
            fix="name another folder, or leave --out out",
            folder=str(root),
        )
    if root.exists() and any(root.iterdir()) and not (root / RESULT).exists():
        raise UsageError(
            "E-DRILL-FOLDER",
            f"{root} is not empty, and has no {RESULT}",
            rule="a drill empties its folder, so that must be new or of an earlier drill",
            fix="name another folder with --out DIR, or remove that one",
            folder=str(root),
        )
    shutil.rmtree(root, ignore_errors=True)


def _changed(config: RunConfig, many_faults: bool) -> RunConfig:
    """Return the settings of the copy, except the interval of its checkpoints (`with_interval`)."""
    launch = replace(config.launch, nodes=1, spares=0, min_ranks=0, stop_after="", watchdog_seconds=WATCHDOG_SECONDS)
    if many_faults:
        launch = replace(launch, max_restarts=_MOST_RESTARTS)
    saves = config.checkpoint
    saves = replace(saves, keep=max(saves.keep, 2), disks=(), remote=RemoteCheckpoints())
    return replace(
        config,
        launch=launch,
        checkpoint=saves,
        evaluate=replace(
            config.evaluate, every_steps=0, prompts=(), background=replace(config.evaluate.background, every="")
        ),
        watch=replace(config.watch, log_every=1),
        parallel=replace(config.parallel, offload_folder=_own_folder(config)),
    )


def _own_folder(config: RunConfig) -> str:
    """Return the folder of offloaded state: two runs must not write to one."""
    return "offloaded" if config.parallel.offload_folder else ""


def with_interval(copy: DrillCopy, steps: int) -> DrillCopy:
    """Return the copy with several checkpoints in `steps` steps, and write its run file."""
    every = max(steps // _SAVES, 1)
    saves = replace(copy.config.checkpoint, every="", every_steps=every)
    config = replace(copy.config, checkpoint=saves)
    write_atomic(copy.run_file, to_toml(config))
    return DrillCopy(copy.root, config)
