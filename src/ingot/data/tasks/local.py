"""A runner that does tasks in worker processes of this machine, any of which may die or hang at any time.

A worker does many tasks, one after the other, because tasks may be small. A task is done once its result is in the
store, even if the worker dies right after that. A worker that dies, or reports nothing for too long, is replaced; a new
process tries its task again and leaves out a record at which several attempts died. The number of attempts is limited:
see `_RunningTask.hopeless`.
"""

import json
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ingot.data.tasks.forks import OUT_OF_MEMORY, ForkServer
from ingot.data.tasks.run import Look
from ingot.data.tasks.store import Store, forget_attempt, note_death, too_many
from ingot.data.tasks.task import Task, error_from_json
from ingot.errors import DataError
from ingot.units import format_bytes

MEMORY_BYTES = 3 << 29  # 1.5 GiB; libraries use 0.1 GiB of it (pyarrow and duckdb another 0.1 GiB)
RECORD_SECONDS = 60.0
STALL_SECONDS = 300.0
_LOOK_SECONDS = 0.5
_DYING_SECONDS = 10.0  # between SIGKILL and the report of the end
_POISONED_RECORDS = 16  # most records of one task to leave out; with more, the task itself must be at fault
_DEATHS = 12  # most deaths of one task at records that are not left out
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class Local:
    """A runner that uses up to `workers` processes of this machine.

    The processes wait for the next call until `close`, or until this process ends, even if it is killed; a `with` block
    is optional. memory_bytes: memory limit per worker (RLIMIT_DATA: private writable memory); a task that needs more
    gets a MemoryError, which counts as a death at its record. record_seconds: CPU time on one record after which the
    worker is considered hung. stall_seconds: wall time without a report of the task (`Attempt.at`) after which the
    worker is killed. preload: modules to import once before workers are forked, besides those of the tasks.
    """

    def __init__(
        self,
        workers: int,
        *,
        memory_bytes: int = MEMORY_BYTES,
        record_seconds: float = RECORD_SECONDS,
        stall_seconds: float = STALL_SECONDS,
        preload: Sequence[str] = (),
    ):
        self.workers, self.memory_bytes = max(workers, 1), memory_bytes
        self.record_seconds, self.stall_seconds = record_seconds, stall_seconds
        self.preload = tuple(preload)
        self._server: ForkServer | None = None
        self._crew: list[_Worker] = []

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """End all workers now."""
        if self._server is not None:
            self._server.stop()
        for worker in self._crew:
            worker.pipe.close()
        self._server, self._crew = None, []

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        """Return when all tasks are done.

        Raises the first error that a task raised (other running tasks are stopped, and a later call does them again);
        DataError if too many attempts at one task die.
        """
        modules = sorted({task.function.module for task in tasks} | set(self.preload))
        waiting = deque(_RunningTask(task) for task in tasks)
        look_at = 0.0
        try:
            while waiting or any(worker.job for worker in self._crew):
                self._hand_out(waiting, store, modules)
                ended = self._collect(waiting, store)
                if (now := time.monotonic()) >= look_at:
                    look_at = now + _LOOK_SECONDS
                    self._end_the_silent(store, now)
                    watch(ended, self._running())
                elif ended:
                    watch(ended, self._running())
        except BaseException:
            stopped = self._running()
            self.close()
            for task in stopped:
                forget_attempt(task, store)
            raise

    def _running(self) -> list[Task]:
        return [worker.job.task for worker in self._crew if worker.job]

    def _hand_out(self, waiting: "deque[_RunningTask]", store: Store, modules: list[str]) -> None:
        while waiting and len(self._running()) < self.workers and not (self._server and self._server.gone):
            worker = self._free_worker(modules, fresh=bool(waiting[0].deaths))
            if worker.give(waiting[0], store) or not worker.used:
                waiting.popleft()  # even if a new worker is already dead: `_bury` handles that, and the loop ends
            else:  # the worker was killed while it was idle
                self._dismiss(worker)

    def _free_worker(self, modules: list[str], fresh: bool) -> "_Worker":
        """Return an idle worker, or a new one.

        fresh: only a worker that has done no task, so that effects of earlier tasks are not blamed on a record.
        """
        for worker in [worker for worker in self._crew if not worker.job]:
            if not (fresh and worker.used):
                return worker
            if len(self._crew) >= self.workers:
                self._dismiss(worker)
        if self._server is None:
            self._server = ForkServer(self.memory_bytes)
            weakref.finalize(self, self._server.stop)
        worker = _Worker(*self._server.fork(modules))
        self._crew.append(worker)
        return worker

    def _dismiss(self, worker: "_Worker") -> None:
        worker.pipe.close()  # the worker ends when it notices that
        self._crew.remove(worker)

    def _collect(self, waiting: "deque[_RunningTask]", store: Store) -> list[Task]:
        """Wait for answers. Return the tasks that ended. Tasks whose workers died are put back into `waiting`."""
        assert self._server is not None
        wait([self._server.control, *(w.pipe for w in self._crew if not w.hung_up)], timeout=_LOOK_SECONDS)
        codes = self._server.ended()
        ended: list[Task] = []
        for worker in list(self._crew):
            answer = worker.listen()  # after `ended`: the last answer of a dead worker is in its pipe by then
            if answer and worker.job:
                if "failed" in answer:
                    raise error_from_json(answer["failed"])
                ended.append(worker.job.task)
                worker.job, worker.used = None, True
                if answer["retire"]:
                    self._dismiss(worker)
                    continue
            if self._server.gone or worker.number in codes:
                self._bury(worker, codes.get(worker.number), waiting, ended, store)
        if self._server.gone:
            self.close()
        return ended

    def _bury(
        self, worker: "_Worker", code: int | None, waiting: "deque[_RunningTask]", ended: list[Task], store: Store
    ):
        """Handle the end of a worker process: count its task as done, queue the task again, or raise DataError."""
        job, worker.job = worker.job, None
        if code is None:
            worker.wait_gone()
        self._dismiss(worker)
        if job is None:
            return
        if store.finished(job.task):
            ended.append(job.task)
            return
        kind, why = worker.verdict or _cause(code, self.memory_bytes)
        job.deaths.append((note_death(job.task, store, kind), kind))
        if job.hopeless():
            raise DataError(
                "E-WORKER-LOST",
                f"the worker on {job.task.title} {why} at {_place(job.deaths[-1][0])}, "
                f"after {len(job.deaths)} deaths on this file",
                rule="a worker that dies is replaced, and a record at which workers die repeatedly is left out, "
                "but the number of attempts is limited",
                fix="give more memory with --memory or use fewer --workers, or leave this file out; "
                "the same command continues",
                task=job.task.title,
                record=job.deaths[-1][0],
                deaths=len(job.deaths),
            )
        waiting.appendleft(job)

    def _end_the_silent(self, store: Store, now: float) -> None:
        """Kill the workers that hang on a record or report nothing for too long."""
        for worker in self._crew:
            if worker.job is None or self._server is None:
                continue
            if worker.verdict is None:
                worker.verdict = worker.silent(store, now, self.record_seconds, self.stall_seconds)
                if worker.verdict:
                    worker.killed_at = now
                    self._server.kill(worker.number)
            elif now - worker.killed_at > _DYING_SECONDS:
                self._server.give_up()  # the fork server does not answer; this kills it and all workers


