"""A Job on this machine: torchrun starts the ranks, and no process of the job outlives this process.

torchrun puts every rank into a session of its own, so a signal to a process group does not reach the ranks. Each
process of a job therefore has the job's id in its environment, by which all are found and killed. If this process is
killed by SIGKILL, the kernel kills torchrun, and then the ranks (resilience/endings.py).
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ingot.errors import ResourceError
from ingot.schema.run_folder import Job
from ingot.trainer.resilience.endings import SUPERVISOR_VARIABLE, die_with_parent

JOB_VARIABLE = "INGOT_JOB"
ATTEMPT_VARIABLE = "INGOT_ATTEMPT"
_KILL_SECONDS = 15.0
# torchrun's summary of a failed job: "rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 4121)"
_EXIT = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*(-?\d+) ", re.M)


def torchrun_command(job: Job) -> list[str]:
    """Return torchrun's command line: one node, a rendezvous on a free loopback port, no restarts by torchrun."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={job.processes}",
        "--max-restarts=0",
        "-m",
        job.module,
        *job.arguments,
    ]


class LocalJob:
    """The running processes of one attempt. Their standard error goes to `log`."""

    def __init__(self, job: Job, *, attempt: int, log: Path, stdout: IO | int | None = None):
        self.id = uuid.uuid4().hex
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        marks = {JOB_VARIABLE: self.id, SUPERVISOR_VARIABLE: str(os.getpid()), ATTEMPT_VARIABLE: str(attempt)}
        # The user's environment takes precedence over ingot's defaults.
        env = job.env | dict(os.environ) | marks
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                torchrun_command(job),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=errors,
                start_new_session=True,  # Ctrl-C goes to the supervisor only, which asks the ranks to save first
                preexec_fn=die_with_parent,
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code; None while torchrun runs."""
        return self._process.poll()

    def processes(self) -> list[int]:
        """Return the ids of all living processes of the job, including torchrun."""
        mark = f"{JOB_VARIABLE}={self.id}".encode()
        return [pid for pid in _own_processes() if mark in _environment(pid)]

    def kill(self) -> None:
        """Kill all processes and wait until they are gone. Raises ResourceError if the kernel cannot end them."""
        deadline = time.monotonic() + _KILL_SECONDS
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
            if time.monotonic() > deadline:
                raise ResourceError(
                    "E-JOB-UNKILLABLE",
                    f"processes {left} of the job do not end after SIGKILL",
                    rule=f"a killed process is gone within {_KILL_SECONDS:.0f} s",
                    fix="see dmesg: they hang in the kernel (a dead disk or network mount, or a GPU driver)",
                    processes=left,
                )
            time.sleep(0.02)
        self._process.wait(timeout=_KILL_SECONDS)

    def last_words(self) -> str:
        """Return the last line of the log; if the log is empty, how torchrun itself ended ("" while it runs)."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), self._ended())

    def _ended(self) -> str:
        code = self._process.poll()
        if code is None:
            return ""
        return f"torchrun was killed (signal {-code})" if code < 0 else f"torchrun exited with code {code}"

    def exit_codes(self) -> dict[int, int]:
        """Return rank -> exit code from torchrun's summary; negative numbers are signals. Empty without a summary."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return {int(rank): int(code) for rank, code in _EXIT.findall(text)}


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process. exit_code: negative for a signal; None if the parent has already collected it."""

    exit_code: int | None


def end_of(pid: int) -> ProcessEnd | None:
    """Return the end of process `pid`; None while it runs. Its exit code is only known while it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessEnd(None)
    if fields[0] not in "ZX":
        return None
    return ProcessEnd(os.waitstatus_to_exitcode(int(fields[49])))  # field 52 of proc(5): exit_code


def _own_processes() -> list[int]:
    me = os.getuid()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == me:
                    found.append(int(entry.name))
            except FileNotFoundError:
                continue
    return found


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # gone, or not readable
