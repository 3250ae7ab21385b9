"""A progress bar for bytes: how many are done, of how many, and how fast. Shown on terminals only."""

import threading
import time
from collections.abc import Callable

from ingot.cli.terminal import Terminal
from ingot.trainer.checkpoint.meter import Meter
from ingot.units import format_bytes

_REDRAW_SECONDS = 0.1


class ByteBar(Meter):
    """Draws the bytes of a command on `terminal`, at most ten times a second. clock: seconds, for tests."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic):
        self._terminal, self._clock, self._lock = terminal, clock, threading.Lock()
        self.begin("", 0)

    def begin(self, what: str, total: int) -> None:
        with self._lock:
            self._what, self._total, self._done = what, total, 0
            self._began, self._drawn = self._clock(), float("-inf")

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = self._clock()
            if now - self._drawn < _REDRAW_SECONDS or not self._total:
                return
            self._drawn = now
            rate = self._done / max(now - self._began, 1e-3)
            text = f"{self._what}  {format_bytes(self._done)} of {format_bytes(self._total)}  {format_bytes(rate)}/s"
            self._terminal.progress(self._done / self._total, text)
