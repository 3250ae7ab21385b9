"""Jobs of `ingot train` as a drill has them: started, found, signaled and ended from outside. No torch.

Every process of a job has the run folder in its environment. A job ends with the process that started it, also if that
one is killed: the kernel then kills the launcher, the fork server, and the ranks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ingot.events import read_events
from ingot.machine.processes import die_with_parent, parent_of
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE

RUN_VARIABLE = "INGOT_DRILL_RUN"  # in the environment of all processes of a job: its run folder
DEADLINE_SECONDS = 120.0
END_SECONDS = 5.0  # for processes of a job that has ended
_WRITER = b"ingot.trainer.checkpoint.writer"
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """The end of a process. code: its exit code, negative for a signal. seconds: from its start, or from the signal."""

    code: int
    output: str
    seconds: float = 0.0


@dataclass(frozen=True)
class TrainingJob:
    """`ingot train` of one run file into one run folder, as a process that can be started again and again.

    run: the folder, absolute. temporary: the folder for temporary files of its processes. options: of the command.
    variables: more of its environment.
    """

    run_file: Path
    run: RunFolder
    temporary: Path
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that the processes of this job have besides the caller's."""
        self.temporary.mkdir(exist_ok=True)
        return {"TMPDIR": str(self.temporary), RUN_VARIABLE: str(self.run.root), **(self.variables or {})}

    def command(self) -> list[str]:
        """Return the command that trains."""
        program = [sys.executable, "-P", "-m", "ingot.cli.main", "train", str(self.run_file)]
        return [*program, "--out", str(self.run.root), *self.options]

    def start(self, output: IO | int = subprocess.PIPE) -> subprocess.Popen:
        """Start the command. It ends with this process; Ctrl-C in the terminal does not reach it. output: for what it
        prints."""
        parent = os.getpid()

        def end_with_parent() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a script, started with &, ignores it
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # it died before that took effect

        return subprocess.Popen(
            self.command(),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=os.environ | self.environment(),
        )

    def processes(self) -> list[int]:
        """Return the living processes of this job."""
        return marked_processes(self.run.root)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that was started last and lives."""
        alive = set(self.processes())
        newest = {event["rank"]: event["pid"] for event in read_events(self.run.events, events.RANK_STARTED)}
        return {rank: pid for rank, pid in newest.items() if pid in alive}

    def writers(self) -> list[int]:
        """Return the living processes that write checkpoints."""
        return [pid for pid in self.processes() if _WRITER in _read(f"/proc/{pid}/cmdline")]

    def started_by(self, launcher: int) -> list[int]:
        """Return the living processes of this job that a launcher has started."""
        started = set(processes_with(SUPERVISOR_VARIABLE, launcher))
        return [pid for pid in self.processes() if pid in started]

    def fork_server(self, launcher: int) -> int | None:
        """Return the process from which the launcher's ranks are forked."""
        return next((pid for pid in self.processes() if parent_of(pid) == launcher), None)

    def kill(self, *launchers: subprocess.Popen) -> None:
        """Kill all processes of the job at once, and wait until they are gone."""
        for launcher in launchers:
            launcher.kill()
        send(signal.SIGKILL, self.processes())  # the kernel has ended most of them with their launchers
        for launcher in launchers:
            launcher.wait()
        gone_within(END_SECONDS, self.processes)


def ended(process: subprocess.Popen, deadline: float = DEADLINE_SECONDS) -> Ended:
    """Wait for the end of a process. Kills it and its group, which shows in its code, after `deadline` seconds."""
    began = time.monotonic()
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return Ended(process.returncode, output, time.monotonic() - began)


def marked_processes(run: Path) -> list[int]:
    """Return the living processes that were started for the run folder `run`, with all that they started."""
    return processes_with(RUN_VARIABLE, run)


def processes_of(place: Path) -> list[int]:
    """Return the living processes of all jobs whose run folder is `place` or below it: those that are marked, and those
    whose output goes to a file there or beside it, which have perhaps another environment (keepers of snapshots do)."""
    return [pid for pid in _all_processes() if any(_is_at(path, place) for path in _places_of(pid))]


def _places_of(pid: int) -> Iterator[str]:
    """Return the run folder of a process by its mark, and the files of its standard output and error."""
    mark = f"{RUN_VARIABLE}=".encode()
    for variable in _read(f"/proc/{pid}/environ").split(b"\0"):
        if variable.startswith(mark):
            yield os.fsdecode(variable.removeprefix(mark))
    for descriptor in (1, 2):
        with suppress(OSError):
            yield str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())


def _is_at(path: str, place: Path) -> bool:
    """Return whether a path is that of `place`, below it, or, with a suffix, beside it."""
    return path == str(place) or path.startswith((f"{place}/", f"{place}."))


def processes_with(variable: str, value: Path | int) -> list[int]:
    """Return the living processes with this variable in their environment."""
    mark = f"{variable}={value}\0".encode()
    return [pid for pid in _all_processes() if mark in _read(f"/proc/{pid}/environ")]


def _all_processes() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())


def send(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to processes, except to those that have just ended."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def gone_within(seconds: float, alive: Callable[[], list[int]]) -> list[int]:
    """Wait until `alive()` is empty, at most `seconds`. Returns the processes that are left."""
    deadline = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _read(path: str) -> bytes:
    with suppress(OSError):
        return Path(path).read_bytes()
    return b""
