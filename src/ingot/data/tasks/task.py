"""A unit of work with a name that says all that decides its result, and the store where finished ones lie.

    STORE/done/KE/KEY/    what a finished task wrote, and done.json with its result; appears whole, by one rename
    STORE/attempts/KEY.*  what unfinished ones write; an attempt that was killed leaves its folder, the next removes it
    STORE/progress/KEY    where the attempt that runs (or died) is: a record number and counts; locked while it runs
    STORE/deaths/KEY      how earlier attempts died, and at which records
    STORE/groups/NAME     keys, one a line: what many tasks read that each read a lot

A task is done when its folder is in done/, whoever put it there. Resuming, retrying and doing things exactly once all
come from that one rename, so they hold on every runner; two attempts at one task are harmless, the second finds the
folder and throws its own away.
"""

import contextlib
import errno
import fcntl
import functools
import importlib
import json
import mmap
import os
import re
import shutil
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.errors import ResourceError
from ingot.storage import canonical_json, fsync_dir, sha256_bytes, write_atomic

# How many attempts may end at one record before the next leaves it out, by the way they end. A crash (signal of a
# fault, exit, no memory) is nearly always the record's own doing; so is a loop, which costs more to see. Whoever sends
# SIGKILL, the kernel short of memory or an operator, may mean the machine and not the record.
DEATHS_PER_RECORD = 3
_PER_RECORD = {"crashed": DEATHS_PER_RECORD, "hung": 2, "stalled": 3, "killed": 6}
_PROOF = 6  # of guilt: a common multiple, so that kinds add up in whole numbers
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMPY_FULL = re.compile(r"Not enough free space|\d+ requested and \d+ written")  # it drops the number
_COUNTS_SECONDS = 0.5
_COUNTS_BYTES = 8192
_GROUP = "group-"
_STATE = struct.Struct("<qqqq")  # watched, beats, record, seen


@dataclass(frozen=True, kw_only=True)
class Task:
    """`function` ("ingot.data.build.curate:curate", called with a Context) on `arguments` and other tasks' folders.

    arguments: JSON values, all that decides the result besides the inputs and ingot's version. inputs: keys of finished
    tasks, or names of groups of them (Store.group). places: JSON values that say where things are, never what they
    are: not part of the key.
    """

    function: str
    arguments: dict[str, Any]
    inputs: tuple[str, ...] = ()
    places: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # for people: the crawl file

    @functools.cached_property
    def key(self) -> str:
        return sha256_bytes(canonical_json([self.function, self.arguments, self.inputs, __version__]).encode())[:32]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Task":
        return cls(**{**values, "inputs": tuple(values["inputs"])})


@dataclass(frozen=True)
class Progress:
    """record: number of the one being worked on, -1 before the first and after the last. counts: name -> number
    ("kept", drop rules). seen: records so far. beats: grows whenever the attempt says something."""

    record: int
    counts: dict[str, int]
    seen: int = 0
    beats: int = 0
    watched: bool = False  # by a process that outlives it and notes how it dies


