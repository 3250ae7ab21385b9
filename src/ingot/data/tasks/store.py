"""The store: the folder of finished tasks, and of the attempts at unfinished tasks.

    STORE/format          the version of ingot that made the store, and the version of the store's layout
    STORE/done/KE/KEY/    the files of a finished task, and done.json with its result; appears complete, by one rename
    STORE/attempts/KEY.*  the files of an attempt; a killed attempt leaves its folder, and the next attempt removes it
    STORE/progress/KEY    the progress of the attempt that runs or died: record number and counts; locked while it runs
    STORE/deaths/KEY      how earlier attempts died, and at which records
    STORE/groups/NAME     the keys of a group of tasks, one per line

A task is done when its folder is in done/, no matter which process put it there. Resuming, retrying and doing each task
exactly once all follow from that one rename, so they work with every runner. Two attempts at one task are harmless: the
second finds the folder and deletes its own.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import struct
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot import __version__
from ingot.data.tasks.task import (
    BOARD,
    COUNTS_BYTES,
    Attempt,
    R,
    Task,
    TaskGroup,
    decode,
    done_facts,
    done_folder,
    encode,
)
from ingot.storage import closing_lock, disk_full, fsync_dir, is_full, sha256_bytes, write_atomic

# The number of attempts that may die at one record before the next attempt leaves the record out, for each kind of
# death. A crash (segmentation fault, exit, out of memory) is nearly always caused by the record; so is a hang, which
# takes longer to detect. SIGKILL comes from the kernel when memory is short, or from an operator, and may have nothing
# to do with the record.
DEATHS_PER_RECORD = 3
_PER_RECORD = {"crashed": DEATHS_PER_RECORD, "hung": 2, "stalled": 3, "killed": 6}
_PROOF = 6  # a common multiple of the numbers above, so that deaths of several kinds add up as integers
_NUMPY_FULL = re.compile(r"Not enough free space|\d+ requested and \d+ written")  # numpy drops the error number
_LAYOUT = 2  # of a store; 1 had functions as "module:name" and no format file


@dataclass(frozen=True)
class AttemptProgress:
    """The progress of an attempt.

    record: number of the record being worked on, -1 before the first and after the last. counts: name -> number
    ("kept", drop rules). records: number of records so far. beats: number of reports by the attempt.
    watched: True if another process watches the attempt and records how it ends.
    """

    record: int
    counts: dict[str, int]
    records: int = 0
    beats: int = 0
    watched: bool = False


class Store:
    """The folder of finished tasks. Its path must mean the same folder on every machine that works on it."""

    def __init__(self, root: Path):
        self.root = root

    def folder(self, task: Task) -> Path:
        """Return the folder of a finished task."""
        return done_folder(self.root, task.key)

    def group(self, tasks: Sequence[Task[R]]) -> TaskGroup[R]:
        """Write the keys of a group of tasks, in order. Return references to them; equal groups have equal names."""
        text = "".join(f"{task.key}\n" for task in tasks)
        name = f"group-{sha256_bytes(text.encode())[:32]}"
        if not (path := self.root / "groups" / name).exists():
            write_atomic(path, text)
        return TaskGroup(name)

    def finished(self, task: Task) -> bool:
        return (self.folder(task) / "done.json").exists()

    def finished_keys(self, keys: Iterable[str]) -> set[str]:
        """Return the keys among `keys` whose tasks are done.

        This lists at most 256 folders instead of looking up each key: on a network file system, a listing costs less
        and shows the results of other machines sooner.
        """
        wanted: dict[str, set[str]] = defaultdict(set)
        for key in keys:
            wanted[key[:2]].add(key)
        found: set[str] = set()
        for prefix, some in wanted.items():
            with contextlib.suppress(FileNotFoundError):
                found |= some.intersection(path.name for path in (self.root / "done" / prefix).iterdir())
        return found

    def result(self, task: Task[R]) -> R:
        """Return the value that the task's function returned."""
        return decode(task.function.result, self.facts(task)["result"])

    def facts(self, task: Task) -> dict[str, Any]:
        """Return a finished task's label, function and result, and its last reported `records` and `counts`."""
        return done_facts(self.root, task.key)

    def seconds(self, tasks: Iterable[Task]) -> float:
        """Return the total CPU seconds of finished tasks."""
        return sum(json.loads((self.folder(task) / "seconds.json").read_text(encoding="utf-8")) for task in tasks)

    def forget(self, task: Task) -> None:
        """Remove the result of a finished task, so that it is done again."""
        attempts = self.root / "attempts"
        attempts.mkdir(exist_ok=True)
        self.folder(task).rename(old := attempts / f"removed.{uuid.uuid4().hex}")
        shutil.rmtree(old, ignore_errors=True)

    def progress(self, task: Task) -> AttemptProgress:
        """Return the progress of the attempt at `task` that is running or that died."""
        try:
            data = (self.root / "progress" / task.key).read_bytes()
            watched, beats, record, records = BOARD.unpack_from(data)
        except (OSError, struct.error):  # no attempt runs, or the attempt is just beginning
            return AttemptProgress(-1, {})
        try:
            counts = json.loads(data[BOARD.size :].rstrip(b"\0") or b"{}")
        except ValueError:  # the counts are just being written
            counts = {}
        return AttemptProgress(record, counts, records, beats, bool(watched))


