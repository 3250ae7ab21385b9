"""Stop signals to a process that has to save before it ends: the supervisor, or a rank without one. No torch."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import is_saving
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS, StopRequests


class Interrupts:
    """Decides, after a first signal, when Ctrl-C ends the process without another save.

    Only SIGINT counts: a scheduler sends SIGTERM after its own warning, and a launcher after the terminal's SIGINT, and
    SIGKILL when its patience ends. A second signal that is Ctrl-C waits for a checkpoint that is being written, a third
    one does not.
    """

    def __init__(self, folder: RunFolder):
        self._folder, self._asked, self._waits, self._count = folder, False, False, 0

    def take(self, number: int) -> str | None:
        """Take in a signal. Returns the line for people; None after the first signal, which is a request to stop."""
        if not self._asked:
            self._asked = True
            return None
        if number != signal.SIGINT:
            return f"still stopping ({signal.Signals(number).name})"
        self._count += 1
        if self._count == 1:
            self._waits = is_saving(self._folder)
            if self._waits:
                return "stopping when the checkpoint is written that has been begun; a third Ctrl-C stops now"
        return "stopping now, without another save"

    @property
    def waits(self) -> bool:
        """True if Ctrl-C came while a checkpoint was being written, and did not come again."""
        return self._waits and self._count == 1

    @property
    def ends_now(self) -> bool:
        """True if the process has to end without another save."""
        return self._count > (1 if self._waits else 0)


@contextlib.contextmanager
def handlers(act: Callable[[signal.Signals], None], *, ctrl_c: bool = True) -> Iterator[None]:
    """Call `act` for each stop signal. Signals that the program ignores (nohup) stay ignored, and handlers that are not
    of Python stay. Outside of the main thread, and for Ctrl-C without `ctrl_c`, signals do what they did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in STOP_SIGNALS if ctrl_c or number != signal.SIGINT]
    before = {number: signal.getsignal(number) for number in wanted}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, lambda received, _: act(signal.Signals(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


class PendingSignals:
    """The stop signals on which nothing has acted yet, of a process that leads, follows and waits by turns.

    A context manager. From `catch` to its end, a signal for which no part of the work has a handler is appended to
    `received`, and ends nothing: the next part acts on it.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._handlers = contextlib.ExitStack()
        self._catches = False

    def __enter__(self) -> "PendingSignals":
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def catch(self) -> None:
        """Begin to take in signals; a second call has no effect."""
        if not self._catches:
            self._catches = True
            self._handlers.enter_context(handlers(self.received.append))


@contextlib.contextmanager
def signals_ask(folder: RunFolder, launch: Launch, say: Callable[[str], None]) -> Iterator[StopRequests]:
    """Turn stop signals to this process, and launch.stop_after, into a request: for a rank without a supervisor.

    The time counts from now, or from the start of the torchrun that started this process. A second Ctrl-C raises
    KeyboardInterrupt (see Interrupts). In a notebook, the first one does: there it ends a cell and not a run.
    """
    requests, interrupts = StopRequests(folder.stop_request, launch, _launched()), Interrupts(folder)

    def act(number: signal.Signals) -> None:
        line = interrupts.take(number)
        if interrupts.ends_now:
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError, OSError):  # the signal may have come within another print
            say(line or requests.ask(number.name).line(is_ending=requests.is_ending))

    with handlers(act, ctrl_c="ipykernel" not in sys.modules):
        yield requests


def _launched() -> float:
    """Return when the launcher of this process began, in seconds of time.monotonic(): torchrun, or now without it.

    torchrun restarts its ranks, and the time of all attempts counts.
    """
    now = time.monotonic()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return now
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, since the machine was booted
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, IndexError, ValueError):
        return now
