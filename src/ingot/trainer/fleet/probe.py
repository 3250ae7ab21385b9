"""The process that measures this machine for a check. It may hang or crash, and its parent waits for nothing.

No torch here: see fleet/measure.py for the process itself.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ingot.machine.processes import signals_blocked
from ingot.trainer.resilience.stop_requests import STOP_SIGNALS

FAILED = "failed"  # the field of an answer that says why there are no measurements
_END_SECONDS = 5.0  # after SIGKILL; a process that hangs in a driver is left to the kernel


def probe_command(folder: Path, seconds: float) -> list[str]:
    """Return the command that measures a machine, each of its measurements for some seconds."""
    return [sys.executable, "-P", "-m", "ingot.trainer.fleet.measure", str(folder), str(seconds)]


class Probe:
    """The process that runs `command`, from the first request on; a context manager that ends it.

    After a request that it did not answer, the next one goes to a new process. One that cannot be started is an answer
    without measurements. errors: a file for its standard error; None: that of this process.
    """

    def __init__(self, command: Sequence[str], errors: IO[bytes] | None = None):
        self._command, self._errors = command, errors
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked, self._unread = False, b""
        self._failure = ""  # of the start for the newest request

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request (fleet/measure.py)."""
        if self._process is None or self._is_asked:
            self.close()
            try:
                self._process = self._start()
            except OSError as error:  # no process or memory is left, or no program is there
                self._failure = f"its measurement did not start: {error}"
                return
        self._is_asked = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` sees that the process is gone
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Return the answer to the request, None until it is there. One with the field FAILED says in words why there
        are no measurements."""
        if failure := self._failure:
            self._failure = ""
            return {FAILED: failure}
        if not self._is_asked or self._process is None:
            return None
        line, found, rest = self._read().partition(b"\n")
        if found:
            self._is_asked, self._unread = False, rest
            return json.loads(line)
        if self._process.poll() is None:
            return None
        code = self._process.returncode
        self.close()
        ended = f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"
        return {FAILED: f"its measurement {ended}"}

    def wait(self, seconds: float) -> None:
        """Wait until an answer may be there, at most so long."""
        select.select([self] if self._process else [], [], [], seconds)

    def fileno(self) -> int:
        """The file descriptor that can be read when an answer is there; -1 before the first request."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else -1

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._is_asked, self._unread, self._failure = False, b"", ""
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # A scheduler signals every process of a job, and Ctrl-C those of a terminal: a measurement that such a signal
        # ends would look like one of a broken machine. The process ends with this one, and with `close`.
        with signals_blocked(STOP_SIGNALS):
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.fileno(), 1 << 16):
                self._unread += part
        return self._unread


class OwnMachine:
    """This machine as a member of a check (fleet/rounds.py). host: its address for the others."""

    def __init__(self, name: str, host: str, probe: Probe):
        self.name, self.host, self._probe = name, host, probe

    def ask(self, request: dict[str, Any]) -> None:
        self._probe.ask(request)

    def answer(self) -> dict[str, Any] | None:
        return self._probe.answer()