def open_store(root: Path) -> Store:
    """Return the store at `root`. Remove unfinished work of another version of ingot, with a notice on stderr.

    The version is part of every key, so results of another version cannot be used. Fetched inputs are kept.
    """
    mine = f"ingot {__version__} layout {_LAYOUT}\n"
    path = root / "format"
    left = [one for one in root.iterdir() if one.name != "fetched"] if root.is_dir() else []
    if left and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != mine):
        for one in left:
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        print(
            f"notice: the unfinished build in {root} was begun by another version of ingot; the build starts again",
            file=sys.stderr,
        )
    if not path.exists():
        write_atomic(path, mine)
    return Store(root)


def run_task(task: Task, store: Store, *, watched: bool = False, beat=None) -> None:
    """Do `task` in this process, unless it is done. Every runner calls this function to do a task.

    watched: True if another process notices the death of this one. beat(): called about twice a second while the task
    reports. Raises the error that the function raises; ResourceError if the disk is full (no incomplete files remain).
    """
    if store.finished(task):
        return
    with _full_disk_is_named(task, store), _attempt(task, store, watched, beat) as attempt:
        started = time.process_time()
        result = task.function(task.resolved(store.root.absolute()), attempt)
        facts = {
            "task": task.label,
            "function": task.function.name,
            "result": encode(result),
            "records": attempt.records,
            "counts": attempt.counts(),
        }
        _publish(attempt, store.folder(task), facts, time.process_time() - started)


@contextlib.contextmanager
def _attempt(task: Task, store: Store, watched: bool, beat) -> Iterator[Attempt]:
    """Yield an attempt with a new folder and a progress file.

    If the block raises, both are removed. After a MemoryError, the progress file stays to show the record at fault.
    """
    for name in ("done", "attempts", "progress", "deaths"):
        (store.root / name).mkdir(parents=True, exist_ok=True)
    out = store.root / "attempts" / f"{task.key}.{uuid.uuid4().hex[:8]}"
    board_path = store.root / "progress" / task.key
    with _board(board_path) as file:
        if file is None:  # another attempt is running: leave its files alone
            skip, board = _skip(_deaths(task, store)), bytearray(BOARD.size + COUNTS_BYTES)
        else:
            skip = _learn_from_deaths(task, store)
            _remove_attempts(task, store)
            # A file without holes, so that writing to the map never needs space on a full disk.
            empty = BOARD.pack(watched, 0, -1, 0).ljust(BOARD.size + COUNTS_BYTES, b"\0")
            if os.pwrite(file, empty, 0) < len(empty):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            board = mmap.mmap(file, BOARD.size + COUNTS_BYTES)
        try:
            out.mkdir()
            attempt = Attempt(out, skip, board, watched=watched, beat=beat)
            attempt.held = os.open(out, os.O_RDONLY)
            try:
                yield attempt
            finally:
                os.close(attempt.held)
        except BaseException as error:
            shutil.rmtree(out, ignore_errors=True)  # also frees its space on the disk
            if file is not None and not isinstance(error, MemoryError):  # MemoryError counts as a death at the record
                board_path.unlink(missing_ok=True)
            raise
        if file is not None:
            board_path.unlink(missing_ok=True)
            (store.root / "deaths" / task.key).unlink(missing_ok=True)


