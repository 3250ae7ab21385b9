"""A Job on this machine: a fork server starts the ranks, and no process of the job outlives this process.

Each process of a job has the job's id in its environment, by which all are found and killed. If this process is killed
by SIGKILL, the kernel kills the fork server, and then the ranks (resilience/endings.py).
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from ingot.errors import ResourceError
from ingot.machine.processes import oom_kills, parent_of
from ingot.schema.run_folder import Job
from ingot.trainer.launch.watchdog import STOPPED, state_of
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.mesh.start import NodeShare
from ingot.trainer.resilience.heartbeat import HEARTBEAT_VARIABLE, Heartbeats
from ingot.trainer.resilience.leaving import LEAVE_SIGNAL
from ingot.trainer.resilience.start_times import FIRST, Ordered

JOB_VARIABLE = "INGOT_JOB"
UNKILLABLE = "E-JOB-UNKILLABLE"
_KILL_SECONDS = 60.0  # a driver may take long to release the memory of a GPU
# The time in which the fork server has to report the exit codes of ranks that were killed; it is replaced otherwise.
_REPORT_SECONDS = 10.0
_STOPPED_SECONDS = 1.0  # a fork server that is stopped (SIGSTOP) for longer, while it has ranks to start, is killed
# The time in which a rank that lost its peers has to leave them. One that has not noticed the loss is asked to.
LEAVE_SECONDS, _NOTICE_SECONDS = 5.0, 0.3
_POLL_SECONDS = 0.02
_LOG_BYTES = 1 << 20


class LocalJob:
    """The processes of `job`: a fork server, and the ranks of the current attempt.

    job: with the processes of this machine. stdout: where ranks print, as in subprocess.Popen. partial: a rank that
    loses its peers leaves them and waits for the next attempt (resilience/again.py); it counts as ended with code 1.
    `prepared`: the imports that `prepare` ordered are done. The methods after `start` are about the newest attempt:
    `exit_codes` has rank -> exit code (negative: signal number) of the ranks that have ended, `ended_at` rank -> when
    [s of time.monotonic()], `left` rank -> process id of those that wait, `log` is the file with their standard error,
    and `port` that of the store of the ranks, if rank 0 is here.
    """

    def __init__(self, job: Job, *, stdout: IO | int | None = None, partial: bool = False):
        self.job, self.id, self.stdout, self._partial = job, uuid.uuid4().hex, stdout, partial
        self.port, self.prepared = 0, False
        self.exit_codes: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.heartbeats = Heartbeats(job.processes)
        self.log = Path(os.devnull)
        self._server: subprocess.Popen | None = None
        self._orders, self._reports, self._unread = -1, -1, b""
        self._idle, self._begun = True, False
        self._oom_kills = 0
        self._attempt, self._first, self._ran_at = -1, 0, time.monotonic()
        self._ordered: int | None = None  # the attempt whose order the fork server has confirmed

    def prepare(self, log: Path) -> None:
        """Start the fork server and its imports, so that `start` takes no time. What they report goes to `log`."""
        self._begin(log)
        if self._server is None or self._server.poll() is not None:
            self._start_server()
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps({"log": str(log)}).encode() + b"\n")
        self._idle = True

    def start(
        self,
        *,
        attempt: int,
        log: Path,
        share: NodeShare | None = None,
        before: Ordered = FIRST,
        overrides: Sequence[str] = (),
    ) -> None:
        """Start all ranks. Their standard error goes to `log`. The last attempt must have ended; `before` says how long
        that took. share: the part of this machine in a job of several; None if there is no other. overrides: the
        settings in which this attempt differs from the run file, as KEY=VALUE."""
        self._attempt, self._first = attempt, share.first if share else 0
        start = replace(before, ordered_at=time.monotonic()).to_text()
        self._begin(log)
        order = {"attempt": attempt, "log": str(log), "start": start, "partial": self._partial}
        order |= {"overrides": list(overrides)}
        order |= {"share": asdict(share)} if share else {}
        if self._server is None or self._server.poll() is not None or not self._order(order):
            if self._server is not None:
                self.kill()
            self._start_server()
            self._order(order)  # a server that dies at once is a failed attempt: `running` sees it

    def _begin(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        self.log, self.exit_codes, self.ended_at, self.left, self._idle = log, {}, {}, {}, False
        self.heartbeats.begin()
        self._begun = False
        self._oom_kills = oom_kills()

    def _order(self, order: dict[str, Any]) -> bool:
        """Order an attempt. Returns False if the fork server is gone: a process that was just killed may look alive."""
        assert self._server is not None
        self._ordered = None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        while self.running() and self._ordered != order["attempt"]:
            self.wait(_POLL_SECONDS)
        return self._ordered == order["attempt"]

    def _start_server(self) -> None:
        self._close_pipes()
        theirs, self._orders = os.pipe()
        self._reports, reports = os.pipe()
        os.set_blocking(self._reports, False)
        self._unread = b""
        beats = self.heartbeats.fd
        marks = {JOB_VARIABLE: self.id, SUPERVISOR_VARIABLE: str(os.getpid()), HEARTBEAT_VARIABLE: str(beats)}
        job = self.job
        command = [sys.executable, "-P", "-m", "ingot.trainer.launch.fork_server", str(theirs), str(reports)]
        with self.log.open("ab") as errors:
            self._server = subprocess.Popen(
                [*command, str(job.processes), ",".join(job.preload), job.module, *job.arguments],
                env=job.env | dict(os.environ) | marks,  # the user's environment takes precedence over ingot's defaults
                stdin=subprocess.DEVNULL,
                stdout=self.stdout,
                stderr=errors,
                pass_fds=(theirs, reports, beats),
                start_new_session=True,  # Ctrl-C goes to the supervisor only, which asks the ranks to save first
            )
        os.close(theirs)
        os.close(reports)

    def running(self) -> bool:
        """Read the reports of the fork server. Returns False if every rank has ended, or the fork server itself."""
        assert self._server is not None, "start was not called"
        self._end_stopped_server(self._server.pid)
        alive = self._server.poll() is None  # before reading: the reports of a server that has ended are complete
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reports, 65536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for report in map(json.loads, lines):
            if "rank" in report:
                if report["of"] == self._attempt:  # otherwise it had left an earlier one, and was killed as it waited
                    self._take_end(report["rank"], report["code"], report["at"], report["left"])
            elif "prepared" in report:
                self.prepared = True
            elif "ordered" in report:
                self._ordered, self.port = report["ordered"], report["port"]
            else:
                self._idle = True
        return alive and not self._idle

    def _end_stopped_server(self, server: int) -> None:
        """Kill a fork server that is stopped while it has ranks to start. Later it does no harm: ranks work without it,
        and a job that is stopped as a whole for a moment loses nothing."""
        now = time.monotonic()
        if self._idle or self._all_begun() or state_of(server) not in STOPPED:
            self._ran_at = now
        elif now > self._ran_at + _STOPPED_SECONDS:
            _kill([server])

    def _all_begun(self) -> bool:
        self._begun = self._begun or all(self.heartbeats.read(rank).pid for rank in range(self.job.processes))
        return self._begun

    def _take_end(self, rank: int, code: int, at: float, left: int | None) -> None:
        if left is not None:
            self.left[rank] = left
        elif self.left.pop(rank, None) is not None:
            return  # it had left before it was killed
        self.exit_codes[rank], self.ended_at[rank] = code, at

    @property
    def reports(self) -> int:
        """The file descriptor that can be read when a rank has ended, or the fork server."""
        return self._reports

    def wait(self, seconds: float) -> None:
        """Wait until a rank has ended or the fork server itself has, at most so long."""
        select.select([self._reports], [], [], seconds)

    def processes(self, *, without: Collection[int] = ()) -> list[int]:
        """Return the ids of all living processes of the job, including the fork server, except those in `without`."""
        mark = f"{JOB_VARIABLE}={self.id}".encode()
        return [pid for pid in _own_processes() if pid not in without and mark in _environment(pid)]

    def end_attempt(self, failed: Collection[int] = (), *, keep: bool = False) -> None:
        """Kill all ranks and wait until they are gone. The fork server stays, for the next attempt.

        keep: ranks that leave the others do not end, but wait for the next attempt (`left`). failed: the local ranks
        that will not; they are killed first, so that the others lose them. Raises ResourceError if the kernel cannot
        end them.
        """
        assert self._server is not None, "start was not called"
        if keep:
            _kill(self._training(failed))
            deadline = time.monotonic() + LEAVE_SECONDS
            self._await_end(min(time.monotonic() + _NOTICE_SECONDS, deadline))
            _send(LEAVE_SIGNAL, self._training(range(self.job.processes)))
            self._await_end(deadline)
        deadline = time.monotonic() + _REPORT_SECONDS
        while self.running() or self._others(keep):
            if time.monotonic() > deadline:
                break
            _kill(self._others(keep))
            time.sleep(_POLL_SECONDS)
        if not self._idle or self._others(keep):
            self.kill()
            self.left = {}

    def _await_end(self, deadline: float) -> None:
        while self.running() and time.monotonic() < deadline:
            self.wait(_POLL_SECONDS)

    def _training(self, local_ranks: Collection[int]) -> list[int]:
        """Return the processes of those of `local_ranks` that have begun, and have neither ended nor left."""
        here = [rank for rank in local_ranks if self._first + rank not in self.exit_codes]
        return [beat.pid for rank in here if (beat := self.heartbeats.read(rank)).pid]

    def _others(self, keep: bool) -> list[int]:
        """Return the processes of the job besides the fork server and, with `keep`, the ranks that wait and what they
        started: a compiler's workers belong to a process that is kept."""
        assert self._server is not None
        kept = set(self.left.values()) if keep else set()
        return [pid for pid in self.processes(without=[self._server.pid, *kept]) if not _descends(pid, kept)]

    def kill(self) -> None:
        """Kill all processes and wait until they are gone. Raises ResourceError if the kernel cannot end them."""
        deadline = time.monotonic() + _KILL_SECONDS
        while left := self.processes():
            _kill(left)
            if self._server:
                self._server.poll()
            if time.monotonic() > deadline:
                raise ResourceError(
                    UNKILLABLE,
                    f"processes {left} of the job do not end after SIGKILL",
                    rule=f"a killed process is gone within {_KILL_SECONDS:.0f} s",
                    fix="see dmesg: they hang in the kernel (a dead disk or network mount, or a GPU driver)",
                    processes=left,
                )
            time.sleep(_POLL_SECONDS)
        if self._server:
            self._server.wait(timeout=_KILL_SECONDS)

    def close(self) -> None:
        """Kill all processes of the job and release everything. Raises ResourceError like `kill`."""
        try:
            self.kill()
        finally:
            self._close_pipes()
            self.heartbeats.close()

    def _close_pipes(self) -> None:
        for pipe in (self._orders, self._reports):
            if pipe >= 0:
                os.close(pipe)
        self._orders = self._reports = -1

    @property
    def server_code(self) -> int | None:
        """The exit code of the fork server (negative: signal number); None while it runs."""
        return self._server.poll() if self._server else None

    @property
    def oom_kills(self) -> int:
        """The number of processes that the kernel killed on this machine during the attempt, for lack of memory."""
        return oom_kills() - self._oom_kills

    def last_words(self) -> str:
        """Return the last line of the log; if the log is empty, how the fork server ended ("" while it runs)."""
        lines = self.end_of_log().split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), self._ended())

    def end_of_log(self) -> str:
        """Return the last part of the log, at most _LOG_BYTES."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            return file.read().decode(errors="replace")

    def _ended(self) -> str:
        if (code := self.server_code) is None:
            return ""
        return (
            f"the fork server was killed (signal {-code})" if code < 0 else f"the fork server exited with code {code}"
        )


def _kill(processes: Collection[int]) -> None:
    _send(signal.SIGKILL, processes)


def _send(number: signal.Signals, processes: Collection[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


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


def _descends(pid: int, ancestors: Collection[int]) -> bool:
    while ancestors and pid > 1:
        if pid in ancestors:
            return True
        pid = parent_of(pid)
    return False


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # gone, or not readable
