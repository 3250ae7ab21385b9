"""Keep a job running: start it, detect failures, start it again if that can help, stop it on request.

Every decision is made in one place, after the dead attempt is gone and its cause is known. torchrun's own restarts
begin before the cause is known, and wait 30 s for a hung peer.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from ingot.errors import EXIT_OK, EXIT_PREEMPTED, IngotError, ResourceError, RunBusyError
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.folder_lost import is_loss
from ingot.trainer.checkpoint.folders import remove_leftovers, remove_saves_of
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.interrupts import handlers
from ingot.trainer.launch.folder_watch import FolderWatch
from ingot.trainer.launch.outcome import EventLogReader, JobResult
from ingot.trainer.launch.running import PlannedRestart, RunningJob
from ingot.trainer.launch.slow_nodes import NONE_SLOW
from ingot.trainer.launch.stopping import Stopping, report
from ingot.trainer.launch.watchdog import LOOK_SECONDS
from ingot.trainer.lease import RunLease
from ingot.trainer.resilience.incidents import JobIncident
from ingot.trainer.resilience.restarts import Restarts
from ingot.trainer.resilience.start_times import FIRST, Ordered
from ingot.trainer.resilience.stop_requests import DRAIN, PLANNED, REQUESTED, RESTART, StopRequest, StopRequests

_POLL_SECONDS = 0.05
_ROOM_SECONDS = 5.0  # for a full disk to have room for the record of a fault


def supervise(
    folder: RunFolder,
    running: RunningJob,
    launch: Launch,
    *,
    lease: RunLease | None = None,
    watch: FolderWatch | None = None,
    began: float | None = None,
    received: list[signal.Signals] | None = None,
    say: Callable[[str], None],
) -> JobResult:
    """Run a job to its end, with restarts after failures. The caller holds the run's lock.

    running: the job, which has not started yet. launch: the settings of the run. lease: the right to train it; if it is
    lost, the ranks are killed. watch: over the run folder. began: the start of the launcher, in seconds of
    time.monotonic(), from which launch.stop_after counts over all attempts; None: now. received: stop signals to this
    process from before, which are taken; after RunBusyError, all that it got and that nothing acted on.
    The first stop signal, or the end of that time, asks the ranks to save and stop; after launch.grace they are killed,
    and the newest checkpoint counts. A second signal that is Ctrl-C kills them, but not before a checkpoint that is
    being written is complete, and raises KeyboardInterrupt unless they had stopped. Raises RunBusyError if the lease is
    lost, the IngotError that a rank ended with, RunFailed if a restart would not help or none is left, CheckpointError
    if the saved checkpoints vanished, ResourceError if the run folder did. No process of the job is left when this
    function returns or raises.
    """
    started = time.monotonic()
    folder.stop_request.unlink(missing_ok=True)
    stopping = Stopping(folder, StopRequests(None, launch, started if began is None else began), say)
    job = _SupervisedJob(folder, running, launch, lease, watch, stopping, say)
    try:
        with job.log, handlers(stopping.signal):
            while received:
                stopping.signal(received.pop(0))
            job.run()
    except RunBusyError:  # the launcher may lead, or follow, again
        if received is not None:
            received[:0] = stopping.own
        raise
    except OSError as error:
        if watch is not None and is_loss(folder.root, error):  # or it is of one file, or of something else
            watch.require(writable=True, met=error)
        raise
    finally:
        job.close()
    return job.result(time.monotonic() - started)


class _SupervisedJob:
    """A job from its first attempt to its end. Arguments as of `supervise`."""

    def __init__(
        self,
        folder: RunFolder,
        running: RunningJob,
        launch: Launch,
        lease: RunLease | None,
        watch: FolderWatch | None,
        stopping: Stopping,
        say: Callable[[str], None],
    ):
        self._folder, self._running, self._launch = folder, running, launch
        self._lease, self._watch, self._stopping, self._say = lease, watch, stopping, say
        self.log, self._seen = EventLog(folder.events), EventLogReader(folder.events)
        self._earlier = running.earlier()
        self._restarts = Restarts(launch, earlier=self._earlier.restarts if self._earlier else ())
        self._attempt = 0
        self._failed_at = -1  # the step of the last failure
        self._kept: Collection[int] = ()  # ranks that keep their processes in the next attempt

    def run(self) -> None:
        """Start attempt after attempt until the job has ended. Raises as `supervise` does."""
        before = FIRST
        check = self._launch.check_every > 0 and not (self._earlier and self._earlier.is_checked)
        while True:
            self._seen.ended = self._seen.reason = ""  # a rank may have reported its end after another one failed
            self._seen.slow.clear()  # or its machine was replaced
            self._running.start(self._attempt, before, check=check)
            ended = self._follow()
            check = check and not self._running.started
            before = self._end_attempt(ended)
            if self._watch is not None:
                self._watch.require(writable=True)  # ranks that cannot write end first
            if self._lease is not None:
                self._lease.require()  # before anything is removed or believed: the folder may be another attempt's
            self._seen.read()
            if ended is None or not self._goes_on_after(ended):
                break
            check = check or (isinstance(ended, JobIncident) and self._is_check_due(self._restarts.count))
            self._attempt += 1
        self._record_end()

    def close(self) -> None:
        """End all processes of the job, and leave no request in the folder."""
        lost = self._lease is not None and self._lease.lost is not None
        try:
            self._running.close()
        finally:
            if lost:  # the job that has the run now does that at its next start only
                assert self._lease is not None
                remove_saves_of(self._folder, self._lease.epoch)
            with contextlib.suppress(OSError):  # the folder may be lost, which another error says
                if not lost:  # otherwise it is the next job's
                    self._folder.stop_request.unlink(missing_ok=True)

    def result(self, seconds: float) -> JobResult:
        """Return the result of a job that has ended."""
        return JobResult(
            exit_code=EXIT_OK if self._seen.ended == events.FINISHED else EXIT_PREEMPTED,
            step=self._seen.step,
            saved_step=self._saved_step(),
            restarts=self._restarts.count,
            seconds=seconds,
            run=self._folder.root,
        )

    # -- one attempt --

    def _follow(self) -> JobIncident | PlannedRestart | None:
        """Follow one attempt until it ends, or has to be killed on request. Returns the incident if neither it finished
        nor something asked it to stop; the restart if it ended for one that was planned; otherwise None."""
        running, seen, stopping = self._running, self._seen, self._stopping
        planned: PlannedRestart | None = None
        while running.running():
            is_there = self._watch is None or self._watch.require()
            if self._lease is not None and self._lease.lost is not None:
                raise self._lease.lost
            if not is_there:
                running.wait(LOOK_SECONDS)
                continue
            seen.read()
            for number, machine in running.signals():
                stopping.signal(number, machine)
            if stopping.is_over(is_ending=bool(seen.ended)) or (stopping.request and not running.started):
                return None
            slow = NONE_SLOW if stopping.request else seen.slow
            if not seen.ended and (wanted := running.planned_restart(slow)):
                if not wanted.save:  # it may be wrong, also where a save was asked for
                    report(self._say, f"{_now()} {wanted.reason}; starting again from what was saved before")
                    return wanted
                if planned is None and stopping.request is None:
                    planned = wanted
                    self._ask_for(planned)
            if incident := running.lost_node(seen.step):
                seen.read()
                return self._ended_for(planned) if seen.ended else incident
            if running.lost_ranks():
                running.wait_for_peers()
                break
            if seen.ended and running.all_ended():
                break  # everything is saved and reported; only Python is still shutting down
            if hang := running.hang():
                seen.read()
                if seen.ended:
                    break  # a process that does not end after everything was saved and reported
                return running.examine(hang, seen.step)
            # The end of a rank is seen at once.
            running.wait(LOOK_SECONDS if stopping.request or seen.ended else running.look_seconds)
        seen.read()
        if seen.ended:
            return self._ended_for(planned)
        return running.lost_node(seen.step) or running.explain(seen.step)

    def _ask_for(self, planned: PlannedRestart) -> None:
        """Ask the ranks to save and end, for a restart. Nothing outside sets a time for that, so they may take any."""
        if StopRequest.read(self._folder.stop_request):
            return  # a user has asked them to stop, by a file
        report(self._say, f"{_now()} {planned.reason}; saving after this step, then starting again")
        StopRequest(DRAIN if planned.leaves else RESTART).write(self._folder.stop_request)

    def _ended_for(self, planned: PlannedRestart | None) -> PlannedRestart | None:
        """Return the planned restart for which the ranks ended; None if they stopped on request, or finished."""
        return planned if self._seen.reason in PLANNED else None

    def _end_attempt(self, ended: JobIncident | PlannedRestart | None) -> Ordered:
        """End the attempt. Returns how long its fault was not seen, and how long the ranks took to be gone."""
        seen, detect = time.monotonic(), None
        if isinstance(ended, JobIncident):
            detect = ended.seconds  # a hang is as old as the newest heartbeat
            if detect is None and (at := self._running.ended_at(ended.rank)) is not None:
                detect = seen - at
            # Twice at the same step: what the processes keep may be the cause.
            keep = self._launch.restart == "partial" and ended.step > self._failed_at
            keep = keep and not self._is_check_due(self._restarts.count + 1)  # ranks that stay keep a device's memory
            self._failed_at = ended.step
            self._kept = self._running.end_attempt([ended.rank] if ended.rank >= 0 else [], keep=keep)
        else:
            # Ranks that were asked to save have ended well. Others may have wrong memory.
            keep = self._launch.restart == "partial" and ended is not None and ended.save
            self._kept = self._running.end_attempt(keep=keep)
        gone = time.monotonic()
        return Ordered(detect=detect, kill=gone - seen, gone_at=gone)

    def _is_check_due(self, restarts: int) -> bool:
        """Return whether the machines are checked after so many restarts."""
        return self._launch.check_every > 0 and restarts % self._launch.check_every == 0

    # -- between two attempts --

    def _goes_on_after(self, ended: JobIncident | PlannedRestart) -> bool:
        """Record why the attempt ended, and decide whether there is another one. Raises as `supervise` does."""
        if isinstance(ended, JobIncident):
            return self._restarts_after(ended)
        self._seen.ended = self._seen.reason = ""
        if self._stopping.request:
            return False
        self._prepare_restart()
        step, kept = self._saved_step(), len(self._kept)
        self.log.write(events.PLANNED_RESTART, reason=ended.reason, step=step, kept=kept)
        return True

    def _restarts_after(self, incident: JobIncident) -> bool:
        self._record_fault(incident)
        if incident.error is None:
            self._require_room(incident)
        incident = _with_next_measure(self._running.respond(incident))
        wait = 0.0
        try:
            wait = self._restarts.wait_after(incident, self._running.log)
        except IngotError:
            if incident.error or not self._stopping.request:
                raise
        if self._stopping.request:
            return False
        self._prepare_restart()
        most, count = self._launch.max_restarts, self._restarts.count
        facts = {"wait_seconds": wait, "kept": len(self._kept), "step": incident.step, "signature": incident.signature}
        facts["adapted"] = incident.adapted
        self.log.write(events.RESTART, attempt=count, of=most, **facts)
        report(self._say, _fault_line(incident, self._saved_step(), self._restarts.recent, most, wait, self._kept))
        return not self._stopped_while_waiting(wait)

    def _require_room(self, incident: JobIncident) -> None:
        """Wait for room for the record of a fault. Raises ResourceError if there is none: a full disk may be the cause,
        for whose record a rank had no room either, and a restart would not be recorded."""
        until = time.monotonic() + _ROOM_SECONDS
        while True:
            try:
                return self.log.require_room()
            except ResourceError:
                if time.monotonic() >= until:
                    report(self._say, f"{_now()} {_who(incident)} {incident.cause} near step {incident.step}")
                    raise
            time.sleep(_POLL_SECONDS)

    def _prepare_restart(self) -> None:
        require_checkpoints(self._folder, self._seen.saved or 0)
        remove_leftovers(self._folder)  # an unfinished checkpoint of a killed rank is not one that is being written
        if (asked := StopRequest.read(self._folder.stop_request)) and asked.reason in PLANNED:
            self._folder.stop_request.unlink(missing_ok=True)

    def _stopped_while_waiting(self, seconds: float) -> bool:
        """Wait before the next attempt. Returns True if something asks the run to stop meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._watch is not None:
                self._watch.require()
            if self._lease is not None:
                self._lease.require()
            if self._stopping.is_over() or self._stopping.request is not None:
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _record_fault(self, incident: JobIncident) -> None:
        self.log.write(
            events.FAULT,
            rank=incident.rank if incident.rank >= 0 else None,
            failure=incident.kind,
            cause=incident.cause,
            code=incident.error.code if incident.error else "",
            step=incident.at_step,
            detected_by=incident.detected_by,
            evidence=str(incident.evidence.relative_to(self._folder.root)) if incident.evidence else "",
            seconds=incident.seconds,
            limit=incident.limit,
            limit_reason=incident.limit_reason,
        )

    # -- the end --

    def _record_end(self) -> None:
        """Record that the job stopped, if no rank did. Raises KeyboardInterrupt if Ctrl-C ended the ranks."""
        seen, stopping = self._seen, self._stopping
        if seen.ended and seen.reason not in PLANNED:
            return
        seen.saved = resume_step(self._folder)  # a rank that was killed may not have reported its last save
        seen.step = max(seen.step, seen.saved)
        reason = stopping.request.reason if stopping.request else REQUESTED
        self.log.write(events.STOPPED, step=seen.step, reason=reason, saved_step=seen.saved)
        if stopping.interrupted:
            raise KeyboardInterrupt(
                f"step {seen.saved} is the newest checkpoint of the {seen.step} steps that were trained"
            )

    def _saved_step(self) -> int:
        return resume_step(self._folder) if self._seen.saved is None else self._seen.saved


