"""The commands that change a run: refused while it trains, on this machine or on another one."""

import contextlib
import shutil
import threading

import pytest
from tests.checkpoints import model_settings, write_checkpoint
from tests.expect import refused

from ingot.report.lineage.repair import repair_ledger
from ingot.stores.local import LocalStore
from ingot.theory.rules import recorded_run
from ingot.trainer.checkpoint.fence import Epoch, alive_name, newest_local_epoch, record_name, to_bytes
from ingot.trainer.checkpoint.manifest import candidate_folders, late_folders
from ingot.trainer.launch.retain import prune_checkpoints
from ingot.trainer.launch.stored import fetch_checkpoint, open_run, push_checkpoint
from ingot.trainer.lease import RunLease
from ingot.trainer.main import _begin

from .conftest import RUN_FILE

ELSEWHERE = "another-boot pid:[1] 7 7"  # a process of which nobody here knows whether it lives


@pytest.fixture
def run(folder, tmp_path):
    """A run with a store, whose first attempt saved the steps 10 and 20 and uploaded both."""
    folder.root.mkdir(parents=True)
    (tmp_path / "store").mkdir()
    folder.config.write_text(f'{RUN_FILE}[checkpoint.remote]\nurl = "file://{tmp_path}/store"\n')
    tier = open_run(folder.root)[1]
    with RunLease(folder, tier, 60.0) as lease:
        lease.take()
    for step in (10, 20):
        write_checkpoint(folder, step, model_settings(folder), epoch=1)
        push_checkpoint(folder.root, step)
    return folder


COMMANDS = {
    "fetch": lambda path, say: fetch_checkpoint(path, say=say),
    "prune": lambda path, say: prune_checkpoints(path, dry_run=False, say=say),
    "repair": lambda path, say: repair_ledger(path, say=say),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("in_store", [False, True])
def test_a_run_that_another_machine_trains_is_left_alone(run, tmp_path, name, in_store):
    place = LocalStore(tmp_path / "store" if in_store else run.root)
    record = Epoch(epoch=2, run=newest_local_epoch(run.root).run, process=ELSEWHERE, seconds=5.0, host="far")
    place.write(record_name(2), [to_bytes(record)])
    place.write(alive_name(2), [b"0"])
    beat = threading.Thread(target=lambda: place.write(alive_name(2), [b"1"]))
    with refused("E-RUN-BUSY", owner="far:0"):
        COMMANDS[name](run.root, lambda line: line.startswith("lease") and beat.start())
    beat.join()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_launcher_finds_that_a_command_is_at_work(run, name):
    """The command begins an attempt of its own, so a launcher that was suspended publishes nothing more."""
    COMMANDS[name](run.root, print)
    assert newest_local_epoch(run.root).epoch == 2


def test_a_fetched_checkpoint_counts_although_an_earlier_attempt_saved_it(run):
    shutil.rmtree(run.checkpoint(20))
    fetch_checkpoint(run.root)
    assert candidate_folders(run.checkpoints) == [run.checkpoint(20), run.checkpoint(10)]
    shutil.rmtree(run.root / "lease")
    shutil.rmtree(run.checkpoints)
    fetch_checkpoint(run.root)  # on an empty disk, with the run file alone
    assert (candidate_folders(run.checkpoints), late_folders(run.checkpoints)) == ([run.checkpoint(20)], [])


@pytest.mark.parametrize("local", [(), (10,)], ids=str)
def test_under_torchrun_the_attempt_begins_with_the_checkpoint_of_the_store(run, local):
    for step in {10, 20} - set(local):
        shutil.rmtree(run.checkpoint(step))
    with contextlib.ExitStack() as stack:
        assert _begin(run, recorded_run(run.config), print, stack) == 2
    assert newest_local_epoch(run.root).adopted.keys() == set(map(str, (*local, 20)))
    assert candidate_folders(run.checkpoints)[0] == run.checkpoint(20)
