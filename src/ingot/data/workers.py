"""Tasks in worker processes that may die or hang without taking the build with them.

One process per task: a crawl file is minutes of work, a process starts in milliseconds (from a fork server that has
no threads). A worker that dies or goes silent is tried once more, then the build stops with the task's name.
"""

import contextlib
import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from ingot.errors import DataError, IngotError

STALL_SECONDS = 300.0  # of silence; a worker reports about twice a second while it gets anywhere
_REPORT_SECONDS = 0.5
_ATTEMPTS = 2


class Task(Protocol):
    @property
    def label(self) -> str:
        """What is worked on, for messages: the crawl file."""
        ...


Report = Callable[[int], None]  # called by a task with the documents it has done so far


def run_tasks(
    function: Callable[[Any, Report], Any],
    tasks: Sequence[Any],
    *,
    workers: int,
    progress: Callable[[int, int], None],
    stall_seconds: float = STALL_SECONDS,
) -> list:
    """[function(task, report) for every task], at most `workers` at once; function and tasks must be picklable.

    progress(tasks done, documents done) is called in this process. With one worker everything runs in this process.
    Raises what a task raised; DataError when a worker dies, or is silent for `stall_seconds`, twice on one task.
    No worker outlives this call, also on Ctrl-C.
    """
    if workers <= 1:
        return _run_here(function, tasks, progress)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ingot.data.curate"])
    waiting = [(number, 1) for number in reversed(range(len(tasks)))]
    running: list[_Worker] = []
    results: dict[int, Any] = {}
    documents = [0] * len(tasks)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, attempt = waiting.pop()
                with deaf_to_ctrl_c():
                    running.append(_Worker(context, function, tasks[number], number, attempt))
            wait([pipe for worker in running for pipe in (worker.pipe, worker.process.sentinel)], timeout=1)
            for worker in list(running):
                worker.listen()
                documents[worker.number] = worker.documents
                if worker.answer is not None:
                    running.remove(worker)
                    results[worker.number] = worker.finish()
                elif worker.gone(stall_seconds):
                    running.remove(worker)
                    waiting.append((worker.number, worker.attempt + 1))
                    worker.give_up_after_last_attempt()
            progress(len(results), sum(documents))
    finally:
        for worker in running:
            worker.kill()
    return [results[number] for number in range(len(tasks))]


@contextlib.contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Ctrl-C goes to the whole group, and the parent ends its workers: those started in this block do not hear it.

    Not even while they import.
    """
    resource_tracker.ensure_running()  # a process beside the first worker; its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_here(function, tasks, progress) -> list:
    results, documents = [], 0
    for task in tasks:
        latest = 0

        def report(count: int) -> None:
            nonlocal latest
            latest = count
            progress(len(results), documents + count)  # noqa: B023 (called before the loop goes on)

        results.append(function(task, throttled(report)))
        documents += latest
        progress(len(results), documents)
    return results


def throttled(report: Report) -> Report:
    """`report`, called at most twice a second."""
    due = time.monotonic() + _REPORT_SECONDS

    def maybe(count: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_SECONDS
            report(count)

    return maybe


class _Worker:
    """One process with one task. It sends ("at", documents) now and then, and last ("done" or "failed", value)."""

    def __init__(self, context, function, task, number: int, attempt: int):
        self.number, self.attempt, self.label = number, attempt, task.label
        self.documents, self.answer, self.why, self.hung_up = 0, None, "", False
        self.heard = time.monotonic()
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(function, task, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        try:
            while self.answer is None and not self.hung_up and self.pipe.poll():
                kind, value = self.pipe.recv()
                self.heard = time.monotonic()
                if kind == "at":
                    self.documents = value
                else:
                    self.answer = (kind, value)
        except (EOFError, OSError):  # it died; `gone` says so
            self.hung_up = True

    def finish(self):
        """The task's result. Raises what the task raised."""
        kind, value = self.answer or ("failed", RuntimeError("no answer"))
        self.kill(wait_seconds=10)
        if kind == "failed":
            raise value
        return value

    def gone(self, stall_seconds: float) -> bool:
        """Whether it died without an answer or hangs; then it is ended for sure."""
        silent = time.monotonic() - self.heard
        if self.process.is_alive() and silent < stall_seconds:
            return False
        if not self.process.is_alive() and not self.hung_up:
            return False  # its last words may still be in the pipe
        self.why = f"said nothing for {silent:.0f} s" if self.process.is_alive() else _exit_text(self.process.exitcode)
        self.kill()
        return True

    def give_up_after_last_attempt(self) -> None:
        if self.attempt >= _ATTEMPTS:
            raise DataError(
                f"the worker on {self.label} {self.why} after about {self.documents:,} documents, "
                f"{_ATTEMPTS} times in a row",
                rule="a lost worker is replaced once; what other files gave is kept",
                fix="give it more memory or fewer --workers, or leave this file out; the same command continues",
            )

    def kill(self, wait_seconds: float = 0.0) -> None:
        self.process.join(wait_seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.pipe.close()


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def _work(function, task, pipe: Connection) -> None:
    try:
        answer = ("done", function(task, throttled(lambda count: pipe.send(("at", count)))))
    except IngotError as error:
        answer = ("failed", error)
    except Exception as error:
        answer = ("failed", _portable(error))
    with contextlib.suppress(BrokenPipeError):  # the parent was killed: nobody is left to be told
        pipe.send(answer)
    pipe.close()


def _portable(error: Exception) -> Exception:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    error.add_note("in a worker:\n" + text)
    return error
