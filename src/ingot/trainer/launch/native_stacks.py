"""Native stacks of hung ranks, read from outside by a program of the machine: py-spy, which mixes them with the lines
of Python, or gdb. No rank has to answer, and none runs while its stack is read.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from ingot.trainer.resilience.heartbeat import Beat

_SECONDS = 3.0  # of all ranks together
_RANKS = 8
_BYTES = 1 << 20  # of a rank
_FRAMES = 64  # of a thread, by gdb: a stack that was overwritten has no end
_MARK = "with native frames"
# The first of these that is installed and can read the process is asked. py-spy stops the process for native frames.
_COMMANDS = {
    "py-spy": ("dump", "--native", "--pid", "{pid}"),
    "gdb": ("-p", "{pid}", "-batch", "-nx", "-ex", f"thread apply all backtrace {_FRAMES}"),
}


def add_native_stacks(beats: Mapping[int, Beat], place: Path, first: Collection[int]) -> None:
    """Add the native stacks of ranks of this machine to their files rank-R.stacks in `place`, those of the ranks
    `first` first, as far as the programs and the time suffice. Raises OSError if the disk does not take them."""
    deadline = time.monotonic() + _SECONDS
    for rank in sorted(beats, key=lambda rank: (rank not in first, rank))[:_RANKS]:
        if beats[rank].pid and (text := _stacks(beats[rank].pid, deadline)):
            with (place / f"rank-{rank}.stacks").open("a") as file:
                file.write(text)


def _stacks(pid: int, deadline: float) -> str:
    """Return the stacks of a process; "" if no program can read them until `deadline` [s of time.monotonic()]."""
    for name, words in _COMMANDS.items():
        program, left = shutil.which(name), deadline - time.monotonic()
        if program is None or left <= 0:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            done = subprocess.run(
                [program, *(word.format(pid=pid) for word in words)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=left,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor
                env=os.environ | {"DEBUGINFOD_URLS": ""},  # gdb would ask servers for symbols
            )
            output = done.stdout[:_BYTES].decode(errors="replace")
            # gdb that may not attach to a process ends with code 0, and says nothing about threads.
            if done.returncode == 0 and "hread " in output:
                return f"\n{_MARK} ({name}):\n{output}"
    return ""