class _RunningTask:
    """A task, and the deaths of its attempts in this call as pairs (record, kind)."""

    def __init__(self, task: Task):
        self.task, self.deaths = task, list[tuple[int, str]]()

    def hopeless(self) -> bool:
        """Return True if one more attempt is useless: too many died outside records, or at too many records."""
        at = {place: [kind for record, kind in self.deaths if record == place] for place, _ in self.deaths}
        poisoned = [place for place, kinds in at.items() if place >= 0 and too_many(kinds)]
        elsewhere = sum(len(kinds) for place, kinds in at.items() if place not in poisoned)
        again = any(len(at[place]) > 2 * _DEATHS for place in poisoned)  # the task's function ignores `skip`
        return too_many(at.get(-1, [])) or len(poisoned) > _POISONED_RECORDS or elsewhere > _DEATHS or again


class _Worker:
    """A worker process as this process sees it: its pipe, its task, and when it last reported progress."""

    def __init__(self, number: int, pipe: Connection):
        self.number, self.pipe = number, pipe
        self.pid = 0  # until the worker reports it
        self.job: _RunningTask | None = None
        self.used = self.hung_up = False
        self.verdict: tuple[str, str] | None = None  # (kind of death, reason) if this process killed the worker
        self.killed_at = self._heard = self._cpu = 0.0
        self._sign: tuple[int, int] = (0, 0)

    def give(self, job: _RunningTask, store: Store) -> bool:
        """Send a task to the worker. Return False if the worker cannot receive it."""
        self.job, self._heard, self._cpu, self._sign = job, time.monotonic(), 0.0, (0, -1)
        message = {"task": job.task.to_json(), "store": str(store.root.absolute())}
        try:
            self.pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            return False
        return True

    def listen(self) -> dict | None:
        """Return the worker's answer about its task, or None while the task runs."""
        try:
            while not self.hung_up and self.pipe.poll():
                message = json.loads(self.pipe.recv_bytes())
                if "pid" not in message:
                    return message
                self.pid = message["pid"]
        except (EOFError, OSError):
            self.hung_up = True  # the fork server reports how it ended
        return None

    def wait_gone(self) -> None:
        """Wait after SIGKILL until the worker's pipe is closed, which shows that the worker has ended."""
        deadline = time.monotonic() + _DYING_SECONDS
        while not self.hung_up and time.monotonic() < deadline:
            wait([self.pipe], timeout=0.1)
            self.listen()

    def silent(self, store: Store, now: float, record_seconds: float, stall_seconds: float) -> tuple[str, str] | None:
        """Return (kind of death, reason) if the worker has to be killed, else None.

        The time on one record is CPU time, not wall time, because a record must not be blamed for a busy machine.
        """
        assert self.job is not None
        progress = store.progress(self.job.task)
        if (sign := (progress.beats, progress.record)) != self._sign:
            self._sign, self._heard, self._cpu = sign, now, _cpu_seconds(self.pid)
        elif progress.record >= 0 and _cpu_seconds(self.pid) - self._cpu > record_seconds:
            return "hung", f"worked for {record_seconds:.0f} s of CPU time"
        elif now - self._heard > stall_seconds:
            return "stalled", f"reported nothing for {stall_seconds:.0f} s"
        return None


def _cause(code: int | None, memory_bytes: int) -> tuple[str, str]:
    """Return (kind of death, reason) for an exit code as Popen.returncode; None if the exit code is unknown."""
    if code is None:
        return "killed", "was lost with the process that starts workers"
    if code == OUT_OF_MEMORY:
        return "crashed", f"ran out of its {format_bytes(memory_bytes)} of memory"
    if code >= 0:
        return "crashed", f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return "killed" if -code in _EXTERNAL_SIGNALS else "crashed", f"was killed by {signal.Signals(-code).name}{hint}"


def _place(record: int) -> str:
    return f"record {record:,}" if record >= 0 else "no record in particular"


def _cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
