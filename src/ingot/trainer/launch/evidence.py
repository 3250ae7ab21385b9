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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.launch.watchdog import STOPPED, Hang, state_of
from ingot.trainer.resilience.collective_calls import CollectiveCall, as_json, find_blame, from_json
from ingot.trainer.resilience.heartbeat import Beat, Phase
from ingot.trainer.resilience.incidents import JobIncident, differing
from ingot.trainer.resilience.reports import REPORT_SIGNAL

_ANSWER_SECONDS = 0.5
_NATIVE_SECONDS = 3.0  # of all ranks together
_NATIVE_RANKS = 8
_POLL_SECONDS = 0.02
_IN_KERNEL = "D"  # state of a process in /proc


@dataclass(frozen=True)
class HangCause:
    """The cause of a hang, as far as the evidence shows it. ranks: those to blame. words: a phrase for people.
    mismatch: ranks called collectives differently, which happens again. accident: something outside of the program."""

    ranks: tuple[int, ...]
    words: str
    mismatch: bool = False
    accident: bool = False


@dataclass(frozen=True)
class Answers:
    """The answers of ranks, by rank. states: letters as in ps. calls: the newest collectives, None without an answer.
    with_stacks: the ranks that wrote their stacks."""

    states: Mapping[int, str]
    calls: Mapping[int, Sequence[CollectiveCall] | None]
    with_stacks: Collection[int]


Ask = Callable[[Mapping[int, Beat], Path | None], Answers]


def question(beats: Mapping[int, Beat], place: Path | None) -> Answers:
    """Ask these ranks of this machine for their stacks, which go to the folder `place` if there is one, and for their
    collectives. Takes about a second at most, and a few with native frames."""
    _ask(beats)
    calls = _answers(beats)
    states = {rank: state_of(beat.pid) for rank, beat in beats.items()}
    stacks = {rank: _read(beat.pid, beat.stacks) for rank, beat in beats.items()}
    with contextlib.suppress(OSError):  # a full disk must not keep a hang from its end
        if place is not None:
            for rank, text in stacks.items():
                (place / f"rank-{rank}.stacks").write_text(text or "this rank wrote no stacks\n")
            _add_native_stacks(beats, place, [rank for rank, answer in calls.items() if answer is None])
    return Answers(states, calls, {rank for rank, text in stacks.items() if text})


def examine(hang: Hang, folder: RunFolder, ask: Ask = question) -> tuple[HangCause, Path | None]:
    """Ask the ranks of a hung job what they do, write it down, and judge.

    ask: for ranks of several machines. Returns the cause, and the folder with the evidence; None if the disk did not
    take it. No rank may have been killed yet.
    """
    try:
        place = _new_folder(folder)
    except OSError:
        place = None
    answers = ask(hang.beats, place)
    known = {rank: beat for rank, beat in hang.beats.items() if rank in answers.states}  # a node may not answer
    hang = replace(hang, beats=known or hang.beats)
    answers = Answers(
        {rank: answers.states.get(rank, "-") for rank in hang.beats},
        {rank: answers.calls.get(rank) for rank in hang.beats},
        answers.with_stacks,
    )
    cause = judge(hang, answers.states, answers.calls, answers.with_stacks)
    try:
        if place is not None:
            _write(hang, place, cause, answers)
    except OSError:
        place = None
    return cause, place


def waits_for(beats: Mapping[int, Beat], answers: Answers) -> frozenset[int]:
    """Return the ranks that the others wait for in collectives, by their answers; none if those do not show it."""
    blame = find_blame(answers.calls)
    silent = [rank for rank, answer in answers.calls.items() if answer is None and beats[rank].pid]
    return frozenset(blame.ranks if blame else silent)


