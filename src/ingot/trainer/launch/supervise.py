"""Keep a job running: start it, notice what goes wrong, start it again where that helps, stop it on request.

The supervisor starts torchrun with no restarts of its own and starts it again itself. That costs torchrun's import
(1.3 s) per restart; for it, every decision is taken in one place, after the dead attempt is gone, with its cause known:
a restart inside torchrun begins before anybody could say that it will not help, and it waits 30 s for a hung peer.
"""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import EXIT_OK, EXIT_PREEMPTED
from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.job import Job
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.trainer.checkpoint.manifest import candidate_folders, list_checkpoints
from ingot.trainer.launch.local import LocalJob, end_of
from ingot.trainer.launch.watch import Watch
from ingot.trainer.resilience.incident import Incident, explain, refuse_restart
from ingot.trainer.resilience.rank import clear_endings, read_endings

_POLL_SECONDS = 0.05
# After a rank was lost whose exit code was not seen, torchrun has this long to report it; then everything is killed.
_REPORT_SECONDS = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended. exit_code: 0 finished, 10 stopped on request.

    step: the last one done; saved_step: of the newest verified checkpoint, lower only if stopping itself went wrong.
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


def supervise(
    folder: RunFolder, job: Job, *, max_restarts: int, say: Callable[[str], None], show_output: bool = True
) -> Outcome:
    """Run `job` to its end. The caller holds the run's lock.

    The first SIGINT, SIGTERM or SIGHUP asks the ranks to save and stop; the second kills them and raises
    KeyboardInterrupt. Raises the IngotError a rank ended with, or RunFailed when starting again does not help. No
    process of the job is left when it returns or raises.
    """
    started = time.monotonic()
    folder.stop_request.unlink(missing_ok=True)
    log = EventLog(folder.events)
    watch = Watch(folder.events)
    incidents: list[Incident] = []
    stdout = None if show_output else subprocess.DEVNULL
    try:
        with _signals_counted() as signals:
            while True:
                attempt = len(incidents)
                clear_endings(folder)
                watch.new_attempt()
                running = LocalJob(job, attempt=attempt, log=_attempt_log(folder), stdout=stdout)
                try:
                    incident = _attend(folder, job, running, watch, signals, say)
                finally:
                    running.kill()
                if incident is None:
                    break
                incidents.append(incident)
                _record_fault(log, incident)
                error = refuse_restart(incidents, max_restarts, running.log)
                if error and (incident.error or not signals.count):
                    raise error
                if signals.count:
                    break
                log.write(events.RESTART, attempt=attempt + 1, of=max_restarts)
                _tell(say, _fault_line(incident, _saved_step(folder, watch), attempt + 1, max_restarts))
    finally:
        log.close()
        folder.stop_request.unlink(missing_ok=True)
    return Outcome(
        exit_code=EXIT_OK if watch.ended == events.FINISHED else EXIT_PREEMPTED,
        step=watch.step if watch.ended else _saved_step(folder, watch),
        saved_step=_saved_step(folder, watch),
        restarts=len(incidents),
        seconds=time.monotonic() - started,
        run=folder.root,
    )


def _attend(
    folder: RunFolder, job: Job, running: LocalJob, watch: Watch, signals: "_Signals", say: Callable[[str], None]
) -> Incident | None:
    """Watch one attempt until it ends. None when it finished or stopped on request, else what went wrong."""
    asked, dead, lost_at = False, {}, 0.0
    while running.poll() is None:
        watch.read()
        while watch.refused:
            _tell(say, f"refused   {watch.refused.pop(0)}; trying the next older one")
        if signals.count >= 2:
            raise KeyboardInterrupt
        if signals.count and not asked:
            asked = True
            write_atomic(folder.stop_request, "save and stop\n")
            _tell(say, "stopping at the next log line, saving first; once more stops now and loses what is not saved")
        if not lost_at and (dead := _lost_ranks(folder, watch)):
            lost_at = time.monotonic()
        if lost_at and (None not in dead.values() or time.monotonic() - lost_at > _REPORT_SECONDS):
            break
        if watch.ended and len(read_endings(folder)) == job.processes:
            break  # all is saved and said; what is left is Python and torchrun tearing down
        time.sleep(_POLL_SECONDS)
    watch.read()
    if watch.ended:
        return None
    endings = read_endings(folder)
    codes = running.exit_codes() | {rank: code for rank, code in dead.items() if code is not None}
    return explain(job.processes, endings, list(dead), codes, watch.step, running.last_words())


def newest_step(folder: RunFolder) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    newest = candidate_folders(folder.checkpoints)[:1]
    return int(newest[0].name.removeprefix("step-")) if newest else 0


def resume_step(folder: RunFolder) -> int:
    """Step of the newest checkpoint that is not known to be damaged, 0 if there is none. Tensors are not hashed.

    Known: its manifest says so, or it was refused on loading and not saved anew since.
    """
    refused: set[int] = set()
    for event in read_events(folder.events, events.CHECKPOINT, events.CHECKPOINT_REFUSED):
        (refused.add if event["kind"] == events.CHECKPOINT_REFUSED else refused.discard)(event.get("step", 0))
    good = (c.step for c in list_checkpoints(folder.checkpoints) if c.manifest and c.step not in refused)
    return next(good, 0)


def _saved_step(folder: RunFolder, watch: Watch) -> int:
    return resume_step(folder) if watch.saved is None else watch.saved


def _tell(say: Callable[[str], None], text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone (SIGHUP); the run goes on
        say(text)


def _lost_ranks(folder: RunFolder, watch: Watch) -> dict[int, int | None]:
    """Ranks whose process is gone, but not because they came to a good end, with their exit codes where seen."""
    ends = {rank: end for rank, pid in watch.ranks.items() if (end := end_of(pid))}
    if not ends:
        return {}
    endings = read_endings(folder)  # read after the processes: a rank that ended well has left word by now
    return {rank: end.exit_code for rank, end in ends.items() if rank not in endings or endings[rank].kind}


def _attempt_log(folder: RunFolder) -> Path:
    number = 1
    while (path := folder.logs / f"attempt-{number}.log").exists():
        number += 1
    return path


def _record_fault(log: EventLog, incident: Incident) -> None:
    log.write(
        events.FAULT,
        rank=incident.rank if incident.rank >= 0 else None,
        cause=incident.cause,
        step=incident.step,
        detected_by="supervisor",
    )


def _fault_line(incident: Incident, saved_step: int, attempt: int, max_restarts: int) -> str:
    who = f"rank {incident.rank}" if incident.rank >= 0 else "the job:"
    return (
        f"{time.strftime('%H:%M:%S')} {who} {incident.cause} near step {incident.step}; "
        f"restarting from step {saved_step} ({attempt} of {max_restarts})"
    )


@dataclass
class _Signals:
    count: int = 0


@contextlib.contextmanager
def _signals_counted() -> Iterator[_Signals]:
    """Count requests to stop instead of dying of them. Those that the caller ignores (nohup) stay ignored."""
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
