import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import pytest
from tests.expect import refused

from ingot.data.tasks import forks, local
from ingot.data.tasks.drill import first_phase, run_job
from ingot.data.tasks.local import Local, _RunningTask
from ingot.data.tasks.run import Inline, PhaseStatus, run_all
from ingot.data.tasks.store import Store
from ingot.errors import DataError


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    return run_job(Store(tmp_path_factory.mktemp("undisturbed")), Inline(), tasks=8, records=30)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_does_not_decide_the_bytes(tmp_path, undisturbed, workers):
    statuses: list[PhaseStatus] = []
    with Local(workers) as runner:
        assert run_job(Store(tmp_path), runner, tasks=8, records=30, watch=statuses.append) == undisturbed
    ends = [status for status in statuses if status.done == status.total]
    assert {status.total for status in ends} == {8, 4, 1}
    assert max(status.records for status in ends) == 8 * 30


@pytest.mark.parametrize(
    ("kind", "attempts", "options"),
    [
        ("abort", 4, {}),
        ("segfault", 4, {}),
        ("exit", 4, {}),
        ("kill", 7, {}),
        ("memory", 4, {"memory_bytes": 300 << 20}),
        ("loop", 3, {"record_seconds": 0.3}),
        ("sleep", 4, {"stall_seconds": 1.5}),  # a busy machine starts no task within 0.4 s
    ],
)
def test_a_record_that_ends_its_process_is_left_out_and_all_else_is_kept(tmp_path, kind, attempts, options):
    store, log = Store(tmp_path / "s"), tmp_path / "log"
    tasks = first_phase(3, 20, faults={7: kind}, log=log)
    with Local(2, **options) as runner:
        results = run_all(tasks, store, runner)
    whole = run_all(first_phase(3, 20, faults={7: "nothing"}), Store(tmp_path / "whole"), Inline())
    assert results[1:] == whole[1:]
    assert results[0].pop("read.killed_worker") == 1
    assert sum(results[0].values()) == sum(whole[0].values()) - 1
    assert log.read_text().split().count(tasks[0].key) == attempts
    assert log.read_text().count("\n") == attempts + 2
    for name in ("attempts", "progress", "deaths"):
        assert not list((store.root / name).iterdir())


def test_several_bad_records_of_one_file(tmp_path):
    tasks = first_phase(1, 20, faults={3: "abort", 4: "exit", 19: "segfault"})
    with Local(1) as runner:
        assert run_all(tasks, Store(tmp_path), runner)[0]["read.killed_worker"] == 3


def test_a_task_that_dies_at_no_record_is_named(tmp_path):
    tasks = first_phase(2, 5, faults={-1: "abort"})
    with Local(1) as runner, refused("E-WORKER-LOST", task="made-0", record=-1, deaths=3):
        run_all(tasks, Store(tmp_path), runner)
    assert not list((tmp_path / "attempts").iterdir())


def test_deaths_without_end_are_ended():
    def job(deaths):
        made = _RunningTask(first_phase(1, 1)[0])
        made.deaths = deaths
        return made.hopeless()

    assert not job([(-1, "crashed")] * 2)
    assert job([(-1, "crashed")] * 3)
    assert not job([(-1, "killed")] * 5)
    assert not job([(record, "crashed") for record in range(16) for _ in range(3)])
    assert job([(record, "crashed") for record in range(17) for _ in range(3)])  # too many bad records
    assert not job([(record, "killed") for record in range(12)])
    assert job([(record, "killed") for record in range(13)])  # each time elsewhere
    assert job([(5, "crashed")] * 30)  # it is not left out


def test_errors_come_back_as_they_were(tmp_path):
    with Local(2) as runner:
        with refused("E-DRILL-REFUSED", kind="refuse") as error:
            run_all(first_phase(4, 20, faults=dict.fromkeys([7], "refuse")), Store(tmp_path), runner)
        assert isinstance(error.value, DataError)
        assert (error.value.rule, error.value.fix) == ("a rule", "a fix")
        with pytest.raises(RuntimeError, match=r"(?s)ValueError: a bug in made-0.*drill.py.*in misbehave"):
            run_all(first_phase(4, 20, faults=dict.fromkeys([7], "bug")), Store(tmp_path), runner)
        assert run_all(first_phase(4, 20), Store(tmp_path), runner)  # usable afterwards
    assert not list((tmp_path / "attempts").iterdir())
    assert not list((tmp_path / "progress").iterdir())


def test_workers_stay_for_the_next_call_and_end_with_close(tmp_path, children, until):
    before = children(os.getpid())
    with Local(2) as runner:
        seen = []
        for number in range(2):
            run_all(first_phase(8, 5 + number, wait=0.01), Store(tmp_path), runner)
            (server,) = [pid for pid in children(os.getpid()) if pid not in before]
            seen.append(children(server))
        assert seen[0] == seen[1]
        assert len(seen[0]) == 2
    until(lambda: children(os.getpid()) == before)


