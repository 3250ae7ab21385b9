"""The processes that observe a run, kept by its launcher: they read the run folder, and cost the ranks nothing.

One that ends is started again, after pauses up to 5 minutes. At the end of the run all of them get time at once. A
launcher that is killed closes their standard input, by which they learn that the run has ended.
"""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ingot.errors import RunBusyError
from ingot.plugins.sink import SinkLimits, split_limits
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.stopping import report

_END = b"end\n"
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 300.0
_ALERTS_END_SECONDS = 15.0  # that the last alerts of a run may take
_MORE_SECONDS = 3.0  # that the feed gets for its own end, after those of its sinks
_INTERRUPTED_SECONDS = 3.0  # that all of them get after a second Ctrl-C
_KILLED_SECONDS = 3.0  # one that is killed may be inside of a mount that does not answer
_LOCK_SECONDS = 1.0  # a start may be inside of one, too
_LOOK_SECONDS = 0.05

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Observer:
    """A process that observes a run. name: for people, and of its log. arguments: of Python. end_seconds: how long the
    end of the run waits for it. output: as of subprocess.Popen; with PIPE, its lines are those of the launcher."""

    name: str
    arguments: tuple[str, ...]
    end_seconds: float
    output: int | None = subprocess.PIPE


def observers_of(folder: RunFolder, config: RunConfig, *, quiet: bool) -> list[Observer]:
    """Return the observers that a run file asks for, by their modules' names: the trainer imports nothing that
    observes. quiet: alerts are not shown on the terminal."""
    found = []
    if config.sinks:
        seconds = max(SinkLimits(**split_limits(table)[0]).close_seconds for table in config.sinks.values())
        feed = ("-P", "-m", "ingot.observe.feed", str(folder.root.absolute()))
        found.append(Observer(name="sinks", arguments=feed, end_seconds=seconds + _MORE_SECONDS))
    if config.alerts.has_channel:
        alerts = ("-P", "-m", "ingot.observe.alerts", "--supervised", str(folder.root))
        output = subprocess.DEVNULL if quiet else None  # which it has also after the launcher is gone
        found.append(Observer(name="alerts", arguments=alerts, end_seconds=_ALERTS_END_SECONDS, output=output))
    return found


@contextlib.contextmanager
def observing(
    folder: RunFolder, observers: Sequence[Observer], signals: PendingSignals, say: Say
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Observe a run while the block runs; afterwards the observers get time for the rest, all at once. The folder has
    its run file. say: called with each line for people, also in threads.

    Yields a function that takes what else has to end then: each is called in a thread of its own, and gets the same
    time. After the block, stop signals only wait for their turn, and Ctrl-C ends the waits. A block that ends because
    the run is another launcher's leaves its observers no time, one that ends by an interrupt little.
    """
    keepers = [ObserverKeeper(one, folder, say) for one in observers]
    ends: list[Callable[[], None]] = []
    seconds = max((one.end_seconds for one in observers), default=0.0)
    try:
        yield ends.append
    except RunBusyError:
        seconds = 0.0  # the next leader waits for this one, and its observers go on where these stopped
        raise
    except KeyboardInterrupt:
        seconds = min(seconds, _INTERRUPTED_SECONDS)
        raise
    finally:
        signals.catch()  # a second signal does not leave processes that nobody ends
        _end(keepers, ends, seconds, signals)


def _end(
    keepers: Sequence["ObserverKeeper"], ends: Sequence[Callable[[], None]], seconds: float, signals: PendingSignals
) -> None:
    others = [threading.Thread(target=end, name="ingot-end", daemon=True) for end in ends]
    for thread in others:
        thread.start()
    for keeper in keepers:
        keeper.end() if seconds else keeper.kill()
    threads = [*others, *(keeper.thread for keeper in keepers)]
    before = signals.received.count(signal.SIGINT)
    _join(threads, seconds, lambda: signals.received.count(signal.SIGINT) > before)
    for keeper in keepers:
        keeper.kill()
    _join(threads, _KILLED_SECONDS, lambda: False)


def _join(threads: Sequence[threading.Thread], seconds: float, is_over: Callable[[], bool]) -> None:
    """Wait until all threads have ended, at most `seconds`, or until `is_over()`."""
    until = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < until and not is_over():
            thread.join(_LOOK_SECONDS)


class ObserverKeeper:
    """The process of an observer, kept by a thread that lives as long: the kernel ends a feed with that thread."""

    def __init__(self, observer: Observer, folder: RunFolder, say: Say):
        self._observer, self._folder, self._say = observer, folder, say
        self._ends, self._killed, self._asked = threading.Event(), False, False
        self._process: subprocess.Popen[bytes] | None = None
        self._reported = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"ingot-{observer.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Let the process read the rest, and end. One that waits for its next start is started for that."""
        self._ends.set()
        if self._lock.acquire(timeout=_LOCK_SECONDS):
            if self._process is not None and self._process.poll() is None:
                self._ask()
            self._lock.release()

    def kill(self) -> None:
        """End the process at once; it is not started again."""
        self._killed = True
        self._ends.set()
        if self._lock.acquire(timeout=_LOCK_SECONDS):
            if self._process is not None:
                self._process.kill()
            self._lock.release()

    def _ask(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._asked = True
        with contextlib.suppress(OSError):
            self._process.stdin.write(_END)
            self._process.stdin.close()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            trouble = self._serve()
            if not trouble:
                return
            if time.monotonic() > began + _LONGEST_PAUSE_SECONDS:
                pause, self._reported = _FIRST_PAUSE_SECONDS, False
            if not self._reported and not self._ends.is_set():
                self._reported = True
                name = self._observer.name
                report(
                    self._say,
                    f"{name:<9} their process {trouble}; it is started again in {pause:g} s (logs/{name}.log)",
                )
            self._ends.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _serve(self) -> str:
        """Start the process, and pass on its lines until it ends. Returns how it ended if it has to be started again,
        otherwise ""."""
        with self._lock:
            if self._killed:
                return ""
            is_last = self._ends.is_set()
            try:
                process = self._process = self._start()
            except OSError as error:
                return "" if is_last else f"cannot be started ({error.strerror})"
            if is_last:
                self._ask()
        for line in process.stdout or ():
            report(self._say, line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
        with self._lock, contextlib.suppress(OSError):
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if is_last or self._asked or self._killed:
            return ""
        return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder.logs.mkdir(exist_ok=True)
        with (self._folder.logs / f"{self._observer.name}.log").open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, *self._observer.arguments],
                stdin=subprocess.PIPE,
                stdout=self._observer.output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in a terminal is for the launcher, which lets the ranks save
            )
