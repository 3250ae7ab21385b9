"""The evidence of a hang: what every rank of it was doing, asked of the ranks and read from the kernel.

It goes to a folder of the run, incidents/N: rank-R.stacks, the Python stacks of the rank's threads, with native frames
where py-spy or gdb is installed and may read the process (native_stacks.py), and hang.json with everything else. No
rank has to answer: a stopped process, one whose interpreter lock is held in native code, or one that ignores the
question is described by what it does not answer.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.machine.processes import SignalState, signal_state
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.launch.native_stacks import NATIVE_SECONDS, add_native_stacks
from ingot.trainer.launch.watchdog import STOPPED, Hang, state_of
from ingot.trainer.resilience.collective_calls import CollectiveCall, as_json, find_blame, from_json
from ingot.trainer.resilience.heartbeat import Beat, Phase
from ingot.trainer.resilience.incidents import JobIncident, differing
from ingot.trainer.resilience.reports import REPORT_SIGNAL

_ANSWER_SECONDS = 0.5
QUESTION_SECONDS = _ANSWER_SECONDS + NATIVE_SECONDS  # at most, apart from the reading of files
_POLL_SECONDS = 0.02
_IN_KERNEL = "D"  # state of a process in /proc
_DEAF = {SignalState.IGNORED: "ignores", SignalState.BLOCKED: "blocks", SignalState.DEFAULT: "has no handler for"}


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
    with_stacks: the ranks that wrote their stacks. deaf: why ranks do not get the question, of those that do not."""

    states: Mapping[int, str]
    calls: Mapping[int, Sequence[CollectiveCall] | None]
    with_stacks: Collection[int]
    deaf: Mapping[int, str] = field(default_factory=dict)


Ask = Callable[[Mapping[int, Beat], Path | None], Answers]


def question(beats: Mapping[int, Beat], place: Path | None) -> Answers:
    """Ask these ranks of this machine for their stacks, which go to the folder `place` if there is one, and for their
    collectives. Takes about a second at most, and a few with native frames."""
    hearing = _ask(beats)
    calls = _answers(hearing, beats)
    states = {rank: state_of(beat.pid) for rank, beat in beats.items()}
    silent = [rank for rank, answer in calls.items() if answer is None and states[rank] not in STOPPED]
    deaf = {rank: why for rank in silent if (why := _why_deaf(beats[rank].pid))}
    stacks = {rank: _read(beat.pid, beat.stacks) for rank, beat in beats.items()}
    stopped = {rank: "a signal or a debugger has stopped it" for rank, state in states.items() if state in STOPPED}
    with contextlib.suppress(OSError):  # a full disk must not keep a hang from its end
        if place is not None:
            for rank, text in stacks.items():
                why = f": {reason}" if (reason := (deaf | stopped).get(rank)) else ""
                (place / f"rank-{rank}.stacks").write_text(text or f"this rank wrote no stacks{why}\n")
            add_native_stacks(beats, place, silent)
    return Answers(states, calls, {rank for rank, text in stacks.items() if text}, deaf)


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
        answers.deaf,
    )
    cause = judge(hang, answers)
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
            "limit_reason": hang.reason,
            "state": {
                str(rank): {
                    "pid": beat.pid,
                    "phase": beat.phase.name.lower(),
                    "step": beat.step,
                    "process_state": states[rank],
                    "answered": calls[rank] is not None,
                    "waits": beat.waits,
                    "deaf": answers.deaf.get(rank, ""),
                    "collectives": as_json(calls[rank] or ()),
                }
                for rank, beat in hang.beats.items()
            },
        },
    )


def _ask(beats: Mapping[int, Beat]) -> list[int]:
    """Ask all ranks for their reports; answers to earlier questions are gone then. Returns the ranks that were asked:
    the signal would end a process that has no handler for it."""
    asked = []
    for rank, beat in beats.items():
        for fd in (beat.stacks, beat.collectives):
            if beat.pid > 0 and fd >= 0:
                with contextlib.suppress(OSError):
                    os.truncate(f"/proc/{beat.pid}/fd/{fd}", 0)
        if beat.pid > 0 and beat.stacks >= 0 and signal_state(beat.pid, REPORT_SIGNAL) is not SignalState.DEFAULT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, REPORT_SIGNAL)
                asked.append(rank)
    return asked


