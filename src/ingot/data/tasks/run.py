"""The driver: gives tasks to a runner, and reports the progress of a build."""

import contextlib
import fcntl
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.data.tasks.store import Store, run_task
from ingot.data.tasks.task import R, Task, decode
from ingot.errors import RunBusyError
from ingot.storage import closing_lock
from ingot.units import format_seconds

_LOOK_SECONDS = 0.5
_LOOK_SHARE = 0.05  # at most this share of the time is spent on reading the progress of tasks


@dataclass(frozen=True)
class PhaseStatus:
    """The progress of one call of `run_all`.

    done, total: numbers of tasks, including those that were finished before. records, counts: sums over the tasks that
    run or ended in this call; counts is name -> number ("kept", drop rules). seconds: time since the call began.
    seconds_left: an estimate from the tasks done so far; None until a task has ended.
    """

    done: int
    total: int
    records: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    seconds_left: float | None = None


ReportProgress = Callable[[float, str], None]  # (fraction done, text)
Watch = Callable[[PhaseStatus], None]
Look = Callable[[Collection[Task], Collection[Task]], None]  # (ended since the last call, running now)


class Runner(Protocol):
    """An object that does tasks, in any order and several at once, by calling `run_task` in some process."""

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        """Return when every task is finished in `store`. watch(ended, running) is called about twice a second.

        Raises the error that a task raised (other tasks may end first); DataError if a task cannot be done.
        """
        ...


class RunTasks(Protocol):
    """A function that does tasks and returns their results in the same order. doing: text for the progress line."""

    def __call__(self, tasks: Sequence[Task[R]], doing: str, /) -> list[R]: ...


class Inline:
    """A runner that does one task after the other, in this process."""

    def run(self, tasks: Sequence[Task], store: Store, watch: Look) -> None:
        for task in tasks:
            run_task(task, store, beat=lambda task=task: watch([], [task]))
            watch([task], [])


def run_all(tasks: Sequence[Task[R]], store: Store, runner: Runner, watch: Watch | None = None) -> list[R]:
    """Do `tasks` and return their results, in the order of `tasks`. Finished tasks are not done again.

    watch(status) is called about twice a second, and at the end. Raises the errors of the runner; RunBusyError if
    another process is running tasks of this store.
    """
    with _only_driver(store):
        done = store.finished_keys(task.key for task in tasks)
        missing = {task.key: task for task in tasks if task.key not in done}
        tally = _Tally(store, len(tasks), len(tasks) - len(missing), watch)
        if missing:
            tally.look((), ())  # show the beginning at once
            runner.run(list(missing.values()), store, tally.look)
        tally.finish()
        return [tally.results[t.key] if t.key in tally.results else store.result(t) for t in tasks]


def describe(status: PhaseStatus, unit: str = "files") -> str:
    """Return a progress text. unit: the plural noun for tasks.

    '12,340 records, 410/s, 3 of 8 files, 2 min left; kept 31%; most dropped by url.duplicate 22%'
    """
    parts = []
    if status.records:
        rate = status.records / max(status.seconds, 1e-9)
        parts += [f"{status.records:,} records", f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"]
    parts.append(f"{status.done:,} of {status.total:,} {unit}")
    if status.seconds_left is not None and status.done < status.total:
        left = status.seconds_left  # rounded: it is an estimate
        parts.append(f"{format_seconds(round(left, -1) if left >= 60 else max(round(left), 1))} left")
    text, whole = ", ".join(parts), sum(status.counts.values())
    if whole:
        text += f"; kept {status.counts.get('kept', 0) / whole:.0%}"
        drops = {rule: number for rule, number in status.counts.items() if rule != "kept"}
        if drops and (most := max(sorted(drops), key=drops.__getitem__)) and drops[most]:
            text += f"; most dropped by {most} {drops[most] / whole:.0%}"
    return text


class _Tally:
    """Sums over the progress of tasks. A finished task is read once, the running tasks about twice a second."""

    def __init__(self, store: Store, total: int, done: int, watch: Watch | None):
        self.results: dict[str, Any] = {}  # key -> result, of the tasks that ended in this call
        self._store, self._total, self._found, self._watch = store, total, done, watch
        self._records, self._counts = 0, Counter[str]()
        self._started = time.monotonic()
        self._due = 0.0

    def look(self, ended: Collection[Task], running: Collection[Task]) -> None:
        for task in ended:
            if task.key not in self.results:
                facts = self._store.facts(task)
                self.results[task.key] = decode(task.function.result, facts["result"])
                self._records += facts["records"]
                self._counts.update(facts["counts"])
        if self._watch is None or (now := time.monotonic()) < self._due:
            return
        self._watch(self._status(running))
        self._due = now + max(_LOOK_SECONDS, (time.monotonic() - now) / _LOOK_SHARE)

    def finish(self) -> None:
        if self._watch is not None:
            self._watch(self._status(()))

    def _status(self, running: Collection[Task]) -> PhaseStatus:
        under_way = [self._store.progress(task) for task in running]
        seen = sum(progress.records for progress in under_way)
        counts = Counter(self._counts)
        for progress in under_way:
            counts.update(progress.counts)
        ended, seconds = len(self.results), time.monotonic() - self._started
        left = self._total - self._found - ended
        seconds_left = None
        if ended and self._records:  # a task is assumed to have the mean records of those that ended
            seconds_left = max(self._records / ended * left - seen, 0) * seconds / (self._records + seen)
        elif ended:
            seconds_left = seconds / ended * left
        records = self._records + seen
        return PhaseStatus(self._found + ended, self._total, records, dict(counts), seconds, seconds_left)


@contextlib.contextmanager
def _only_driver(store: Store) -> Iterator[None]:
    """Lock the store, because two drivers would do all work twice. The kernel unlocks it when this process dies."""
    store.root.mkdir(parents=True, exist_ok=True)
    # A file opened for writing: some network file systems lock nothing else.
    file = os.open(store.root / "driver", os.O_RDWR | os.O_CREAT, 0o666)
    with closing_lock(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(file, 200).decode(errors="replace").strip()
            raise RunBusyError(
                "E-STORE-BUSY",
                f"another process works on {store.root}{f' ({who})' if who else ''}",
                rule="only one build may use a folder at a time",
                fix="wait for that process or end it, or use another --out",
                path=str(store.root),
                owner=who,
            ) from None
        except OSError:
            pass  # a file system without locks: two drivers still give the correct result
        with contextlib.suppress(OSError):  # the text only helps to find this process
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
