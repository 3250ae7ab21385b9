import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.data.workers import run_tasks, throttled
from ingot.errors import DataError


@dataclass(frozen=True)
class Job:
    number: int
    folder: str = ""

    @property
    def label(self) -> str:
        return f"job-{self.number}"


def square(job, report):
    for count in range(job.number):
        report(count)
    return job.number**2, os.getpid()


def refuse(job, report):
    raise DataError(f"{job.label} is no crawl file", rule="r", fix="f")


def crash(job, report):
    raise ValueError("a bug")


def die_once(job, report):
    marker = Path(job.folder, "died")
    if job.number == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job.number


def die(job, report):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(job, report):
    time.sleep(60)


def quiet(done, documents):
    pass


@pytest.mark.parametrize("workers", [1, 2])
def test_results_in_order_of_tasks(workers):
    seen = []
    results = run_tasks(square, [Job(n) for n in range(5)], workers=workers, progress=lambda d, n: seen.append(d))
    assert [value for value, _ in results] == [0, 1, 4, 9, 16]
    assert (os.getpid() in {pid for _, pid in results}) == (workers == 1)
    assert seen[-1] == 5


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_come_back_as_they_were(workers):
    with pytest.raises(DataError, match="job-0 is no crawl file") as error:
        run_tasks(refuse, [Job(0)], workers=workers, progress=quiet)
    assert (error.value.rule, error.value.fix) == ("r", "f")
    with pytest.raises(ValueError, match="a bug"):
        run_tasks(crash, [Job(0)], workers=workers, progress=quiet)


def test_a_killed_worker_is_replaced_once(tmp_path):
    jobs = [Job(n, str(tmp_path)) for n in range(3)]
    assert run_tasks(die_once, jobs, workers=2, progress=quiet) == [0, 1, 2]


def test_a_task_that_kills_its_workers_is_named():
    with pytest.raises(DataError, match=r"job-7 was killed by SIGKILL \(out of memory\?\).*2 times"):
        run_tasks(die, [Job(7)], workers=2, progress=quiet)


def test_a_hung_worker_has_a_deadline():
    started = time.monotonic()
    with pytest.raises(DataError, match="job-7 said nothing for"):
        run_tasks(hang, [Job(7)], workers=2, progress=quiet, stall_seconds=1)
    assert time.monotonic() - started < 20


def interrupt_me(job, report):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    return "deaf"


def test_ctrl_c_is_left_to_the_parent():
    assert run_tasks(interrupt_me, [Job(1)], workers=2, progress=quiet) == ["deaf"]


def test_reports_are_rare():
    calls = []
    report = throttled(calls.append)
    for count in range(10_000):
        report(count)
    assert len(calls) < 3
