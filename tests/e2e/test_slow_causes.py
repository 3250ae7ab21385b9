"""Real runs of `ingot train` that something around them makes slow: a late link between two hosts, storage that answers
late, a rank that gets a quarter of its time. `ingot explain slow` prints its class, and its cause before all others.
"""

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.board import hosts, killpoints

from ingot.events import read_events
from ingot.schema import events

from .conftest import RUN_FILE, Project, ended, write_tokens

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
# A calm step takes some 10 ms, and several times as long on a busy machine; what is planted takes more than that.
_LINK_SECONDS, _READ_SECONDS = 0.02, 0.05
_PERIOD_SECONDS, _STOPPED = 0.02, 0.75
_NO_SAVES = ("--set", "checkpoint.every_steps=0")


def explained(project: Project, out: str) -> tuple[str, str]:
    """The first class and the first cause, with its evidence, that the command prints. How many cores are free depends
    on other programs of the machine, and is no class."""
    text = project.ingot("explain", "slow", str(project.folder(out).root))
    shown = re.search(r"^class     (.+?) \(\d+% of a step", text, re.M)
    assert shown, text
    causes = re.findall(r"^ *\d+\. (.*)$", text, re.M)
    return shown[1], next(cause for cause in causes if not cause.startswith("no free core"))


@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
def test_a_late_link_between_two_hosts_makes_a_run_communication_bound():
    # Hosts have a memory of their own in place of /dev/shm, where tests have their files.
    with tempfile.TemporaryDirectory(prefix="late-", dir="/tmp") as folder:
        root = Path(folder).resolve()
        write_tokens(root / "tokens")
        (root / "run.toml").write_text(RUN_FILE)
        project = Project(root)
        options = (*_NO_SAVES, "--set", "launch.nodes=2", "--set", "train.steps=24")
        with hosts.Hosts(2, root / "hosts") as two:
            two.degrade(1, delay=_LINK_SECONDS)
            started = []
            try:
                for host in range(2):
                    started.append(project.start("late", *options, within=two.command(host, ())))
                    _joined(project, "late", host + 1)
                for launcher in started:
                    ended(launcher, 0)
            finally:
                for launcher in started:
                    if launcher.poll() is None:
                        os.killpg(launcher.pid, signal.SIGKILL)
                        launcher.communicate()
        found, cause = explained(project, "late")
    assert found.startswith("communication-bound by ")
    assert cause.startswith("exposed collectives") and "every rank waits in collectives" in cause


def _joined(project: Project, out: str, count: int, seconds: float = 120) -> None:
    """Wait until `count` launchers lead a run or have joined it: the first one that is started leads."""
    deadline, actions = time.monotonic() + seconds, ("leads", "joined")
    while sum(e["action"] in actions for e in read_events(project.folder(out).events, events.NODE)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(bool(killpoints.missing()), reason=killpoints.missing())
def test_storage_that_answers_late_makes_a_run_data_bound(project: Project, tmp_path):
    fault = {"DO": "slowread", "WHO": "rank", "BELOW": project.root / "tokens", "MICRO": int(_READ_SECONDS * 1e6)}
    variables = {f"BOARD_{name}": str(value) for name, value in fault.items()}
    library = str(killpoints.build(tmp_path))
    project.train("starved", *_NO_SAVES, "--set", "train.steps=24", LD_PRELOAD=library, **variables)
    found, cause = explained(project, "starved")
    assert found == "data-bound"
    assert cause.startswith("data stall") and "throughout: the storage gives" in cause


def test_a_rank_that_gets_a_quarter_of_its_time_holds_the_run_up(project: Project):
    # Steps that are longer than the stops, so that each has some.
    long = ("--set", "train.global_batch=256", "--set", "train.micro_batch=128", "--set", "train.steps=32")
    process = project.start("held", *_NO_SAVES, *long)
    project.wait_for_step("held", 2, process, seconds=120)
    with _throttled(project.rank_pid("held", 1)):
        ended(process, 0)
    found, cause = explained(project, "held")
    assert found == "held up by a straggler"
    assert cause.startswith("straggler") and "rank 1 on " in cause


@contextmanager
def _throttled(pid: int) -> Iterator[None]:
    """Within the context, a process is stopped most of the time, as by a limit of its processor."""
    over = threading.Event()

    def throttle() -> None:
        with suppress(ProcessLookupError):  # the run has ended
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(_STOPPED * _PERIOD_SECONDS)
                os.kill(pid, signal.SIGCONT)
                over.wait((1 - _STOPPED) * _PERIOD_SECONDS)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