@contextlib.contextmanager
def _board(path: Path) -> Iterator[int | None]:
    """Yield the progress file, locked until the block ends or this process dies; None if a running attempt has it.

    The lock matters if one machine wrongly considers another dead: truncating a file that a process has mapped would
    kill that process.
    """
    file, ours = _open_locked(path)
    with closing_lock(file):
        yield file if ours else None


def _open_locked(path: Path) -> tuple[int, bool]:
    """Return an open file descriptor, and True if this process holds the lock of the file."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file, False
        except OSError:
            pass  # a file system without locks: two attempts at once cannot be detected, but are rare
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file, True
        os.close(file)  # its owner has just removed it


@contextlib.contextmanager
def _full_disk_is_named(task: Task, store: Store) -> Iterator[None]:
    """Raise ResourceError instead of any of the various errors that a full disk causes."""
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        raise disk_full(store.root, error, task.title) from None


def _is_full(error: Exception) -> bool:
    by_numpy = isinstance(error, OSError) and error.errno is None and _NUMPY_FULL.search(str(error))
    by_duckdb = os.strerror(errno.ENOSPC) in str(error)  # it has errors of its own
    return is_full(error) or bool(by_numpy) or by_duckdb


def note_death(task: Task, store: Store, kind: str) -> int:
    """Record that the attempt at `task` died. Return the record at which it died, or -1.

    kind: "crashed", "hung", "stalled" or "killed". Call this only after the process of the attempt has ended. The next
    attempt leaves out the records at which too many attempts died.
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
    """Remove the files of an attempt that was stopped on purpose."""
    (store.root / "progress" / task.key).unlink(missing_ok=True)
    _remove_attempts(task, store)


def too_many(kinds: Iterable[str]) -> bool:
    """Return True if deaths of these kinds at one record are enough to leave the record out."""
    return sum(_PROOF // _PER_RECORD.get(kind, DEATHS_PER_RECORD) for kind in kinds) >= _PROOF


def _learn_from_deaths(task: Task, store: Store) -> frozenset[int]:
    """Record the death of the last attempt, if no other process has done so. Return the records to leave out."""
    last = store.progress(task)
    # A watching process would have recorded the death: so both were killed, perhaps with the whole machine.
    _add_death(task, store, "killed" if last.watched else "crashed", last.record)
    return _skip(_deaths(task, store))


def _deaths(task: Task, store: Store) -> dict[int, list[str]]:
    """Return record -> the kinds of the deaths at this record."""
    found: dict[int, list[str]] = defaultdict(list)
    with contextlib.suppress(FileNotFoundError):
        for line in (store.root / "deaths" / task.key).read_text(encoding="utf-8").splitlines():
            kind, _, record = line.partition(" ")
            if record.isdecimal():  # a line may be incomplete
                found[int(record)].append(kind)
    return found


def _skip(deaths: dict[int, list[str]]) -> frozenset[int]:
    return frozenset(record for record, kinds in deaths.items() if too_many(kinds))


def _remove_attempts(task: Task, store: Store) -> None:
    # Renamed before it is removed: if its process is still alive, it finds no folder and cannot publish half of it.
    for old in (store.root / "attempts").glob(f"{task.key}.*"):
        with contextlib.suppress(OSError):
            old.rename(old.with_name(f"removed.{uuid.uuid4().hex}"))
    for old in (store.root / "attempts").glob("removed.*"):
        shutil.rmtree(old, ignore_errors=True)


def _publish(attempt: Attempt, done: Path, facts: dict, seconds: float) -> None:
    """Write the attempt's folder to disk and rename it to `done`. If `done` exists already, delete the folder instead.

    Raises FileNotFoundError if another process considered this one dead and removed its folder, even if later writes
    made a second folder at the same path.
    """
    out = attempt.out
    if not os.path.samestat(out.stat(), os.fstat(attempt.held)):
        raise FileNotFoundError(errno.ENOENT, "the folder of this attempt was removed", str(out))
    for path in out.rglob("*"):
        if path.is_dir():
            fsync_dir(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _write(out / "seconds.json", seconds)  # a separate file, so that equal tasks have an equal done.json
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
    # This need not be atomic, because the rename of the folder is.
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
