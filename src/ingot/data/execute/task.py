"""A unit of work with a name that says all that decides its result, and the store where finished ones lie.

    STORE/done/KEY/       what a finished task wrote, and done.json with its result; appears whole, by one rename
    STORE/attempts/KEY.*  what unfinished ones write; an attempt that was killed leaves its folder, the next removes it
    STORE/progress/KEY    where the attempt that runs (or died) is: a record number and counts
    STORE/deaths/KEY      the record numbers at which earlier attempts died

A task is done when its folder is in done/, whoever put it there. Resuming, retrying and doing things exactly once all
come from that one rename, so they hold on every runner; two attempts at one task are harmless, the second finds the
folder and throws its own away.
"""

import contextlib
import errno
import functools
import importlib
import json
import mmap
import os
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.errors import ResourceError
from ingot.storage import canonical_json, fsync_dir, sha256_bytes, write_json

DEATHS_PER_RECORD = 3  # a record at which so many attempts died in a row is left out by the next
_COUNTS_SECONDS = 0.5
_RECORD = struct.Struct("<q")
_COUNTS_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Task:
    """`function` ("ingot.data.curate:curate", called with a Context) applied to `arguments` and to other tasks' folders.

    arguments: JSON values, all that decides the result besides the inputs and ingot's version. inputs: keys of finished
    tasks. places: JSON values that say where things are, never what they are: not part of the key.
    """

    function: str
    arguments: dict[str, Any]
    inputs: tuple[str, ...] = ()
    places: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # for people: the crawl file

    @functools.cached_property
    def key(self) -> str:
        return sha256_bytes(canonical_json([self.function, self.arguments, self.inputs, __version__]).encode())[:32]


class Store:
    """The folder of finished tasks. Its path must mean the same on every machine that works on it."""

    def __init__(self, root: Path):
        self.root = root

    def folder(self, key: str) -> Path:
        return self.root / "done" / key

    def finished(self, task: Task) -> bool:
        return (self.folder(task.key) / "done.json").exists()

    def result(self, task: Task) -> Any:
        """What the task's function returned."""
        return json.loads((self.folder(task.key) / "done.json").read_text(encoding="utf-8"))["result"]

    def progress(self, task: Task) -> "Progress":
        """How far the attempt at `task` is that runs now, or that died."""
        try:
            data = (self.root / "progress" / task.key).read_bytes()
            record = _RECORD.unpack_from(data)[0]
            counts = json.loads(data[_RECORD.size :].rstrip(b"\0") or b"{}")
        except (OSError, ValueError, struct.error):  # none runs, or it is just writing
            return Progress(-1, {})
        return Progress(record, counts)


@dataclass(frozen=True)
class Progress:
    """record: number of the one being worked on, -1 before the first. counts: name -> number ("kept", drop rules)."""

    record: int
    counts: dict[str, int]


class Context:
    """What a task's function gets: its task, the folders it reads, the folder it writes, and how to say where it is.

    skip: numbers of the records that it must leave out, because attempt after attempt died on them.
    """

    def __init__(
        self, task: Task, out: Path, folders: tuple[Path, ...], skip: frozenset[int], board: mmap.mmap | bytearray
    ):
        self.task, self.out, self.folders, self.skip = task, out, folders, skip
        self._board, self._due = board, 0.0

    def at(self, record: int, counts: Callable[[], dict[str, int]] | None = None) -> None:
        """Say that `record` is next. It costs next to nothing, so every record says it; counts() is asked seldom.

        What is said here is what is left when the process is killed in the next instant.
        """
        _RECORD.pack_into(self._board, 0, record)
        if counts is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _COUNTS_SECONDS
            text = canonical_json(counts()).encode()
            if len(text) <= _COUNTS_BYTES:
                self._board[_RECORD.size :] = text.ljust(_COUNTS_BYTES, b"\0")


def run_task(task: Task, store: Store) -> None:
    """Do `task` in this process, unless it is done. What every runner calls in the end.

    Raises what the function raises; ResourceError when the disk is full (nothing half-written stays).
    """
    if store.finished(task):
        return
    for name in ("done", "attempts", "progress", "deaths"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
    with _attempt(task, store) as context:
        started = time.process_time()
        result = _function(task.function)(context)
        facts = {"task": task.label, "function": task.function, "result": result}
        _publish(context.out, store.folder(task.key), facts, time.process_time() - started)


@contextlib.contextmanager
def _attempt(task: Task, store: Store) -> Iterator[Context]:
    skip = _learn_from_deaths(task, store)
    for old in (store.root / "attempts").glob(f"{task.key}.*"):
        shutil.rmtree(old, ignore_errors=True)
    out = store.root / "attempts" / f"{task.key}.{uuid.uuid4().hex[:8]}"
    board_path = store.root / "progress" / task.key
    try:
        out.mkdir()
        with board_path.open("w+b") as file:
            file.write(_RECORD.pack(-1).ljust(_RECORD.size + _COUNTS_BYTES, b"\0"))
            file.flush()
            with mmap.mmap(file.fileno(), 0) as board:
                folders = tuple(store.folder(key) for key in task.inputs)
                yield Context(task, out, folders, skip, board)
    except OSError as error:
        board_path.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)  # also frees what it took
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {store.root} is full: {task.label} could not be finished",
                rule="what was finished is kept, nothing half-written stays",
                fix="free some space and give the same command again: it goes on",
            ) from None
        raise
    except BaseException:
        board_path.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)
        raise
    board_path.unlink(missing_ok=True)
    (store.root / "deaths" / task.key).unlink(missing_ok=True)


def _learn_from_deaths(task: Task, store: Store) -> frozenset[int]:
    """Note where the last attempt died, if it did. Returns the records at which too many died."""
    path, last = store.root / "deaths" / task.key, store.progress(task).record
    records = [int(line) for line in path.read_text().split()] if path.exists() else []
    if last >= 0:
        records.append(last)
        path.write_text("\n".join(map(str, records)))
    return frozenset(record for record in records if records.count(record) >= DEATHS_PER_RECORD)


def _function(name: str) -> Callable[[Context], Any]:
    module, _, attribute = name.partition(":")
    if not module.startswith("ingot."):
        raise ValueError(f"{name!r} is not a function of ingot")  # a store is data: it must not choose what code runs
    return getattr(importlib.import_module(module), attribute)


def _publish(out: Path, done: Path, facts: dict, seconds: float) -> None:
    """Make `out` the folder `done`, whole and on disk. The first attempt wins; a later one is thrown away."""
    for path in out.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    write_json(out / "seconds.json", seconds)  # apart: equal tasks have an equal done.json
    write_json(out / "done.json", facts)
    try:
        out.rename(done)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(out)
    fsync_dir(done.parent)
