"""A list of tasks as a file in the store, in blocks that other machines take by number.

STORE/phases/NAME.json     ingot's version and the tasks
STORE/errors/NAME-7.json   what ended block 7, when it could not be finished (failures.py)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot import __version__
from ingot.data.tasks.failures import from_json, to_json
from ingot.data.tasks.task import Store, Task
from ingot.errors import ConfigError, DataMissing
from ingot.storage import canonical_json, sha256_bytes, write_atomic, write_json


@dataclass(frozen=True)
class Phase:
    """tasks: in blocks of `block`. The name is made from the tasks and the store."""

    name: str
    tasks: tuple[Task, ...]
    block: int

    @property
    def blocks(self) -> int:
        return -(-len(self.tasks) // self.block)

    def tasks_of(self, index: int) -> tuple[Task, ...]:
        return self.tasks[index * self.block : (index + 1) * self.block]


def write_phase(tasks: Sequence[Task], store: Store, block: int) -> Phase:
    """Write `tasks` down, in blocks of `block`, for `python -m ingot.data.tasks.worker`. Old errors are forgotten."""
    root = store.root.absolute()
    name = sha256_bytes(canonical_json([str(root), block, [task.key for task in tasks]]).encode())[:16]
    values = {"ingot": __version__, "block": block, "tasks": [task.to_json() for task in tasks]}
    write_atomic(_path(store, name), json.dumps(values))
    phase = Phase(name, tuple(tasks), block)
    for path in _errors(store, {name}):
        path.unlink(missing_ok=True)
    return phase


def read_phase(store: Store, name: str) -> Phase:
    """Raises DataMissing, and ConfigError when another version of ingot wrote it: keys would not be the same."""
    try:
        values = json.loads(_path(store, name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataMissing(
            f"no phase {name} in {store.root}",
            rule="the store is the same folder, at the same path, on every machine",
            fix="mount it there, or give the path under which this machine sees it",
        ) from None
    if values["ingot"] != __version__:
        raise ConfigError(
            f"phase {name} was written by ingot {values['ingot']}, this is {__version__}",
            rule="every machine runs the same version: it is part of what names a result",
            fix="install one version everywhere",
        )
    return Phase(name, tuple(Task.from_json(task) for task in values["tasks"]), values["block"])


def write_error(store: Store, phase: Phase, index: int, error: Exception) -> None:
    write_json(_error(store, phase, index), to_json(error))


def clear_error(store: Store, phase: Phase, index: int) -> None:
    _error(store, phase, index).unlink(missing_ok=True)


def first_error(store: Store, phases: Sequence[Phase]) -> Exception | None:
    """What ended a block of one of `phases`, if one could not be finished."""
    found = _errors(store, {phase.name for phase in phases})
    return from_json(json.loads(found[0].read_text(encoding="utf-8"))) if found else None


def _errors(store: Store, names: set[str]) -> list[Path]:
    folder = store.root / "errors"
    return sorted(p for p in folder.iterdir() if p.stem.rpartition("-")[0] in names) if folder.exists() else []


def _path(store: Store, name: str) -> Path:
    return store.root / "phases" / f"{name}.json"


def _error(store: Store, phase: Phase, index: int) -> Path:
    return store.root / "errors" / f"{phase.name}-{index}.json"
