"""The supervisor and torchrun, with ranks that act by a script instead of training."""

import os
import signal
import threading
import time

import pytest
from tests.expect import refused

from ingot.errors import DataError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import Job, RunFolder
from ingot.trainer.launch.local import LocalJob
from ingot.trainer.launch.supervise import supervise

RANK = """
import os, signal, sys, time
from pathlib import Path
from ingot.errors import DataError
from ingot.events import EventLog
from ingot.trainer.resilience.endings import guarded
from ingot.schema.run_folder import RunFolder

folder, deeds = RunFolder(Path(sys.argv[1])), sys.argv[2].split(",")
rank, attempt = int(os.environ["RANK"]), int(os.environ["INGOT_ATTEMPT"])
deed = deeds[min(attempt, len(deeds) - 1)]
log = EventLog(folder.events)
with guarded(folder, rank):
    log.write("rank_started", rank=rank, pid=os.getpid())
    log.write("progress", step=6)
    time.sleep(0.3)
    if deed == "stop":
        while not folder.stop_request.exists():
            time.sleep(0.02)
        if rank == 0:
            log.write("stopped", step=8)
    elif deed == "finish":
        if rank == 0:
            log.write("finished", step=9)
    elif rank == 1 and deed == "bug":
        raise ValueError(f"index {attempt} is out of range")
    elif rank == 1 and deed == "data":
        raise DataError("E-SHARD-HASH", "block 3 differs", rule="as built", fix="copy it again", block=3)
    elif rank == 1 and deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(60)
"""


@pytest.fixture
def act(tmp_path):
    """`act("kill,finish")`: two ranks; rank 1 is killed in the first attempt, both finish in the second."""
    (tmp_path / "fake_rank.py").write_text(RANK)
    folder = RunFolder(tmp_path / "run")
    printed: list[str] = []

    def run(deeds: str, max_restarts: int = 3):
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        job = Job(module="fake_rank", arguments=(str(folder.root), deeds), processes=2, env={"PYTHONPATH": path})
        return supervise(folder, job, max_restarts=max_restarts, say=printed.append)

    run.folder, run.printed = folder, printed
    return run


def test_starts_again_after_a_kill(act):
    outcome = act("kill,finish")
    assert (outcome.exit_code, outcome.step, outcome.restarts) == (0, 9, 1)
    assert "rank 1 was killed (SIGKILL) near step 6; restarting from step 0 (1 of 3)" in act.printed[0]
    (fault,) = read_events(act.folder.events, events.FAULT)
    assert (fault["rank"], fault["step"]) == (1, 6)
    assert len(list(act.folder.logs.glob("attempt-*.log"))) == 2


def test_the_same_error_twice_is_not_tried_a_third_time(act):
    log, cause = str(act.folder.logs / "attempt-2.log"), "raised ValueError: index 1 is out of range"
    with refused("E-RUN-REPEATS", rank=1, step=6, times=2, cause=cause, log=log) as failed:
        act("bug")
    assert failed.value.exit_code == 93
    assert len(list(read_events(act.folder.events, events.RESTART))) == 1
    assert "index 1 is out of range" in (act.folder.logs / "attempt-2.log").read_text()


def test_what_the_user_has_to_mend_is_not_tried_again(act):
    with refused("E-SHARD-HASH", block=3) as caught:
        act("data")
    assert isinstance(caught.value, DataError) and caught.value.fix == "copy it again"
    assert not list(read_events(act.folder.events, events.RESTART))


def test_the_budget_of_restarts_ends(act):
    with refused("E-RUN-RESTARTS", max_restarts=0):
        act("kill", max_restarts=0)


def test_a_signal_becomes_a_stop_request(act):
    def interrupt():
        while not any(read_events(act.folder.events, events.PROGRESS)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = act("stop")
    thread.join()
    assert (outcome.exit_code, outcome.step, outcome.finished) == (10, 8, False)
    assert "saving first" in act.printed[0]
    assert not act.folder.stop_request.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_launcher_that_is_killed_without_a_word_has_a_cause(tmp_path):
    job = Job(module="a_module_that_is_never_reached", arguments=(), processes=1, env={})
    running = LocalJob(job, attempt=0, log=tmp_path / "log")
    assert running.last_words() == ""
    running.kill()
    assert running.last_words() == "torchrun was killed (signal 9)"