def _write(hang: Hang, place: Path, cause: HangCause, answers: Answers) -> None:
    states, calls = answers.states, answers.calls
    write_json(
        place / "hang.json",
        {
            "cause": cause.words,
            "ranks": list(cause.ranks),
            "mismatch": cause.mismatch,
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


def _ask(beats: Mapping[int, Beat]) -> None:
    """Ask all ranks for their reports; answers to earlier questions are gone then."""
    for beat in beats.values():
        for fd in (beat.stacks, beat.collectives):
            if beat.pid > 0 and fd >= 0:
                with contextlib.suppress(OSError):
                    os.truncate(f"/proc/{beat.pid}/fd/{fd}", 0)
        if beat.pid > 0 and beat.stacks >= 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, REPORT_SIGNAL)


def incident_of(hang: Hang, cause: HangCause, evidence: Path | None, step: int) -> JobIncident:
    """Return the hang as the incident that ended an attempt. evidence: its folder. step: the last one in the log.

    A hang of the program repeats at the same step, in the same phase. A stopped process, a
    disk and a start that takes too long are accidents, which may repeat by chance.
    """
    phase = max(hang.beats.values(), key=lambda beat: beat.step).phase
    accident = cause.accident or phase is Phase.START
    return JobIncident(
        rank=cause.ranks[0],
        kind="bug" if cause.mismatch else "hang",
        cause=cause.words,
        signature="" if accident else f"hung {phase.words}",
        step=max(step, *(beat.step for beat in hang.beats.values())),
        error=differing(cause.words, evidence) if cause.mismatch else None,
        detected_by="watchdog",
        evidence=evidence,
        seconds=round(hang.seconds, 3),
        setting=hang.setting,
    )


def judge(
    hang: Hang,
    states: Mapping[int, str],
    calls: Mapping[int, Sequence[CollectiveCall] | None],
    with_stacks: Collection[int],
) -> HangCause:
    """Find the cause of a hang. A pure function of its arguments.

    states: rank -> state letter of its process ("T" stopped, "D" in the kernel). calls: rank -> its newest collectives,
    None if it did not answer. with_stacks: the ranks that wrote their stacks.
    """
    seconds = f"for {hang.seconds:.1f} s"
    if stopped := tuple(rank for rank, state in states.items() if state in STOPPED):
        return HangCause(stopped, f"hung {seconds}: its process is stopped (SIGSTOP)", accident=True)
    blame = find_blame(calls)
    if blame and blame.mismatch:
        return HangCause(blame.ranks, f"hung {seconds}: {blame.words}", mismatch=True)
    if in_kernel := tuple(rank for rank, state in states.items() if state == _IN_KERNEL):
        words = f"hung {seconds}: its process waits in the kernel, for a disk or a driver"
        return HangCause(in_kernel, words, accident=True)
    if silent := tuple(rank for rank, answer in calls.items() if answer is None and hang.beats[rank].pid):
        held = silent[0] in with_stacks
        why = "native code holds its interpreter lock" if held else "it does not answer"
        return HangCause(silent, f"hung {seconds} {hang.beats[silent[0]].phase.words}: {why}")
    if blame:
        where = hang.beats[blame.ranks[0]].phase.words
        return HangCause(blame.ranks, f"hung {seconds} {where}: {blame.words}")
    first = min(hang.beats, key=lambda rank: hang.beats[rank].since)
    return HangCause((first,), f"hung {seconds} {hang.beats[first].phase.words}")


def _new_folder(folder: RunFolder) -> Path:
    number = 1
    while (place := folder.incidents / f"{number:04d}").exists():
        number += 1
    place.mkdir(parents=True)
    return place


def _answers(beats: Mapping[int, Beat]) -> dict[int, tuple[CollectiveCall, ...] | None]:
    """Wait for the reports of the collectives, and read them."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    found: dict[int, tuple[CollectiveCall, ...] | None] = dict.fromkeys(beats)
    while time.monotonic() < deadline and None in found.values():
        for rank, beat in beats.items():
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


def _add_native_stacks(beats: Mapping[int, Beat], place: Path, first: Collection[int]) -> None:
    """Add stacks with native frames by py-spy, where it is installed and allowed; of the ranks `first` first."""
    if not (spy := shutil.which("py-spy")):
        return
    deadline = time.monotonic() + _NATIVE_SECONDS
    for rank in sorted(beats, key=lambda rank: (rank not in first, rank))[:_NATIVE_RANKS]:
        left = deadline - time.monotonic()
        if left <= 0 or not beats[rank].pid:
            return
        command = [spy, "dump", "--native", "--nonblocking", "--pid", str(beats[rank].pid)]
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            if done.returncode == 0:
                with (place / f"rank-{rank}.stacks").open("a") as file:
                    file.write(f"\nwith native frames (py-spy):\n{done.stdout}")
