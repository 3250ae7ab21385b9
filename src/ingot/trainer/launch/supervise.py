"""Keep a job running: start it, detect failures, start it again if that can help, stop it on request.

Every decision is made in one place, after the dead attempt is gone and its cause is known. torchrun's own restarts
begin before the cause is known, and wait 30 s for a hung peer.
"""

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, EXIT_PREEMPTED, IngotError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folders import is_saving, remove_leftovers, remove_saves_of
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.interrupts import Interrupts, handlers
from ingot.trainer.launch.running import RunningJob
from ingot.trainer.lease import RunLease
from ingot.trainer.resilience.incidents import JobIncident
from ingot.trainer.resilience.restarts import Restarts
from ingot.trainer.resilience.start_times import FIRST, Ordered
from ingot.trainer.resilience.stop_requests import REQUESTED, StopRequest, StopRequests

_LOOK_SECONDS = 0.2  # between two looks at log and heartbeats; the end of a rank is seen at once
_POLL_SECONDS = 0.05
_ENDING_SECONDS = 1.0  # after its last save, a run that stops reports that


@dataclass
class EventLogReader:
    """A reader of the event log of a running job. `read` takes in the lines written since construction.

    step: the last step logged. saved: the step of the newest checkpoint that was verified,
    on loading or after saving; None before the first, 0 if the run starts at step 0. ended: "finished", "stopped" or
    "".
    """

    path: Path
    step: int = 0
    saved: int | None = None
    ended: str = ""
    _position: int = -1

    def __post_init__(self):
        self._position = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> None:
        """Take in the complete lines that were added to the log since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except ValueError:
                continue  # an incomplete line of a killed writer

    def _take(self, event: dict) -> None:
        kind = event.get("kind")
        if kind == events.RUN_STARTED:
            self.step = self.saved = event["from_step"]
        elif kind == events.PROGRESS:
            self.step = event["step"]
        elif kind == events.CHECKPOINT:
            self.saved = event["step"]
        elif kind in (events.FINISHED, events.STOPPED):
            self.ended, self.step = kind, event["step"]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The end of a job. exit_code: 0 if finished, 10 if stopped on request.

    step: the last completed step, as far as a log line shows it. saved_step: the step of the newest verified
    checkpoint; lower than `step` only if the last steps could not be saved in time.
    """

    exit_code: int
    step: int
    saved_step: int
    restarts: int
    seconds: float
    run: Path

    @property
    def finished(self) -> bool:
        return self.exit_code == EXIT_OK

    def facts(self) -> dict:
        """Return the result as plain values: the JSON object of `ingot train --json`."""
        return {
            "run": str(self.run),
            "finished": self.finished,
            "step": self.step,
            "saved_step": self.saved_step,
            "restarts": self.restarts,
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
        }


