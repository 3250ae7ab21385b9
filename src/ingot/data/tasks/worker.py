"""Do tasks of a phase on this machine: the command that elements of a Slurm array (or of another scheduler) run.

    python -m ingot.data.tasks.worker STORE PHASE 7 --workers 8
    python -m ingot.data.tasks.worker STORE PHASE --all

A phase is a file in the store with a list of tasks, in numbered blocks. The command names the block to do:

    STORE/phases/NAME.json     ingot's version and the tasks
    STORE/errors/NAME-7.json   the error that ended block 7 before it was finished

Finished tasks are skipped, so the command may be repeated on any machine at any time. The exit status is 0 when all
tasks are done.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot import __version__
from ingot.data.tasks.local import MEMORY_BYTES, Local
from ingot.data.tasks.store import Store
from ingot.data.tasks.task import Task, error_from_json, error_to_json
from ingot.errors import ConfigError, DataMissing, IngotError
from ingot.storage import canonical_json, sha256_bytes, write_atomic, write_json
from ingot.units import parse_bytes


@dataclass(frozen=True)
class TaskPhase:
    """A list of tasks in blocks of `block` tasks. The name is a hash of the tasks and the store."""

    name: str
    tasks: tuple[Task, ...]
    block: int

    @property
    def blocks(self) -> int:
        return -(-len(self.tasks) // self.block)

    def tasks_of(self, index: int) -> tuple[Task, ...]:
        """Return the tasks of block number `index`."""
        return self.tasks[index * self.block : (index + 1) * self.block]


def write_phase(tasks: Sequence[Task], store: Store, block: int) -> TaskPhase:
    """Write `tasks` as a phase in blocks of `block` tasks, and remove the errors that earlier jobs recorded."""
    root = store.root.absolute()
    name = sha256_bytes(canonical_json([str(root), block, [task.key for task in tasks]]).encode())[:16]
    values = {"ingot": __version__, "block": block, "tasks": [task.to_json() for task in tasks]}
    write_atomic(_path(store, name), json.dumps(values))
    phase = TaskPhase(name, tuple(tasks), block)
    for path in _errors(store, {name}):
        path.unlink(missing_ok=True)
    return phase


def read_phase(store: Store, name: str) -> TaskPhase:
    """Return the phase `name`. Raises DataMissing; ConfigError if another version of ingot wrote the phase."""
    try:
        values = json.loads(_path(store, name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataMissing(
            "E-PHASE-MISSING",
            f"there is no phase {name} in {store.root}",
            rule="the store is the same folder, at the same path, on every machine",
            fix="mount the store there, or give the path under which this machine sees it",
            phase=name,
            path=str(store.root),
        ) from None
    if values["ingot"] != __version__:
        raise ConfigError(
            "E-NODE-VERSION",
            f"phase {name} was written by ingot {values['ingot']}, but this machine has ingot {__version__}",
            rule="every machine runs the same version, because the version is part of a result's key",
            fix="install one version everywhere",
            found=values["ingot"],
            expected=__version__,
        )
    return TaskPhase(name, tuple(Task.from_json(task) for task in values["tasks"]), values["block"])


def write_error(store: Store, phase: TaskPhase, index: int, error: Exception) -> None:
    """Record the error that ended block `index`, for the process that waits for the phase."""
    write_json(_error(store, phase, index), error_to_json(error))


def first_error(store: Store, phases: Sequence[TaskPhase]) -> Exception | None:
    """Return the first recorded error that ended a block of one of `phases`, or None."""
    found = _errors(store, {phase.name for phase in phases})
    return error_from_json(json.loads(found[0].read_text(encoding="utf-8"))) if found else None


def _errors(store: Store, names: set[str]) -> list[Path]:
    folder = store.root / "errors"
    return sorted(p for p in folder.iterdir() if p.stem.rpartition("-")[0] in names) if folder.exists() else []


def _path(store: Store, name: str) -> Path:
    return store.root / "phases" / f"{name}.json"


def _error(store: Store, phase: TaskPhase, index: int) -> Path:
    return store.root / "errors" / f"{phase.name}-{index}.json"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ingot.data.tasks.worker", description="Do tasks of a phase that a runner wrote."
    )
    parser.add_argument("store", type=Path, help="the folder of finished tasks, at this path on every machine")
    parser.add_argument("phase", help="the name of the phase: STORE/phases/NAME.json")
    parser.add_argument("index", type=int, nargs="?", help="number of the block of tasks to do")
    parser.add_argument("--all", action="store_true", help="do every block, one after the other")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per CPU)")
    parser.add_argument("--memory", default=f"{MEMORY_BYTES}", help="memory limit per process (default 1.5 GiB)")
    chosen = parser.parse_args(argv)
    if chosen.all == (chosen.index is not None):
        parser.error("give the number of a block, or --all")
    store = Store(chosen.store)
    try:
        phase = read_phase(store, chosen.phase)
        with Local(chosen.workers, memory_bytes=parse_bytes(chosen.memory)) as runner:
            for index in range(phase.blocks) if chosen.all else [chosen.index]:
                _do(store, phase, index, runner)
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _do(store: Store, phase: TaskPhase, index: int, runner: Local) -> None:
    _error(store, phase, index).unlink(missing_ok=True)
    tasks = [task for task in phase.tasks_of(index) if not store.finished(task)]

    def watch(ended, running) -> None:
        for task in ended:
            print(f"done: {task.label or task.key}", flush=True)

    try:
        runner.run(tasks, store, watch)
    except Exception as error:
        write_error(store, phase, index, error)
        raise
    print(f"block {index}: all {len(phase.tasks_of(index))} tasks are done", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
