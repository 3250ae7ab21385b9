"""The event log: the history of a run, append-only, with one JSON object per line.

Status, report and comparisons read a run's history from this log; nothing else records that history.

Every line has `kind` (see schema/events.py) and `time` (Unix seconds). Floats are written by `repr`, so reading a loss
back gives exactly the bits that were computed.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from ingot.errors import ResourceError
from ingot.storage import disk_full, is_full
from ingot.units import counted

_MOST_WAITING = 4 << 20  # bytes of events that wait for room
_FIRST_BLOCK = 64 << 10  # bytes from the end of a log that are read first


class EventLog:
    """A writer that appends events to `path`. Several processes may append to one log: each event is a single write. A
    context manager.

    Events for which a full disk has no room wait in memory, at most `_MOST_WAITING` bytes of them, and are written with
    the next one that finds room, as `late`: a disk that another program fills for a while stops no run. No handler of a
    signal may write to a log that the interrupted thread writes to.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        self._waiting, self._lock = deque[bytes](), threading.Lock()
        self._may_be_torn = True  # a writer may have been killed in the middle of a line, or found no room for its end
        self._put(b"")

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # which another one would hide
            with contextlib.suppress(OSError, ResourceError):
                self.close()

    def write(self, kind: str, **facts) -> None:
        """Append one event, or keep it until the disk has room. Raises ResourceError if too many wait, and OSError."""
        event = {"kind": kind, "time": round(time.time(), 6), **facts}
        if self._waiting or not self._put(_line_of(event)):
            with self._lock:
                self._waiting.append(_line_of(event | {"late": True}))
                if not self._catch_up() and sum(map(len, self._waiting)) > _MOST_WAITING:
                    raise self._full()

    def close(self) -> None:
        """Write what waits, and close the file. Raises ResourceError if there still is no room for it."""
        try:
            self.require_room()
        finally:
            os.close(self._fd)

    def require_room(self) -> None:
        """Write what waits. Raises ResourceError if there is no room for it."""
        with self._lock:
            if not self._catch_up():
                raise self._full()

    def _catch_up(self) -> bool:
        while self._waiting and self._put(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def _put(self, line: bytes) -> bool:
        """Append a line; b"" only ends a torn one. Returns whether the disk had room for all of it."""
        data = b"\n" + line if self._may_be_torn and self._is_torn() else line
        try:
            written = os.write(self._fd, data) if data else 0
            self._may_be_torn = written < len(data)
            if self._may_be_torn:
                os.write(self._fd, b"\n")  # or the next event of any process would be a part of this line
        except OSError as error:
            if not is_full(error) or error.errno == errno.EFBIG:  # a limit of this process stays
                raise
            self._may_be_torn = True
        return not self._may_be_torn

    def _is_torn(self) -> bool:
        size = os.fstat(self._fd).st_size
        return bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"

    def _full(self) -> ResourceError:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return disk_full(self.path, error, f"{counted(len(self._waiting), 'event')} of the log")


def _line_of(event: dict) -> bytes:
    return (json.dumps(event, ensure_ascii=False) + "\n").encode()


def read_events(path: Path, *kinds: str) -> Iterator[dict]:
    """Yield the events of `path` in order; if `kinds` are given, only events of these kinds. Torn lines are skipped."""
    if not path.exists():
        return
    marks = tuple(json.dumps(kind) for kind in kinds)
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if marks and not any(mark in line for mark in marks):  # to parse takes ten times as long
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # also of a number with too many digits
                continue
            if not kinds or (isinstance(event, dict) and event.get("kind") in kinds):
                yield event


def read_events_back(path: Path, *kinds: str) -> Iterator[dict]:
    """Yield the events of `path` of these kinds, the newest first, and read no more of the log than that takes. Torn
    lines are skipped."""
    if not path.exists():
        return
    marks = tuple(json.dumps(kind).encode() for kind in kinds)
    with path.open("rb") as file:
        begin, block, rest = file.seek(0, os.SEEK_END), _FIRST_BLOCK, b""
        while begin:
            end, begin = begin, max(begin - block, 0)
            block *= 2  # or a line that is longer than a block would be copied many times
            file.seek(begin)
            first, *lines = (file.read(end - begin) + rest).split(b"\n")
            rest = first
            for line in reversed(lines if begin else [first, *lines]):
                if any(mark in line for mark in marks):
                    event = _event_of(line)
                    if event is not None and event["kind"] in kinds:
                        yield event


class NewEvents:
    """A reader of a log that grows: each call of `read` returns the events since the last one, whole lines only.

    kinds: if given, only events of these kinds are returned, and others are not parsed. without: kinds that are left
    out, most of whose lines are not parsed. most_bytes: that a call reads; a line that is longer is left out. position:
    the bytes of the log that were read; at first, the beginning of the line to read on from.
    """

    def __init__(
        self,
        path: Path,
        *kinds: str,
        without: Collection[str] = (),
        most_bytes: int = sys.maxsize,
        position: int = 0,
    ):
        self.path, self.position, self._most = path, position, most_bytes
        self._kinds, self._marks = kinds, tuple(json.dumps(kind).encode() for kind in kinds)
        self._without = tuple(b'{"kind": "%b"' % kind.encode() for kind in without)

    def read(self) -> list[dict]:
        """Return the events that were written since the last call, in order. Torn lines are left out."""
        return [event for _, event in self.read_at()]

    def read_at(self) -> list[tuple[int, dict]]:
        """Return the events as `read` does, each with the position after its line."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                added = file.read(self._most) if self._most < sys.maxsize else file.read()
        except FileNotFoundError:
            return []
        lines, found, at = added[: added.rfind(b"\n") + 1], [], self.position
        self.position += len(lines) or (len(added) if len(added) == self._most else 0)
        for line in lines.splitlines(keepends=True):
            at += len(line)
            if line.startswith(self._without) or (self._marks and not any(mark in line for mark in self._marks)):
                continue
            event = _event_of(line)
            if event is not None and (not self._kinds or event["kind"] in self._kinds):
                found.append((at, event))
        return found


def _event_of(line: bytes) -> dict | None:
    """Return the event of a line; None if a killed writer tore it."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "kind" in event else None