def supervise(
    folder: RunFolder,
    running: RunningJob,
    launch: Launch,
    *,
    lease: RunLease | None = None,
    began: float | None = None,
    say: Callable[[str], None],
) -> JobResult:
    """Run a job to its end, with restarts after failures. The caller holds the run's lock.

    running: the job, which has not started yet. launch: the settings of the run. lease: the right to train it; if it is
    lost, the ranks are killed. began: the start of the launcher, in seconds of time.monotonic(), from which
    launch.stop_after counts over all attempts; None: now.
    The first stop signal, or the end of that time, asks the ranks to save and stop; after launch.grace they are killed,
    and the newest checkpoint counts. A second signal that is Ctrl-C kills them, but not before a checkpoint that is
    being written is complete, and raises KeyboardInterrupt unless they had stopped. Raises RunBusyError if the lease is
    lost, the IngotError that a rank ended with, RunFailed if a restart would not help or none is left, CheckpointError
    if the saved checkpoints vanished. No process of the job is left when this function returns or raises.
    """
    started = time.monotonic()
    folder.stop_request.unlink(missing_ok=True)
    log = EventLog(folder.events)
    log_reader = EventLogReader(folder.events)
    restarts, before = Restarts(launch), FIRST
    stopping = _Stopping(folder, StopRequests(None, launch, started if began is None else began), say)
    try:
        with handlers(stopping.signal):
            while True:
                running.start(restarts.count, before)
                incident = _follow(running, log_reader, stopping, lease, say)
                before = _ended(running, incident)
                if lease is not None:
                    lease.require()  # before anything is removed or believed: the folder may be another attempt's
                log_reader.read()
                if incident is None:
                    break
                _record_fault(log, folder, incident)
                wait = 0.0
                try:
                    wait = restarts.wait_after(incident, running.log)
                except IngotError:
                    if incident.error or not stopping.request:
                        raise
                if stopping.request:
                    break
                require_checkpoints(folder, log_reader.saved or 0)
                remove_leftovers(folder)  # an unfinished checkpoint of a killed rank is not one that is being written
                log.write(events.RESTART, attempt=restarts.count, of=launch.max_restarts, wait_seconds=wait)
                saved = _saved_step(folder, log_reader)
                _report(say, _fault_line(incident, saved, restarts.recent, launch.max_restarts, wait))
                if _stopped_while_waiting(wait, stopping, lease):
                    break
        if not log_reader.ended:
            log_reader.saved = resume_step(folder)  # a rank that was killed may not have reported its last save
            log_reader.step = max(log_reader.step, log_reader.saved)
            reason = stopping.request.reason if stopping.request else REQUESTED
            log.write(events.STOPPED, step=log_reader.step, reason=reason, saved_step=log_reader.saved)
            if stopping.interrupted:
                raise KeyboardInterrupt(_standing(log_reader))
    finally:
        running.close()
        if lease is not None and lease.lost is not None:
            remove_saves_of(folder, lease.epoch)  # the job that has the run now does that at its next start only
        log.close()
        if lease is None or lease.lost is None:  # otherwise it is the next job's
            folder.stop_request.unlink(missing_ok=True)
    return JobResult(
        exit_code=EXIT_OK if log_reader.ended == events.FINISHED else EXIT_PREEMPTED,
        step=log_reader.step,
        saved_step=_saved_step(folder, log_reader),
        restarts=restarts.count,
        seconds=time.monotonic() - started,
        run=folder.root,
    )