class Store:
    """The folder of finished tasks. Its path must mean the same on every machine that works on it."""

    def __init__(self, root: Path):
        self.root = root

    def folder(self, key: str) -> Path:
        return self.root / "done" / key[:2] / key

    def group(self, keys: Iterable[str]) -> str:
        """One name for many inputs, which says what they are. A thousand tasks that each read a hundred thousand
        others would else be gigabytes of names, to hash, to send and to keep."""
        text = "".join(f"{key}\n" for key in keys)
        name = _GROUP + sha256_bytes(text.encode())[:32]
        if not (path := self.root / "groups" / name).exists():
            write_atomic(path, text)
        return name

    def folders(self, inputs: Iterable[str]) -> tuple[Path, ...]:
        """The folders of `inputs` (Task.inputs), those of a group in its order."""
        found: list[Path] = []
        for name in inputs:
            one = not name.startswith(_GROUP)
            keys = [name] if one else (self.root / "groups" / name).read_text(encoding="utf-8").splitlines()
            found += map(self.folder, keys)
        return tuple(found)

    def finished(self, task: Task) -> bool:
        return (self.folder(task.key) / "done.json").exists()

    def finished_keys(self, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that are done. It lists folders (256 at most) instead of asking for each key, which on a
        network file system costs less and sees sooner what another machine did."""
        wanted: dict[str, set[str]] = defaultdict(set)
        for key in keys:
            wanted[key[:2]].add(key)
        found: set[str] = set()
        for prefix, some in wanted.items():
            with contextlib.suppress(FileNotFoundError):
                found |= some.intersection(path.name for path in (self.root / "done" / prefix).iterdir())
        return found

    def result(self, task: Task) -> Any:
        """What the task's function returned."""
        return self.facts(task)["result"]

    def facts(self, task: Task) -> dict[str, Any]:
        """A finished task's label, function and result, and the `records` and `counts` that it said last."""
        return json.loads((self.folder(task.key) / "done.json").read_text(encoding="utf-8"))

    def forget(self, task: Task) -> None:
        """Have a finished task done again."""
        attempts = self.root / "attempts"
        attempts.mkdir(exist_ok=True)
        self.folder(task.key).rename(old := attempts / f"removed.{uuid.uuid4().hex}")
        shutil.rmtree(old, ignore_errors=True)

    def progress(self, task: Task) -> Progress:
        """How far the attempt at `task` is that runs now, or that died."""
        try:
            data = (self.root / "progress" / task.key).read_bytes()
            watched, beats, record, seen = _STATE.unpack_from(data)
        except (OSError, struct.error):  # none runs, or it is just beginning
            return Progress(-1, {})
        try:
            counts = json.loads(data[_STATE.size :].rstrip(b"\0") or b"{}")
        except ValueError:  # it is just writing them
            counts = {}
        return Progress(record, counts, seen, beats, bool(watched))


class Context:
    """What a task's function gets: its task, the folders it reads, the folder it writes, and how to say where it is.

    skip: numbers of the records that it must leave out, because attempt after attempt died on them.
    """

    def __init__(
        self,
        task: Task,
        out: Path,
        folders: tuple[Path, ...],
        skip: frozenset[int],
        board: mmap.mmap | bytearray,
        *,
        watched: bool = False,
        beat: Callable[[], None] | None = None,
    ):
        self.task, self.out, self.folders, self.skip = task, out, folders, skip
        self.records = 0
        self.held = -1  # open on the folder `out`, to know it again
        self._board, self._watched, self._beat = board, watched, beat
        self._beats, self._due = 0, 0.0
        self._counts: Callable[[], dict[str, int]] | None = None
        self.at(-1)

    def at(self, record: int, counts: Callable[[], dict[str, int]] | None = None) -> None:
        """Say that `record` is next. It costs next to nothing, so every record says it; counts() is asked seldom.

        -1 when what comes next belongs to no record: say so after the last one, and now and then in a long task without
        records, which is otherwise taken for dead. What is said here is what is left when the process is killed in the
        next instant.
        """
        self._beats += 1
        if record >= 0:
            self.records = record + 1
        if counts is not None:
            self._counts = counts
        _STATE.pack_into(self._board, 0, self._watched, self._beats, record, self.records)
        if (now := time.monotonic()) >= self._due:
            self._due = now + _COUNTS_SECONDS
            self._board[_STATE.size :] = _fitting(self.counts()).ljust(_COUNTS_BYTES, b"\0")
            if self._beat is not None:
                self._beat()

    def counts(self) -> dict[str, int]:
        return dict(self._counts()) if self._counts is not None else {}


def _fitting(counts: dict[str, int]) -> bytes:
    """The counts as JSON; of very many only the largest."""
    while len(text := canonical_json(counts).encode()) > _COUNTS_BYTES:
        counts = dict(sorted(counts.items(), key=lambda item: -item[1])[: len(counts) // 2])
    return text


def run_task(task: Task, store: Store, *, watched: bool = False, beat: Callable[[], None] | None = None) -> None:
    """Do `task` in this process, unless it is done. What every runner calls in the end.

    watched: another process notes it when this one dies. beat() is called about twice a second while records are said.
    Raises what the function raises; ResourceError when the disk is full (nothing half-written stays).
    """
    if store.finished(task):
        return
    with _full_disk_is_named(task, store), _attempt(task, store, watched, beat) as context:
        started = time.process_time()
        result = _function(task.function)(context)
        facts = {
            "task": task.label,
            "function": task.function,
            "result": result,
            "records": context.records,
            "counts": context.counts(),
        }
        _publish(context, store.folder(task.key), facts, time.process_time() - started)


@contextlib.contextmanager
def _attempt(task: Task, store: Store, watched: bool, beat) -> Iterator[Context]:
    for name in ("done", "attempts", "progress", "deaths"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
    out = store.root / "attempts" / f"{task.key}.{uuid.uuid4().hex[:8]}"
    folders = store.folders(task.inputs)
    board_path = store.root / "progress" / task.key
    with _board(board_path) as file:
        if file is None:  # an attempt elsewhere lives: leave its traces alone
            skip, board = _skip(_deaths(task, store)), bytearray(_STATE.size + _COUNTS_BYTES)
        else:
            skip = _learn_from_deaths(task, store)
            _remove_attempts(task, store)
            # No hole: writing to the map must not meet a full disk.
            empty = _STATE.pack(watched, 0, -1, 0).ljust(_STATE.size + _COUNTS_BYTES, b"\0")
            if os.pwrite(file, empty, 0) < len(empty):  # the last page of the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            board = mmap.mmap(file, _STATE.size + _COUNTS_BYTES)
        try:
            out.mkdir()
            context = Context(task, out, folders, skip, board, watched=watched, beat=beat)
            context.held = os.open(out, os.O_RDONLY)
            try:
                yield context
            finally:
                os.close(context.held)
        except BaseException as error:
            shutil.rmtree(out, ignore_errors=True)  # also frees what it took
            if file is not None and not isinstance(error, MemoryError):  # that is a death, and the board tells where
                board_path.unlink(missing_ok=True)
            raise
        if file is not None:
            board_path.unlink(missing_ok=True)
            (store.root / "deaths" / task.key).unlink(missing_ok=True)


@contextlib.contextmanager
def _board(path: Path) -> Iterator[int | None]:
    """The progress file, locked until the block ends or this process dies; None if a living attempt has it.

    The lock matters when one machine takes another for dead: to cut a file that a process has mapped would kill it.
    """
    file, ours = _open_locked(path)
    try:
        yield file if ours else None
    finally:
        os.close(file)


def _open_locked(path: Path) -> tuple[int, bool]:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file, False
        except OSError:
            pass  # a file system without locks: two attempts at once are then rare, and nothing tells them apart
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file, True
        os.close(file)  # its owner has just removed it


@contextlib.contextmanager
def _full_disk_is_named(task: Task, store: Store) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise ResourceError(
            f"the disk of {store.root} is full, or a quota or limit of it is met ({error}): "
            f"{task.label or task.function} could not be finished",
            rule="what was finished is kept, nothing half-written stays",
            fix="free some space and give the same command again: it goes on",
        ) from None


def _is_full(error: Exception) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    by_numpy = isinstance(error, OSError) and number is None and _NUMPY_FULL.search(str(error))
    return number in _FULL or bool(by_numpy) or os.strerror(errno.ENOSPC) in str(error)  # duckdb has its own errors


def note_death(task: Task, store: Store, kind: str) -> int:
    """Write down that the attempt at `task` ended as "crashed", "hung", "stalled" or "killed". Returns its record.

    Only when its process is surely gone. The next attempt leaves out the records at which too many ended.
    """
    record = store.progress(task).record
    with _full_disk_is_named(task, store):
        _add_death(task, store, kind, record)
    forget_attempt(task, store)
    return record


def _add_death(task: Task, store: Store, kind: str, record: int) -> None:
    if record >= 0:
        (store.root / "deaths").mkdir(parents=True, exist_ok=True)
        with (store.root / "deaths" / task.key).open("a", encoding="utf-8") as file:
            file.write(f"{kind} {record}\n")


def forget_attempt(task: Task, store: Store) -> None:
    """Remove what an attempt left that was stopped on purpose."""
    (store.root / "progress" / task.key).unlink(missing_ok=True)
    _remove_attempts(task, store)


def too_many(kinds: Iterable[str]) -> bool:
    """Whether deaths of these kinds, at one place, are enough to blame the place."""
    return sum(_PROOF // _PER_RECORD.get(kind, DEATHS_PER_RECORD) for kind in kinds) >= _PROOF


def _learn_from_deaths(task: Task, store: Store) -> frozenset[int]:
    """Note where the last attempt died, if it did and nobody watched. Returns the records at which too many died."""
    last = store.progress(task)
    # Whoever watched it would have noted it: both were killed, perhaps with the whole machine.
    _add_death(task, store, "killed" if last.watched else "crashed", last.record)
    return _skip(_deaths(task, store))


def _deaths(task: Task, store: Store) -> dict[int, list[str]]:
    """record -> kinds of deaths there."""
    found: dict[int, list[str]] = defaultdict(list)
    with contextlib.suppress(FileNotFoundError):
        for line in (store.root / "deaths" / task.key).read_text(encoding="utf-8").splitlines():
            kind, _, record = line.partition(" ")
            if record.isdecimal():  # a line may be torn
                found[int(record)].append(kind)
    return found


def _skip(deaths: dict[int, list[str]]) -> frozenset[int]:
    return frozenset(record for record, kinds in deaths.items() if too_many(kinds))


def _remove_attempts(task: Task, store: Store) -> None:
    # Renamed first: should its process live after all, it finds its folder gone, and cannot publish half of it.
    for old in (store.root / "attempts").glob(f"{task.key}.*"):
        with contextlib.suppress(OSError):
            old.rename(old.with_name(f"removed.{uuid.uuid4().hex}"))
    for old in (store.root / "attempts").glob("removed.*"):
        shutil.rmtree(old, ignore_errors=True)


def _function(name: str) -> Callable[[Context], Any]:
    module, _, attribute = name.partition(":")
    if not module.startswith("ingot."):
        raise ValueError(f"{name!r} is not a function of ingot")  # a store is data: it must not choose what code runs
    return getattr(importlib.import_module(module), attribute)


def _publish(context: Context, done: Path, facts: dict, seconds: float) -> None:
    """Make the attempt's folder the folder `done`, whole and on disk. The first attempt wins, a later one is thrown
    away. FileNotFoundError when somebody took this process for dead and removed its folder: what the task wrote since
    may have made another one in its place."""
    out = context.out
    if not os.path.samestat(out.stat(), os.fstat(context.held)):
        raise FileNotFoundError(errno.ENOENT, "the folder of this attempt was removed", str(out))
    for path in out.rglob("*"):
        if path.is_dir():
            fsync_dir(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _write(out / "seconds.json", seconds)  # apart: equal tasks have an equal done.json
    _write(out / "done.json", facts)
    fsync_dir(out)
    if not done.parent.exists():
        done.parent.mkdir(exist_ok=True)
        fsync_dir(done.parent.parent)
    try:
        out.rename(done)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(out)
    fsync_dir(done.parent)


def _write(path: Path, value: Any) -> None:
    # Not atomic on its own (the folder's rename is), and it makes no folder.
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
