"""The decisions of a supervisor about requests to stop. No torch."""

import contextlib
import math
import signal
import time
from collections.abc import Callable

from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import is_saving
from ingot.trainer.interrupts import Interrupts
from ingot.trainer.resilience.stop_requests import StopRequest, StopRequests

_ENDING_SECONDS = 1.0  # after its last save, a run that stops reports that


class Stopping:
    """The decisions of the supervisor about requests to stop: when to ask the ranks, and when to kill them."""

    def __init__(self, folder: RunFolder, requests: StopRequests, say: Callable[[str], None]):
        self._folder, self._requests, self._say = folder, requests, say
        self._interrupts = Interrupts(folder)
        self._lines: list[str] = []
        self._counts: dict[str, int] = {}  # machine -> its signals
        self._most = 0
        self._saved_at = math.inf
        self.request: StopRequest | None = None
        self.own: list[signal.Signals] = []  # signals to this machine

    def signal(self, number: signal.Signals, machine: str = "") -> None:
        """Take in a signal to this or another machine. Within a handler, so nothing is written or printed.

        A scheduler, or Ctrl-C in its terminal, signals every machine, which is one request: the machine that got the
        most signals counts.
        """
        if not machine:
            self.own.append(number)
        self._counts[machine] = self._counts.get(machine, 0) + 1
        if self._counts[machine] <= self._most:
            return
        self._most = self._counts[machine]
        line = self._interrupts.take(number)
        if line is None:
            self._requests.ask(number.name)
        else:
            self._lines.append(line)

    def is_over(self, *, is_ending: bool = False) -> bool:
        """Ask the ranks if something asks this process, and return whether to kill them now. is_ending: they have
        saved the last step, and wait for uploads alone."""
        if self.request is None and (found := self._requests.current()):
            self.request = found
            found.write(self._folder.stop_request)
            report(self._say, found.line(is_ending=is_ending))
        while self._lines:
            report(self._say, self._lines.pop(0))
        now = time.monotonic()
        if self.request is not None and now >= self.request.deadline:
            report(self._say, "the time of launch.grace is over: the ranks are killed")
            return True
        if self._interrupts.waits:
            self._saved_at = math.inf if is_saving(self._folder) else min(self._saved_at, now)
            return now >= self._saved_at + _ENDING_SECONDS
        return self._interrupts.ends_now

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the ranks."""
        return self._interrupts.ends_now or self._interrupts.waits


def report(say: Callable[[str], None], text: str) -> None:
    """Print a line, if it can be printed."""
    with contextlib.suppress(OSError):  # the terminal may be gone (SIGHUP); the run continues
        say(text)
