"""The pace at which files move to a store and back. No torch."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

_FILES_AT_ONCE = 2


class StoppedError(Exception):
    """The transfer of a file was stopped, because that of another one failed or the command was interrupted."""


class Pace:
    """A limit on the bytes per second that several threads move together, and their end. 0: no limit."""

    def __init__(self, bytes_per_second: int):
        self._rate, self._lock, self._free_at = bytes_per_second, threading.Lock(), 0.0
        self._stopped = threading.Event()

    @contextlib.contextmanager
    def workers(self) -> Iterator[ThreadPoolExecutor]:
        """Yield the pool that moves files. If the block ends with an error, also by Ctrl-C, files that wait are not
        begun, and those under way end at their next chunk."""
        try:
            with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
                try:
                    yield pool
                except BaseException:
                    self._stopped.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            self._stopped.clear()

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may move. Raises StoppedError after an error of another file."""
        if self._stopped.is_set():
            raise StoppedError
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + size / self._rate
        if self._stopped.wait(start - now):
            raise StoppedError
