"""The drill kills the rank that runs now, once, and a difference from the twin is seen."""

import json
import subprocess
import time

import pytest
from tests.expect import refused

from ingot.events import EventLog, read_events
from ingot.quickstart import drill
from ingot.quickstart.drill import RankKiller, compare_with_twin
from ingot.schema.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, and the folder of its twin."""
    folder = RunFolder(tmp_path / "run")
    for step in (10, 20):
        folder.checkpoint(step).mkdir(parents=True)
        (folder.checkpoint(step) / "manifest.json").write_text(str(step))
    folder.ledger.mkdir()
    return folder, RunFolder(tmp_path / "twin")


@pytest.fixture
def rank():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def log(folder, *lines):
    written = EventLog(folder.events)
    for kind, facts in lines:
        written.write(kind, **facts)
    written.close()


def running(process, step):
    return ("rank_started", {"rank": 1, "pid": process.pid}), ("progress", {"step": step})


def test_the_rank_is_killed_and_the_twin_gets_the_earlier_checkpoint(run, rank):
    folder, twin = run
    killer = RankKiller(folder, twin, rank=1, after_step=25)
    log(folder, *running(rank, 25))
    killer.start()
    assert rank.wait(timeout=5) == -9
    killer.stop()
    assert [e["step"] for e in read_events(folder.events, "drill")] == [25]
    assert (twin.checkpoint(10) / "manifest.json").read_text() == "10"
    assert not twin.checkpoint(20).exists()


def test_process_ids_of_an_earlier_start_are_left_alone(run, rank):
    folder, twin = run
    log(folder, *running(rank, 25))
    time.sleep(0.01)
    killer = RankKiller(folder, twin, rank=1, after_step=25)
    killer.start()
    time.sleep(4 * drill.POLL_SECONDS)
    killer.stop()
    assert rank.poll() is None
    assert not list(read_events(folder.events, "drill"))


def test_a_run_is_drilled_once(run, rank):
    folder, twin = run
    log(folder, ("drill", {"action": "kill", "step": 25, "rank": 1, "pid": 1}))
    killer = RankKiller(folder, twin, rank=1, after_step=25)
    log(folder, *running(rank, 30))
    killer.start()
    killer.join(timeout=5)
    assert not killer.is_alive()
    assert rank.poll() is None


@pytest.mark.parametrize(("loss", "equal"), [(0.75, True), (0.75 + 2**-50, False)])
def test_the_last_bit_of_a_loss_counts(run, loss, equal):
    folder, twin = run
    log(folder, ("step", {"step": 21, "loss": 9.0, "grad_norm": 1.0}))
    log(folder, ("drill", {"action": "kill", "step": 25, "rank": 1, "pid": 1}))
    time.sleep(0.01)
    log(folder, ("run_started", {"from_step": 20}), ("step", {"step": 21, "loss": loss, "grad_norm": 1.0}))
    log(twin, ("step", {"step": 21, "loss": 0.75, "grad_norm": 1.0}))
    compared = compare_with_twin(folder, twin)
    assert (compared.equal, compared.steps, compared.resumed_from) == (equal, 1, 20)
    assert (compared.max_difference == 0) == equal
    assert json.loads((folder.root / "twin.json").read_text())["equal"] is equal


def test_a_step_that_only_the_twin_made_is_an_error(run):
    folder, twin = run
    with refused("E-DRILL-NO-TWIN"):
        compare_with_twin(folder, twin)
    log(folder, ("drill", {"action": "kill", "step": 25, "rank": 1, "pid": 1}))
    time.sleep(0.01)
    log(folder, ("run_started", {"from_step": 20}))
    log(twin, ("step", {"step": 21, "loss": 0.75, "grad_norm": 1.0}))
    with refused("E-DRILL-STEP-MISSING", step=21):
        compare_with_twin(folder, twin)
