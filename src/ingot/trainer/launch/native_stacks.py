"""Native stacks of hung ranks, read from outside by a program of the machine: py-spy, which shows them with the lines
of Python, or gdb. No rank has to answer, and none runs while its stack is read. No torch.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.trainer.resilience.heartbeat import Beat

_RANKS = 8
_BYTES = 1 << 20  # of a rank
_FRAMES = 64  # of a thread, by gdb: a stack that was overwritten has no end


@dataclass(frozen=True)
class _Program:
    """A program that reads stacks. words: its arguments. seconds: for all ranks together. all_ranks: False for one that
    is slow, and is asked only about ranks that did not answer."""

    name: str
    words: tuple[str, ...]
    seconds: float
    all_ranks: bool


# The first that is installed and can read the processes is asked. py-spy cannot read native frames with --nonblocking.
# gdb first reads the symbols of every library of torch: 4 s of processor time.
_PROGRAMS = (
    _Program("py-spy", ("dump", "--native", "--pid", "{pid}"), 3.0, True),
    _Program("gdb", ("-p", "{pid}", "-batch", "-nx", "-ex", f"thread apply all backtrace {_FRAMES}"), 10.0, False),
)
NATIVE_SECONDS = sum(program.seconds for program in _PROGRAMS)  # if each takes its time


def add_native_stacks(beats: Mapping[int, Beat], place: Path, unanswered: Collection[int]) -> None:
    """Add the native stacks of ranks of this machine to their files rank-R.stacks in `place`, as far as programs and
    time suffice.

    unanswered: the ranks that did not report what they do; they come first. Raises OSError if the disk does not
    take the stacks.
    """
    for program in _PROGRAMS:
        ranks = sorted(beats if program.all_ranks else unanswered, key=lambda rank: (rank not in unanswered, rank))
        deadline = time.monotonic() + program.seconds
        found = {rank: _read(program, beats[rank].pid, deadline) for rank in ranks[:_RANKS] if beats[rank].pid}
        for rank, text in found.items():
            if text:
                with (place / f"rank-{rank}.stacks").open("a") as file:
                    file.write(f"\nwith native frames ({program.name}):\n{text}")
        if any(found.values()):
            return


def _read(program: _Program, pid: int, deadline: float) -> str:
    """Return the stacks of a process; "" if the program cannot read them until `deadline` [s of time.monotonic()]."""
    path, left = shutil.which(program.name), deadline - time.monotonic()
    if path is None or left <= 0:
        return ""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        done = subprocess.run(
            [path, *(word.format(pid=pid) for word in program.words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=left,
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor
            env=os.environ | {"DEBUGINFOD_URLS": ""},  # gdb would ask servers for symbols
        )
        text = done.stdout[:_BYTES].decode(errors="replace")
        # Where gdb may not attach, it ends with code 0 all the same, and shows no thread.
        if done.returncode == 0 and "hread " in text:
            return text
    return ""