def _with_next_measure(incident: JobIncident) -> JobIncident:
    """Return the incident as one that the next attempt does not repeat, if the guard took a measure before the first
    checkpoint: the attempt begins at the first step, and each measure is taken once, so the last one ends the job."""
    error = incident.error
    if error is None or error.code != "E-ROLLBACK-NO-CHECKPOINT" or not (measure := error.facts.get("measure")):
        return incident
    cause = f"cannot go back without a checkpoint ({error.code}), and begins again with the measure {measure!r}"
    return replace(incident, adapted=True, cause=cause)


def _who(incident: JobIncident) -> str:
    return f"rank {incident.rank}" if incident.rank >= 0 else "the job"


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _fault_line(
    incident: JobIncident, saved_step: int, recent: int, max_restarts: int, wait: float, kept: Collection[int]
) -> str:
    stacks = f" (stacks in {incident.evidence})" if incident.evidence else ""
    number = "" if incident.adapted else f" ({recent} of {max_restarts})"
    keep = "; 1 rank keeps its process" if len(kept) == 1 else f"; {len(kept)} ranks keep their processes"
    return (
        f"{_now()} {_who(incident)} {incident.cause} near step {incident.step}{stacks}; "
        f"restarting from step {saved_step}{f' in {wait:.0f} s' if wait else ''}{number}"
        f"{keep if kept else ''}"
    )
