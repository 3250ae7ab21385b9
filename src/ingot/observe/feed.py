"""The process that keeps the sinks of a run: `python -m ingot.observe.feed RUN`, started and ended by the supervisor.

Every sink is a process of its own (`sink_process`), which reads the run's event log and remembers how far. So a sink
that is slow, or was away, goes on where it stopped, and nothing has to wait in memory. One that hangs is killed with
all its children; one that ended is started again, after pauses that double, and once more at the end of the run. The
first trouble of a sink is an event and a line, later ones are counted.

The feed prints lines for people on standard output. "end" on standard input lets the sinks read the rest and close.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.events import EventLog
from ingot.machine.processes import die_with_parent
from ingot.observe.sink_process import END, LOOK_SECONDS
from ingot.observe.sink_state import read_sink_state
from ingot.plugins.sink import SinkLimits, split_limits
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run

_OWN_LOOK_SECONDS = 0.25
_START_SECONDS = 120.0  # for the imports of a library, from a file system that many machines read
_PAUSE_SECONDS = 1.0  # before the second start of a sink; doubled with every further one
_LONGEST_PAUSE_SECONDS = 300.0
_MOST_ANSWER_BYTES = 1 << 16
_NICENESS = 10  # ranks go first

Report = Callable[[str], None]
Record = Callable[..., None]


class SinkKeeper:
    """The process of the sink `name`, started again when it ends. record: writes an event. say: prints a line."""

    def __init__(self, folder: RunFolder, name: str, limits: SinkLimits, record: Record, say: Report):
        self.name, self.limits = name, limits
        self._folder, self._record, self._say = folder, record, say
        self._process: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._alive_at = self._start_at = self._started_at = 0.0
        self._answered = False
        self._pause = _PAUSE_SECONDS
        self._starts = 0
        self._had_trouble = self._reported = self._closed = self._whole = False
        self._words = ""
        self._before = read_sink_state(folder.sinks / f"{name}.json")
        self._end_by: float | None = None

    def look(self, now: float) -> None:
        """Take in what the process answered; start it, or kill it, if that is due. now: of time.monotonic()."""
        process = self._process
        if process is None:
            if self._end_by is None and now >= self._start_at:
                self._start(now)
            return
        ended = process.poll() is not None
        for answer in self._answers():
            self._alive_at, self._answered = now, True
            self._take(answer)
        if ended:
            self._ended(now, process.returncode)
        elif self._end_by is not None and now >= self._end_by:
            self._trouble("hung", f"did not close in {self.limits.close_seconds:g} s at the end of the run")
            self._kill()
        elif self._end_by is None and now >= self._hung_at():  # while it closes, it gives no sign of life
            self._trouble("hung", f"a call took longer than {self.limits.timeout_seconds:g} s; started again")
            self._kill()
            self._wait(now)

    def _hung_at(self) -> float:
        most = self.limits.timeout_seconds + 2 * LOOK_SECONDS  # it answers at each look
        return self._alive_at + (most if self._answered else max(most, _START_SECONDS))

    def end(self, now: float) -> None:
        """Ask the process to read the rest and close, in the time that its limits give."""
        self._end_by = now + self.limits.close_seconds
        if self._process is None and not self._closed:  # it waits for its next start, or for the first
            self._start(now)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(END)
                self._process.stdin.flush()

    @property
    def runs(self) -> bool:
        return self._process is not None

    def conclude(self) -> None:
        """Record what was sent, if there was trouble."""
        if self._had_trouble:
            now, before = read_sink_state(self._folder.sinks / f"{self.name}.json"), self._before
            facts = {"sent": now.sent - before.sent, "left_out": now.left_out - before.left_out}
            self._record(events.SINK_CLOSED, sink=self.name, **facts, starts=self._starts, finished=self._whole)

    def _start(self, now: float) -> None:
        self._starts += 1
        self._alive_at = self._started_at = now
        self._answered, self._partial, self._words = False, b"", ""
        log = self._folder.logs / f"sink-{self.name}.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ingot.observe.sink_process", str(self._folder.root), self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # so that what it starts can be killed with it
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _answers(self) -> Iterator[Mapping[str, Any]]:
        assert self._process is not None and self._process.stdout is not None
        while data := _read(self._process.stdout.fileno()):
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # of a library that writes to the descriptor itself
                    if isinstance(answer := json.loads(line), dict):
                        yield answer

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "raised" in answer:
            self._trouble("raised", answer["raised"])
        elif "refused" in answer:
            self._words = answer["refused"]
        elif "closed" in answer:
            self._closed, self._whole = True, bool(answer.get("whole"))

    def _ended(self, now: float, code: int) -> None:
        self._kill()
        if self._closed:
            return
        if self._words:
            self._trouble("refused", self._words)
        else:
            how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
            self._trouble("ended", f"its process {how}")
        self._wait(now)

    def _wait(self, now: float) -> None:
        if now > self._started_at + _LONGEST_PAUSE_SECONDS:  # it was well in between
            self._pause = _PAUSE_SECONDS
        self._start_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _trouble(self, reason: str, words: str) -> None:
        self._had_trouble = True
        if not self._reported:
            self._reported = True
            left_out = read_sink_state(self._folder.sinks / f"{self.name}.json").left_out - self._before.left_out
            self._record(events.SINK_FAILED, sink=self.name, reason=reason, words=words, left_out=left_out)
            self._say(f"sink      {self.name} {reason}: {words}; training goes on (logs/sink-{self.name}.log)")

    def _kill(self) -> None:
        """Kill the process and what it started, and forget it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be inside of a mount that does not answer
            process.wait(1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _MOST_ANSWER_BYTES)
    except BlockingIOError:
        return b""


def keep_sinks(sinks: list[SinkKeeper], requests: int) -> None:
    """Keep the processes of `sinks` until "end" can be read from the descriptor `requests`, then until they closed, or
    their time is over. Without "end" before it is closed: the supervisor is gone, and nothing is awaited."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while not selector.select(_OWN_LOOK_SECONDS):
            for sink in sinks:
                sink.look(time.monotonic())
    if os.read(requests, len(END)) != END:
        os._exit(1)  # the sinks end with this process
    for sink in sinks:
        sink.end(time.monotonic())
    while any(sink.runs for sink in sinks):
        for sink in sinks:
            sink.look(time.monotonic())
        time.sleep(_OWN_LOOK_SECONDS / 5)
    for sink in sinks:
        sink.conclude()


def main(root: str) -> None:
    """Keep the sinks of the run in folder `root`."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may signal all processes of a job: the supervisor decides
    os.nice(_NICENESS)
    folder = RunFolder(Path(root))
    folder.sinks.mkdir(exist_ok=True)
    folder.logs.mkdir(exist_ok=True)

    def record(kind: str, **facts: Any) -> None:
        with contextlib.suppress(Exception), EventLog(folder.events) as log:  # of a full disk, too
            log.write(kind, **facts)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, flush=True)

    tables = recorded_run(folder.config).sinks
    limits = {name: SinkLimits(**split_limits(table)[0]) for name, table in tables.items()}
    keep_sinks([SinkKeeper(folder, name, own, record, say) for name, own in limits.items()], sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