def _why_deaf(pid: int) -> str:
    """Return why a process that does not answer did not get the question; "" if it did, as far as the kernel shows."""
    words = _DEAF.get(signal_state(pid, REPORT_SIGNAL)) if pid > 0 else None
    return f"it {words} {REPORT_SIGNAL.name}, which asks it what it does" if words else ""


def incident_of(hang: Hang, cause: HangCause, evidence: Path | None, step: int) -> JobIncident:
    """Return the hang as the incident that ended an attempt. evidence: its folder. step: the last one in the log.

    A hang of the program repeats at the same step, in the same phase. A stopped process, a
    disk and a start that takes too long are accidents, which may repeat by chance.
    """
    phase = max(hang.beats.values(), key=lambda beat: beat.step).phase
    accident = cause.accident or phase is Phase.START
    if phase is Phase.COMPILE:  # the first step of an attempt, which may repeat a later one of the attempt before
        phase = Phase.STEP
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
        limit=round(hang.limit, 3),
        limit_reason=hang.reason,
    )


def judge(hang: Hang, answers: Answers) -> HangCause:
    """Find the cause of a hang. A pure function of its arguments.

    A rank that did not get the question is no worse than others: a plug-in that ignores signals does so on all ranks.
    """
    seconds, states, calls = f"for {hang.seconds:.1f} s", answers.states, answers.calls
    if stopped := tuple(rank for rank, state in states.items() if state in STOPPED):
        return HangCause(stopped, f"hung {seconds}: its process is stopped (SIGSTOP)", accident=True)
    blame = find_blame(calls)
    if blame and blame.mismatch:
        return HangCause(blame.ranks, f"hung {seconds}: {blame.words}", mismatch=True)
    if in_kernel := tuple(rank for rank, state in states.items() if state == _IN_KERNEL):
        words = f"hung {seconds}: its process waits in the kernel, for a disk or a driver"
        return HangCause(in_kernel, words, accident=True)
    silent = [rank for rank, answer in calls.items() if answer is None and hang.beats[rank].pid]
    if quiet := tuple(rank for rank in silent if rank not in answers.deaf):
        held = quiet[0] in answers.with_stacks
        why = "native code holds its interpreter lock" if held else "it does not answer"
        return HangCause(quiet, f"hung {seconds} {hang.beats[quiet[0]].phase.words}: {why}")
    ranks = blame.ranks if blame else (_first_to_stop(hang.beats),)
    found = [blame.words] if blame else []
    if deaf := answers.deaf.get(ranks[0]):
        found.append(deaf)
    words = "; ".join(found)
    return HangCause(ranks, f"hung {seconds} {hang.beats[ranks[0]].phase.words}{': ' if words else ''}{words}")


def _first_to_stop(beats: Mapping[int, Beat]) -> int:
    """Return the rank whose phase began first, of those that wait for no other rank, or of all."""
    return min(beats, key=lambda rank: (beats[rank].waits, beats[rank].since))


def _new_folder(folder: RunFolder) -> Path:
    number = 1
    while (place := folder.incidents / f"{number:04d}").exists():
        number += 1
    place.mkdir(parents=True)
    return place


def _answers(asked: Collection[int], beats: Mapping[int, Beat]) -> dict[int, tuple[CollectiveCall, ...] | None]:
    """Wait for the reports of the collectives of the ranks that were asked, and read them."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    found: dict[int, tuple[CollectiveCall, ...] | None] = dict.fromkeys(beats)
    while time.monotonic() < deadline and any(found[rank] is None for rank in asked):
        for rank in asked:
            beat = beats[rank]
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
