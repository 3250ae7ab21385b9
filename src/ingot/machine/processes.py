"""The lives of processes: one that ends with its parent, whether another one has ended, and what signals do to it."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def signals_blocked(signals: Collection[int]) -> Iterator[None]:
    """Block signals in this thread during the block. A process that is started there has them blocked all its life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def identity() -> str:
    """Return a text that no other process has, on this or another machine: of the boot of the kernel, the namespace of
    process ids, the id and the start of this process. "" where /proc does not show them."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """Return the `identity` of the process `pid` of this machine; "" if there is none."""
    return _look_at(pid)[0]


def _look_at(pid: int) -> tuple[str, str]:
    """Return the `identity` of the process `pid` of this machine and its state, a letter of proc(5); "" for none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {pid} {fields[19]}", fields[0]  # field 22: starttime
    except (OSError, IndexError):
        return "", ""


def oom_kills() -> int:
    """Return how many processes the kernel has killed on this machine because memory was short, also that of a
    container; 0 where it does not count."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def is_gone(process: str) -> bool:
    """Return whether the process with this `identity` has certainly ended. False for one that may run elsewhere."""
    return _state(process) in ("", "Z", "X")  # Z: its parent has not looked yet


def is_running(process: str) -> bool:
    """Return whether the process with this `identity` certainly lives, on this machine, and is not stopped (SIGSTOP).
    False for one that may run elsewhere."""
    return _state(process) not in (None, "", "Z", "X", "T", "t")


def _state(process: str) -> str | None:
    """Return the state of the process with this `identity`, a letter of proc(5), "" if it has ended.

    None if this process cannot know, because that one was started on another machine, before the machine was booted
    again, or in another namespace of process ids (a container).
    """
    *place, pid, _ = process.split(" ") if process.count(" ") == 3 else ("", "", "")
    here = identity()
    if not here or here.split(" ")[:2] != place or not pid.isdecimal():
        return None
    found, state = _look_at(int(pid))
    return state if found == process else ""


class SignalState(Enum):
    """The effect of a signal on a process: a handler takes it, the process ignores it, every thread blocks it, or the
    kernel does what is its default. UNKNOWN: /proc does not show it."""

    HANDLED, IGNORED, BLOCKED, DEFAULT, UNKNOWN = range(5)


def signal_state(pid: int, number: signal.Signals) -> SignalState:
    """Return what a process does with a signal (proc(5): status)."""
    try:
        masks = _signal_masks(f"/proc/{pid}/status", number)
        if masks["SigIgn"]:
            return SignalState.IGNORED
        threads = (_signal_masks(f"{entry.path}/status", number) for entry in os.scandir(f"/proc/{pid}/task"))
        if all(thread["SigBlk"] for thread in threads):
            return SignalState.BLOCKED
        return SignalState.HANDLED if masks["SigCgt"] else SignalState.DEFAULT
    except (OSError, KeyError, ValueError):
        return SignalState.UNKNOWN


def _signal_masks(status: str, number: signal.Signals) -> dict[str, bool]:
    """Return whether each signal mask of a process or thread has the signal, by its name in the file `status`."""
    lines = (line.partition(":") for line in Path(status).read_text().splitlines() if line.startswith("Sig"))
    return {name: bool(int(mask, 16) >> (number - 1) & 1) for name, _, mask in lines if name != "SigQ"}


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
