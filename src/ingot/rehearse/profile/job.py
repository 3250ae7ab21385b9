"""The ranks of a profile: started, watched and ended. No torch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ingot.errors import RunFailed
from ingot.machine.processes import die_with_parent
from ingot.rehearse.profile.copied import ProfiledCopy
from ingot.rehearse.profile.trace import STEP
from ingot.schema.run_folder import RunFolder
from ingot.trainer.launch.train import training_job
from ingot.trainer.mesh.start import outer_environment, rank_variables

_RANK = ("-P", "-m", "ingot.rehearse.profile.rank")
_POLL_SECONDS = 0.1
# A rank prints a line per step. The first step of a compiled model takes minutes, and so may a trace to be written.
SILENT_SECONDS = 1800.0
_WORDS, _LONGEST = 6, 2000  # the lines of a rank's output that an error shows, and their characters


def run_ranks(
    copy: ProfiledCopy,
    show: Callable[[float, str], None],
    *,
    silent_seconds: float = SILENT_SECONDS,
    program: Sequence[str] = _RANK,
) -> None:
    """Start the ranks of a profile and wait for their end.

    show: called with the share of the steps that rank 0 has done, and a text. silent_seconds: how long no rank may
    print anything. program: of a rank, after the interpreter. Raises RunFailed at once if a rank dies, or if all are
    silent; all processes are gone then.
    """
    plan, ranks = copy.plan, copy.config.parallel.world_size
    job = training_job(RunFolder(plan.run), copy.config)
    environment = outer_environment() | {name: os.environ.get(name, value) for name, value in job.env.items()}
    processes: list[subprocess.Popen] = []
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
            for rank in range(ranks):
                with plan.log(rank).open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *program, *plan.words()],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=environment | rank_variables(rank, ranks, listener),
                            pass_fds=[listener.fileno()] if rank == 0 else [],
                            preexec_fn=_end_with_parent(os.getpid()),
                        )
                    )
        _watch(copy, processes, show, silent_seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _end_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and the kernel then its ranks
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it died before that took effect

    return prepare


def _watch(
    copy: ProfiledCopy, processes: Sequence[subprocess.Popen], show: Callable[[float, str], None], silent_seconds: float
) -> None:
    plan, sizes, heard = copy.plan, [0], time.monotonic()
    logs = [plan.log(rank) for rank in range(len(processes))]
    while True:
        codes = [process.poll() for process in processes]
        if died := [rank for rank, code in enumerate(codes) if code]:
            time.sleep(_POLL_SECONDS)  # the others report the lost peer, and are not the cause
            raise _died(died[0], codes[died[0]] or 0, logs[died[0]])
        if None not in codes:
            return
        now = [path.stat().st_size for path in logs]
        if now != sizes:
            sizes, heard = now, time.monotonic()
            done = logs[0].read_text("utf-8", "replace").count(f"\n{STEP}")
            show(min(done / plan.all_steps, 1.0), f"step {done} of {plan.all_steps}" if done else "opening the run")
        elif time.monotonic() - heard > silent_seconds:
            raise RunFailed(
                "E-PROFILE-SILENT",
                f"no rank of the profile printed anything for {silent_seconds:.0f} s:\n{_last_words(logs[0])}",
                rule="each rank prints a line per step, so that a hang is noticed",
                fix=f"see whether the run trains: ingot train {copy.source}; the output of the ranks is in {plan.root}",
                seconds=silent_seconds,
            )
        time.sleep(_POLL_SECONDS)


def _died(rank: int, code: int, log: Path) -> RunFailed:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    more = "; the kernel kills a process when memory runs out" if code == -signal.SIGKILL else ""
    return RunFailed(
        "E-PROFILE-RANK",
        f"rank {rank} of the profile {how}{more}:\n{_last_words(log)}",
        rule="a profile needs every rank until its last step; there is no page of a profile that ended early",
        fix=f"the output of the rank is in {log}; if the run itself fails, `ingot train` says more",
        rank=rank,
        exit_code=code,
    )


def _last_words(log: Path) -> str:
    """Return the last lines of what a rank printed."""
    with suppress(OSError):
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-_WORDS:])[-_LONGEST:] or "it printed nothing"
    return "it printed nothing"
