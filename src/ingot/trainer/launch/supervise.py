"""Keep a job running: start it, detect failures, start it again if that can help, stop it on request.

Every decision is made in one place, after the dead attempt is gone and its cause is known. torchrun's own restarts
begin before the cause is known, and wait 30 s for a hung peer.
"""

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ingot.errors import EXIT_OK, EXIT_PREEMPTED
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.run_folder import Job, RunFolder
from ingot.storage import write_atomic
from ingot.trainer.checkpoint.manifest import candidate_folders
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.checkpoint.vanished import require_checkpoints
from ingot.trainer.launch.local import LocalJob
from ingot.trainer.resilience.endings import JobIncident, clear_endings, explain, read_endings, refuse_restart

_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class EventLogReader:
    """A reader of the event log of a running job. `read` takes in the lines written since construction.

    step: the last step logged. saved: the step of the newest checkpoint that was verified,
    on loading or after saving; None before the first, 0 if the run starts at step 0. ended: "finished", "stopped" or
    "". refused: why checkpoints were not used; the caller empties this list.
    """

    path: Path
    step: int = 0
    saved: int | None = None
    ended: str = ""
    refused: list[str] = field(default_factory=list)
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
        elif kind == events.CHECKPOINT_REFUSED:
            self.refused.append(event["reason"])
        elif kind in (events.FINISHED, events.STOPPED):
            self.ended, self.step = kind, event["step"]


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The end of a job. exit_code: 0 if finished, 10 if stopped on request.

    step: the last completed step. saved_step: the step of the newest verified checkpoint; lower than `step` only if the
    stop itself failed.
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
    folder: RunFolder, job: Job, *, max_restarts: int, say: Callable[[str], None], show_output: bool = True
) -> JobResult:
    """Run `job` to its end, with restarts after failures. The caller holds the run's lock.

    The first SIGINT, SIGTERM or SIGHUP asks the ranks to save and stop; the second kills them and raises
    KeyboardInterrupt. Raises the IngotError that a rank ended with, RunFailed if a restart would not help or none is
    left, CheckpointError if the saved checkpoints vanished. No process of the job is left when this function returns or
    raises.
    """
    started = time.monotonic()
    folder.stop_request.unlink(missing_ok=True)
    log = EventLog(folder.events)
    log_reader = EventLogReader(folder.events)
    incidents: list[JobIncident] = []
    running = LocalJob(job, stdout=None if show_output else subprocess.DEVNULL)
    try:
        with _signals_counted() as signals:
            while True:
                attempt = len(incidents)
                clear_endings(folder)
                running.start(attempt=attempt, log=_attempt_log(folder))
                incident = _follow(folder, running, log_reader, signals, say)
                running.end_attempt()
                if incident is None:
                    break
                incidents.append(incident)
                _record_fault(log, incident)
                error = refuse_restart(incidents, max_restarts, running.log)
                if error and (incident.error or not signals.count):
                    raise error
                if signals.count:
                    break
                require_checkpoints(folder, log_reader.saved or 0)
                log.write(events.RESTART, attempt=attempt + 1, of=max_restarts)
                _report(say, _fault_line(incident, _saved_step(folder, log_reader), attempt + 1, max_restarts))
    finally:
        running.close()
        log.close()
        folder.stop_request.unlink(missing_ok=True)
    return JobResult(
        exit_code=EXIT_OK if log_reader.ended == events.FINISHED else EXIT_PREEMPTED,
        step=log_reader.step if log_reader.ended else _saved_step(folder, log_reader),
        saved_step=_saved_step(folder, log_reader),
        restarts=len(incidents),
        seconds=time.monotonic() - started,
        run=folder.root,
    )


def _follow(
    folder: RunFolder, running: LocalJob, log_reader: EventLogReader, signals: "_Signals", say: Callable[[str], None]
) -> JobIncident | None:
    """Follow one attempt until it ends. Returns None if it finished or stopped on request, otherwise the incident."""
    asked = False
    while running.running():
        log_reader.read()
        while log_reader.refused:
            _report(say, f"refused   {log_reader.refused.pop(0)}; trying the next older one")
        if signals.count >= 2:
            raise KeyboardInterrupt
        if signals.count and not asked:
            asked = True
            write_atomic(folder.stop_request, "save and stop\n")
            _report(say, "stopping after this step, saving first; a second signal stops now and does not save")
        if _lost_ranks(folder, running):
            break
        if log_reader.ended and len(read_endings(folder)) == running.job.processes:
            break  # everything is saved and reported; only Python is still shutting down
        time.sleep(_POLL_SECONDS)
    log_reader.read()
    if log_reader.ended:
        return None
    lost = _lost_ranks(folder, running)
    return explain(
        running.job.processes,
        read_endings(folder),
        lost,
        running.exit_codes,
        log_reader.step,
        running.last_words(),
        running.server_code,
    )


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    newest = candidate_folders(folder.checkpoints)[:1]
    return int(newest[0].name.removeprefix("step-")) if newest else 0


def _saved_step(folder: RunFolder, log_reader: EventLogReader) -> int:
    return resume_step(folder) if log_reader.saved is None else log_reader.saved


def _report(say: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone (SIGHUP); the run continues
        say(text)


def _lost_ranks(folder: RunFolder, running: LocalJob) -> list[int]:
    """Return the ranks that have ended, but not normally, in the order in which they ended."""
    if not running.exit_codes:
        return []
    endings = read_endings(folder)  # a rank that ended normally has recorded that
    return [rank for rank in running.exit_codes if rank not in endings or endings[rank].kind]


def _attempt_log(folder: RunFolder) -> Path:
    number = 1
    while (path := folder.logs / f"attempt-{number}.log").exists():
        number += 1
    return path


def _record_fault(log: EventLog, incident: JobIncident) -> None:
    log.write(
        events.FAULT,
        rank=incident.rank if incident.rank >= 0 else None,
        cause=incident.cause,
        step=incident.step,
        detected_by="supervisor",
    )


def _fault_line(incident: JobIncident, saved_step: int, attempt: int, max_restarts: int) -> str:
    who = f"rank {incident.rank}" if incident.rank >= 0 else "the job"
    return (
        f"{time.strftime('%H:%M:%S')} {who} {incident.cause} near step {incident.step}; "
        f"restarting from step {saved_step} ({attempt} of {max_restarts})"
    )


@dataclass
class _Signals:
    """The number of stop signals received."""

    count: int = 0


@contextlib.contextmanager
def _signals_counted() -> Iterator[_Signals]:
    """Count stop signals instead of ending on them. Signals that the caller ignores (nohup) stay ignored."""
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python delivers signals to the main thread only
        return

    def count(*_) -> None:
        signals.count += 1

    before = {s: signal.getsignal(s) for s in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, count)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
