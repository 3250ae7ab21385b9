"""The lock of a run folder: two runs in one folder would overwrite each other's checkpoints.

The kernel holds the lock (flock) and releases it however its owner ends; a crash leaves nothing to clean up. A forked
child would share the lock and keep it when its parent is gone, so every child closes its copy of the descriptor.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from ingot.errors import ResourceError, RunBusyError
from ingot.units import format_seconds

BUSY = "E-RUN-BUSY"
_open: "set[RunLock]" = set()  # the locks of this process


class RunLock:
    """The lock of a run folder, held from construction until `release`, or the end of a with block or of the process.

    A forked child does not hold it: there `release` has no effect.
    Raises RunBusyError with host, process id and age of the owner if another process holds the lock.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ResourceError(
                "E-RUN-LOCK",
                f"cannot open the lock {path} ({error.strerror})",
                rule="only the process that holds the lock writes to a run folder",
                fix="make the run folder writable, or train into another folder (--out DIR)",
                path=str(path),
            ) from None
        _open.add(self)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _describe(os.pread(self._fd, 4096, 0))
            self._close()
            raise RunBusyError(
                BUSY,
                f"{path.parent} is in use by {owner}",
                rule="only one run at a time writes to a run folder",
                fix=f"stop that run first (see ingot status {path.parent}), or train into another folder (--out DIR)",
                run=str(path.parent),
                owner=owner,
            ) from None
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(facts).encode(), 0)

    def release(self) -> None:
        """Release the lock; a second call has no effect."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the file system may be gone, and the lock with it
                os.ftruncate(self._fd, 0)
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # to close is not enough while a copy of the descriptor is open
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1
        _open.discard(self)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_) -> None:
        self.release()


def _close_in_child() -> None:
    """Close the descriptors that a forked child has from its parent. The parent keeps its locks."""
    for lock in list(_open):
        lock._close()


os.register_at_fork(after_in_child=_close_in_child)


def is_holder(path: Path) -> bool:
    """Return whether this process holds the lock `path`."""
    return any(lock.path == path for lock in list(_open))


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _describe(text: bytes) -> str:
    try:
        facts = json.loads(text)
        age = format_seconds(max(time.time() - facts["started"], 0))
        return f"{facts['host']}:{facts['pid']} (started {age} ago)"
    except (ValueError, KeyError, TypeError):
        return "another process (which has only just started)"