class _Stopping:
    """The decisions of the supervisor about requests to stop: when to ask the ranks, and when to kill them."""

    def __init__(self, folder: RunFolder, requests: StopRequests, say: Callable[[str], None]):
        self._folder, self._requests, self._say = folder, requests, say
        self._interrupts = Interrupts(folder)
        self._lines: list[str] = []
        self._counts: dict[str, int] = {}  # machine -> its signals
        self._most = 0
        self._saved_at = math.inf
        self.request: StopRequest | None = None

    def signal(self, number: signal.Signals, machine: str = "") -> None:
        """Take in a signal to this or another machine. Within a handler, so nothing is written or printed.

        A scheduler, or Ctrl-C in its terminal, signals every machine, which is one request: the machine that got the
        most signals counts.
        """
        self._counts[machine] = self._counts.get(machine, 0) + 1
        if self._counts[machine] <= self._most:
            return
        self._most = self._counts[machine]
        line = self._interrupts.take(number)
        if line is None:
            self._requests.ask(number.name)
        else:
            self._lines.append(line)

    def is_over(self, *, is_ending: bool = False) -> bool:
        """Ask the ranks if something asks this process, and return whether to kill them now. is_ending: they have
        saved the last step, and wait for uploads alone."""
        if self.request is None and (found := self._requests.current()):
            self.request = found
            found.write(self._folder.stop_request)
            _report(self._say, found.line(is_ending=is_ending))
        while self._lines:
            _report(self._say, self._lines.pop(0))
        now = time.monotonic()
        if self.request is not None and now >= self.request.deadline:
            _report(self._say, "the time of launch.grace is over: the ranks are killed")
            return True
        if self._interrupts.waits:
            self._saved_at = math.inf if is_saving(self._folder) else min(self._saved_at, now)
            return now >= self._saved_at + _ENDING_SECONDS
        return self._interrupts.ends_now

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the ranks."""
        return self._interrupts.ends_now or self._interrupts.waits


def _follow(
    running: RunningJob,
    log_reader: EventLogReader,
    stopping: _Stopping,
    lease: RunLease | None,
    say: Callable[[str], None],
) -> JobIncident | None:
    """Follow one attempt until it ends, or has to be killed on request. Returns the incident if neither it finished nor
    something asked it to stop, otherwise None."""
    while running.running():
        if lease is not None and lease.lost is not None:
            raise lease.lost
        log_reader.read()
        for number, machine in running.signals():
            stopping.signal(number, machine)
        if stopping.is_over(is_ending=bool(log_reader.ended)) or (stopping.request and not running.started):
            return None
        if incident := running.lost_node(log_reader.step):
            log_reader.read()
            return None if log_reader.ended else incident
        if running.lost_ranks():
            running.wait_for_peers()
            break
        if log_reader.ended and running.all_ended():
            break  # everything is saved and reported; only Python is still shutting down
        if hang := running.hang():
            log_reader.read()
            if log_reader.ended:
                break  # a process that does not end after everything was saved and reported
            return running.examine(hang, log_reader.step)
        running.wait(_LOOK_SECONDS)
    log_reader.read()
    if log_reader.ended:
        return None
    return running.lost_node(log_reader.step) or running.explain(log_reader.step)


def _ended(running: RunningJob, incident: JobIncident | None) -> Ordered:
    """End the attempt. Returns how long its fault was not seen, and how long the ranks took to be gone."""
    seen = time.monotonic()
    detect = incident.seconds if incident else None  # a hang is as old as the newest heartbeat
    if detect is None and incident and (ended := running.ended_at(incident.rank)) is not None:
        detect = seen - ended
    running.end_attempt()
    gone = time.monotonic()
    return Ordered(detect=detect, kill=gone - seen, gone_at=gone)


def _stopped_while_waiting(seconds: float, stopping: _Stopping, lease: RunLease | None) -> bool:
    """Wait before the next attempt. Returns True if something asks the run to stop meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if lease is not None:
            lease.require()
        if stopping.is_over() or stopping.request is not None:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _standing(log_reader: EventLogReader) -> str:
    """Return what is left of a run whose last steps were not saved."""
    return f"step {log_reader.saved} is the newest checkpoint of the {log_reader.step} steps that were trained"


def _saved_step(folder: RunFolder, log_reader: EventLogReader) -> int:
    return resume_step(folder) if log_reader.saved is None else log_reader.saved


def _report(say: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone (SIGHUP); the run continues
        say(text)


def _record_fault(log: EventLog, folder: RunFolder, incident: JobIncident) -> None:
    log.write(
        events.FAULT,
        rank=incident.rank if incident.rank >= 0 else None,
        failure=incident.kind,
        cause=incident.cause,
        step=incident.step,
        detected_by=incident.detected_by,
        evidence=str(incident.evidence.relative_to(folder.root)) if incident.evidence else "",
        seconds=incident.seconds,
    )


def _fault_line(incident: JobIncident, saved_step: int, recent: int, max_restarts: int, wait: float) -> str:
    who = f"rank {incident.rank}" if incident.rank >= 0 else "the job"
    stacks = f" (stacks in {incident.evidence})" if incident.evidence else ""
    return (
        f"{time.strftime('%H:%M:%S')} {who} {incident.cause} near step {incident.step}{stacks}; "
        f"restarting from step {saved_step}{f' in {wait:.0f} s' if wait else ''} ({recent} of {max_restarts})"
    )
