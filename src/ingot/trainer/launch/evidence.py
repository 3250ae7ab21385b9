"""The evidence of a hang: what every rank of it was doing, asked of the ranks and read from the kernel.

It goes to a folder of the run, incidents/N: rank-R.stacks, the Python stacks of the rank's threads, with native frames
where py-spy is installed and may read the process, and hang.json with everything else. No rank has to answer: a stopped
process, or one whose interpreter lock is held in native code, is described by what it does not answer.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ConfigError
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.launch.watchdog import Hang
from ingot.trainer.resilience.collective_calls import CollectiveCall, as_json, find_blame, from_json
from ingot.trainer.resilience.incidents import JobIncident, differing
from ingot.trainer.resilience.reports import REPORT_SIGNAL

_ANSWER_SECONDS = 0.5
_NATIVE_SECONDS = 3.0  # of all ranks together
_NATIVE_RANKS = 8
_POLL_SECONDS = 0.02
_STOPPED, _IN_KERNEL = "Tt", "D"  # states of a process in /proc


@dataclass(frozen=True)
class HangCause:
    """The cause of a hang, as far as the evidence shows it. ranks: those to blame, maybe none. cause: a phrase for
    people. mismatch: ranks called collectives differently, which happens again. folder: where the evidence is."""

    ranks: tuple[int, ...]
    cause: str
    mismatch: bool
    folder: Path


def examine(hang: Hang, folder: RunFolder) -> HangCause:
    """Ask the ranks of a hung job for their stacks and collectives, write them down, and judge. Takes about a second.

    No rank may have been killed yet.
    """
    place = _new_folder(folder)
    for beat in hang.beats.values():
        if beat.stacks >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, REPORT_SIGNAL)
    calls = _answers(hang)
    states = {rank: _state(beat.pid) for rank, beat in hang.beats.items()}
    for rank, beat in hang.beats.items():
        (place / f"rank-{rank}.stacks").write_text(_read(beat.pid, beat.stacks) or "this rank wrote no stacks\n")
    ranks, cause, mismatch = judge(hang, states, calls)
    write_json(
        place / "hang.json",
        {
            "cause": cause,
            "ranks": list(ranks),
            "mismatch": mismatch,
            "seconds_without_progress": round(hang.seconds, 3),
            "limit_seconds": round(hang.limit, 3),
            "state": {
                str(rank): {
                    "pid": beat.pid,
                    "phase": beat.phase.name.lower(),
                    "step": beat.step,
                    "process_state": states[rank],
                    "answered": calls[rank] is not None,
                    "collectives": as_json(calls[rank] or ()),
                }
                for rank, beat in hang.beats.items()
            },
        },
    )
    _add_native_stacks(hang, place, ranks)
    return HangCause(ranks, cause, mismatch, place)


def incident_of(hang: Hang, found: HangCause) -> JobIncident:
    """Return the hang as the incident that ended an attempt."""
    rank = found.ranks[0] if found.ranks else -1
    return JobIncident(
        rank=rank,
        kind="bug" if found.mismatch else "hang",
        cause=found.cause,
        signature="hung",  # again at the same step: the program hangs there
        step=max(beat.step for beat in hang.beats.values()),
        error=differing(found.cause, found.folder) if found.mismatch else None,
        detected_by="watchdog",
        evidence=found.folder,
        seconds=round(hang.seconds, 3),
    )


def judge(
    hang: Hang, states: Mapping[int, str], calls: Mapping[int, Sequence[CollectiveCall] | None]
) -> tuple[tuple[int, ...], str, bool]:
    """Return the ranks to blame, the cause, and whether it is a mismatch. A pure function of its arguments.

    states: rank -> state letter of its process ("T" stopped, "D" in the kernel). calls: rank -> its newest collectives,
    None if it did not answer.
    """
    seconds = f"for {hang.seconds:.1f} s"
    if stopped := tuple(rank for rank, state in states.items() if state in _STOPPED):
        return stopped, f"hung {seconds}: its process is stopped (SIGSTOP)", False
    blame = find_blame(calls)
    if blame and blame.mismatch:
        return blame.ranks, f"hung {seconds}: {blame.words}", True
    if in_kernel := tuple(rank for rank, state in states.items() if state in _IN_KERNEL):
        return in_kernel, f"hung {seconds}: its process waits in the kernel, for a disk or a driver", False
    if silent := tuple(rank for rank, answer in calls.items() if answer is None and hang.beats[rank].pid):
        where = hang.beats[silent[0]].phase.words
        return silent, f"hung {seconds} {where}: native code holds its interpreter lock", False
    if blame:
        where = hang.beats[blame.ranks[0]].phase.words
        return blame.ranks, f"hung {seconds} {where}: {blame.words}", False
    first = min(hang.beats, key=lambda rank: hang.beats[rank].since)
    return (first,), f"hung {seconds} {hang.beats[first].phase.words}", False


def _new_folder(folder: RunFolder) -> Path:
    number = 1
    while (place := folder.incidents / f"{number:04d}").exists():
        number += 1
    place.mkdir(parents=True)
    return place


def _state(pid: int) -> str:
    """Return the state letter of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _answers(hang: Hang) -> dict[int, tuple[CollectiveCall, ...] | None]:
    """Wait for the reports of the collectives, and read them."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    found: dict[int, tuple[CollectiveCall, ...] | None] = dict.fromkeys(hang.beats)
    while time.monotonic() < deadline and None in found.values():
        for rank, beat in hang.beats.items():
            if found[rank] is None and (text := _read(beat.pid, beat.collectives)).endswith("\n"):
                with contextlib.suppress(ValueError, ConfigError):
                    found[rank] = from_json(json.loads(text))
        time.sleep(_POLL_SECONDS)
    return found


def _read(pid: int, fd: int) -> str:
    """Return the content of a file that another process has open; "" if that is not possible."""
    try:
        return Path(f"/proc/{pid}/fd/{fd}").read_text(errors="replace") if fd >= 0 else ""
    except OSError:
        return ""


def _add_native_stacks(hang: Hang, place: Path, blamed: tuple[int, ...]) -> None:
    """Add stacks with native frames by py-spy, where it is installed and allowed; of the blamed ranks first."""
    if not (spy := shutil.which("py-spy")):
        return
    deadline = time.monotonic() + _NATIVE_SECONDS
    for rank in sorted(hang.beats, key=lambda rank: (rank not in blamed, rank))[:_NATIVE_RANKS]:
        left = deadline - time.monotonic()
        if left <= 0 or not hang.beats[rank].pid:
            return
        command = [spy, "dump", "--native", "--nonblocking", "--pid", str(hang.beats[rank].pid)]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            if done.returncode == 0:
                with (place / f"rank-{rank}.stacks").open("a") as file:
                    file.write(f"\nwith native frames (py-spy):\n{done.stdout}")
