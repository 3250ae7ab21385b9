"""The free space of disks, asked in a thread for each: a mount that does not answer holds that thread, and no alert."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 30.0  # after which a disk counts as one that does not answer
_AGAIN_SECONDS = 60.0  # between two events about it
DISK_EVENT = "disk"  # not of the log of the run: what the process of alerts measured


class DiskLooks:
    """Looks at the disks of these paths, one at a time for each."""

    def __init__(self, paths: Sequence[Path]):
        self._looks = [_Look(path) for path in dict.fromkeys(paths)]

    def ask(self) -> None:
        """Ask all disks that have answered. Does not wait."""
        for look in self._looks:
            look.ask()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield, without waiting, an event for each disk that has answered since the last call, with `free_bytes` and
        `total_bytes`, or with `error`, such as "ENOENT"; and every minute one for each that does not answer, with
        `silent_seconds`. They have no time."""
        for look in self._looks:
            if (found := look.answer()) is not None:
                yield {"kind": DISK_EVENT, "path": str(look.path), **found}


class _Look:
    def __init__(self, path: Path):
        self.path = path
        self._asked_at: float | None = None  # monotonic; None: no look is under way
        self._found: dict[str, Any] | None = None
        self._silent_at = float("-inf")  # of the newest event about that

    def ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            threading.Thread(target=self._run, name="alerts-disk", daemon=True).start()

    def answer(self) -> dict[str, Any] | None:
        found, self._found = self._found, None
        if found is not None:
            self._asked_at = None
            return found
        now = time.monotonic()
        silent = 0.0 if self._asked_at is None else now - self._asked_at
        if silent <= ANSWER_SECONDS or now < self._silent_at + _AGAIN_SECONDS:
            return None
        self._silent_at = now
        return {"silent_seconds": round(silent, 1)}

    def _run(self) -> None:
        try:
            found = os.statvfs(self.path)
        except OSError as error:
            self._found = {
                "error": errno.errorcode.get(error.errno or 0, "OSError"),
                "words": error.strerror or str(error),
            }
            return
        free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        self._found = {"free_bytes": free, "total_bytes": total}