def test_idle_workers_and_the_fork_server_may_be_killed(tmp_path, undisturbed, children):
    before = children(os.getpid())
    with Local(2) as runner:
        for round in range(3):
            run_all(first_phase(4, 5 + round), Store(tmp_path), runner)
            (server,) = [pid for pid in children(os.getpid()) if pid not in before]
            for pid in (children(server), [server])[round % 2]:
                os.kill(pid, signal.SIGKILL)
        assert run_job(Store(tmp_path / "job"), runner, tasks=8, records=30) == undisturbed


def test_a_stopped_fork_server_stops_nothing(tmp_path, children, monkeypatch):
    """A stopped fork server cannot end a silent worker: it is killed with all workers."""
    before = children(os.getpid())
    timer = threading.Timer(
        0.3, lambda: [os.kill(pid, signal.SIGSTOP) for pid in children(os.getpid()) if pid not in before]
    )
    timer.start()
    tasks = first_phase(1, 5, faults={2: "sleep"})
    monkeypatch.setattr(local, "_DYING_SECONDS", 0.3)
    with Local(1, stall_seconds=0.4) as runner:
        (result,) = run_all(tasks, Store(tmp_path), runner)
    assert result["read.killed_worker"] == 1


def test_it_runs_without_importing_the_callers_script_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nprint('script')\n"
        "from ingot.data.tasks.drill import first_phase\nfrom ingot.data.tasks.local import Local\n"
        "from ingot.data.tasks.run import run_all\nfrom ingot.data.tasks.store import Store\n"
        "run_all(first_phase(2, 5), Store(Path(sys.argv[1])), Local(2))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "s")], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("script\n", "")


_DRIVER = """
import sys
from pathlib import Path
from ingot.data.tasks.drill import run_job
from ingot.data.tasks.local import Local
from ingot.data.tasks.store import Store
runner, wait, log = Local(2, stall_seconds=1.0), float(sys.argv[2]), Path(sys.argv[3])
print(run_job(Store(Path(sys.argv[1])), runner, tasks=8, records=30, wait=wait, log=log))
"""


def drive(root, seconds, log=os.devnull) -> subprocess.Popen:
    command = [sys.executable, "-c", _DRIVER, str(root), str(seconds), str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_driver_and_the_same_command_goes_on(tmp_path, undisturbed, children, alive, until, how):
    driver = drive(tmp_path / "s", 0.015)
    until(lambda: len(family(driver.pid, children)) == 3)
    until(lambda: any((tmp_path / "s" / "done").glob("*/*")))
    members = family(driver.pid, children)
    os.killpg(driver.pid, how)  # as a terminal does with Ctrl-C
    driver.communicate(timeout=10)
    assert driver.returncode in (-how, 1)
    until(lambda: not any(alive(pid) for pid in members), 2.0)
    if how == signal.SIGINT:
        assert not list((tmp_path / "s" / "attempts").iterdir())
    finished = len(list((tmp_path / "s" / "done").glob("*/*")))
    assert 0 < finished < 13
    again = drive(tmp_path / "s", 0, tmp_path / "log")
    assert again.communicate(timeout=60)[0].strip() == undisturbed
    assert (tmp_path / "log").read_text().count("\n") == 13 - finished


def family(driver: int, children) -> list[int]:
    """The fork server and the workers."""
    return [pid for server in children(driver) for pid in (server, *children(server))]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_kills_at_random_change_nothing(tmp_path, undisturbed, children, until, times):
    """SIGKILL of a worker, the fork server or the driver, or SIGSTOP of a worker, in random order."""
    pick, log, root = random.Random(5), tmp_path / "log", tmp_path / "s"
    kinds = ["worker", "server", "driver", "stop"] * times
    pick.shuffle(kinds)
    driver, redone_at_most = drive(root, 0.02, log), 0
    for kind in kinds:
        until(lambda: len(family(driver.pid, children)) == 3 or driver.poll() is not None)  # noqa: B023
        time.sleep(pick.uniform(0.0, 0.2))
        server, *workers = family(driver.pid, children) or [driver.pid]
        target = {"driver": driver.pid, "server": server}.get(kind) or pick.choice(workers or [server])
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        redone_at_most += 1 if target in workers else 2
        if kind == "driver":
            driver.communicate(timeout=20)
            driver = drive(root, 0.02, log)
    out, errors = driver.communicate(timeout=60)
    assert out.strip() == undisturbed, errors
    attempts = log.read_text().split()
    assert len(set(attempts)) == 13
    assert len(attempts) - 13 <= redone_at_most  # one per worker that had a task
    for name in ("attempts", "progress", "deaths"):
        assert not list((root / name).iterdir())


def test_half_a_message_of_a_stopped_process_stops_nothing(monkeypatch):
    """The reader gives up, and the silence ends the worker."""
    monkeypatch.setattr(forks, "ANSWER_SECONDS", 1)
    ours, theirs = socket.socketpair()
    forks._never_blocks(ours)
    worker = local._Worker(1, Connection(ours.detach()))
    theirs.send(b"\0\0\1\0{")  # 256 bytes were promised
    assert worker.listen() is None
    assert worker.hung_up
    worker.pipe.close()
    theirs.close()


def test_other_systems_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with refused("E-WORKERS-PLATFORM", platform="darwin"):
        run_all(first_phase(1, 1), Store(tmp_path), Local(2))
