"""Runs with a remote tier, on forked ranks with real writer and uploader processes: the disk of the node is lost."""

import os
import shutil
import signal
from dataclasses import replace

import pytest

from ingot.drill.restores import read_restores
from ingot.errors import RunBusyError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.run import RemoteCheckpoints
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.manifest import list_checkpoints, verify_checkpoint

from .test_background_saves import run_rank
from .test_loop import files_of, ledger_proof, step_facts

RUN = {"dp_shard": 2, "steps": 12, "every_steps": 4, "guard": {"proven_steps": 0}}


def stored(folder, kind=events.CHECKPOINT_STORED):
    return [event["step"] for event in read_events(folder.events, kind)]


def test_a_run_whose_disk_is_lost_continues_from_the_store_bit_for_bit(fork_ranks, make_run, tmp_path):
    (tmp_path / "store").mkdir()
    place = RemoteCheckpoints(url=f"file://{tmp_path}/store", keep=1)
    undisturbed = make_run("undisturbed", mode="async", **RUN)
    fork_ranks(run_rank, 2, undisturbed)
    folder = make_run("run", mode="async", remote=place, **RUN)
    fork_ranks(run_rank, 2, folder, None, 8)
    assert stored(folder)[-1] == 8
    before, run_file = step_facts(folder), folder.config.read_bytes()
    shutil.rmtree(folder.root)
    folder.root.mkdir()
    folder.config.write_bytes(run_file)
    fork_ranks(run_rank, 2, folder)
    assert [(e["step"], e["store"]) for e in read_events(folder.events, events.CHECKPOINT_FETCHED)] == [(8, place.url)]
    (loaded,) = read_events(folder.events, events.CHECKPOINT_LOADED)
    (fetched,) = read_restores(folder)
    assert (loaded["step"], fetched.tier) == (8, "store") and 0 < loaded["bytes"] == fetched.disk_bytes
    assert before | step_facts(folder) == step_facts(undisturbed)
    assert files_of(folder) == files_of(undisturbed)
    ledger_proof(folder, load_run(folder.config))
    assert stored(folder)[-1] == 12
    names = sorted(path.name for path in (tmp_path / "store" / "checkpoints").iterdir())
    assert names == ["step-00000012"]


def finish_uploads(run):
    """Wait until all that was saved is in the store; the next save starts another uploader."""
    if run.place.is_first:
        run.uploader.end()
        assert run.uploader.wait(60) and run.uploader.left == 0


def give_up(run):
    raise RunBusyError("E-RUN-BUSY", "stop here")


@pytest.mark.slow
def test_a_flipped_bit_on_the_disk_is_mended_from_the_store(fork_ranks, make_run, tmp_path):
    """Saves of the weights alone go to the store too, by their own number; training continues from a checkpoint."""
    (tmp_path / "store").mkdir()
    rules = {"remote": RemoteCheckpoints(url=f"file://{tmp_path}/store"), "weights_every": "2 steps", "weights_keep": 1}
    folder = make_run(**rules, **RUN)

    def look(run):
        if run.place.is_first:
            assert [path.name for path in (tmp_path / "store/weights").glob("step-*")] == ["step-00000010"]

    fork_ranks(run_rank, 2, folder, {3: finish_uploads, 7: finish_uploads}, 8)
    (weights,) = (tmp_path / "store/weights").glob("step-*")
    assert weights.name == "step-00000006"
    uploads = [(e["what"], e["step"]) for e in read_events(folder.events, events.CHECKPOINT_STORED)]
    assert [step for what, step in uploads if what == WEIGHTS] == [2, 6] and uploads[-1] == (FULL, 8)
    path = folder.checkpoint(8) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)

    def run_again(rank, ranks):
        lines = []
        return run_rank(rank, ranks, folder, {11: give_up}, say=lines.append), lines

    (code, lines), (other, _) = fork_ranks(run_again, 2)
    assert code == other == "E-RUN-BUSY"
    refused, fetched = (line for line in lines if line.startswith(("refused", "fetched")))
    assert f"trying the copy in {rules['remote'].url}, then the next older one" in refused and "in place of" in fetched
    assert stored(folder, events.CHECKPOINT_REFUSED) == [8]
    shutil.rmtree(tmp_path / "store/weights")  # as if the upload of step 10 had been killed
    fork_ranks(run_rank, 2, folder, {9: lambda run: finish_uploads(run) or look(run)})
    assert [e["from_step"] for e in read_events(folder.events, events.RUN_STARTED)] == [0, 8, 8]
    for one in list_checkpoints(folder.checkpoints):
        verify_checkpoint(one.path)


def test_checkpoints_that_were_overtaken_before_a_kill_are_named_after_it(fork_ranks, make_run, tmp_path):
    """The upload of step 2 takes until the end of the attempt, and what the uploader knows ends with it."""
    (tmp_path / "store").mkdir()
    slow = RemoteCheckpoints(url=f"file://{tmp_path}/store", bytes_per_second=1000)
    settings = RUN | {"dp_shard": 1, "every_steps": 2, "steps": 8}
    folder = make_run(remote=slow, **settings)
    assert fork_ranks(run_rank, 1, folder, {7: give_up}) == ["E-RUN-BUSY"]
    assert stored(folder, events.CHECKPOINT) == [2, 4, 6] and not stored(folder)
    fork_ranks(run_rank, 1, make_run(remote=replace(slow, bytes_per_second=0), **settings))
    first, *_ = logged = list(read_events(folder.events, events.CHECKPOINT_STORED))
    assert first["left_out"][:2] == [2, 4]
    assert sorted(step for one in logged for step in (one["step"], *one.get("left_out", ()))) == [2, 4, 6, 8]


def test_training_goes_on_without_the_store_and_its_uploader(fork_ranks, make_run, tmp_path):
    """After the start, a file is where the store was. Then the uploader is killed; the next checkpoint starts another
    one."""
    (tmp_path / "store").mkdir()
    folder = make_run(remote=RemoteCheckpoints(url=f"file://{tmp_path}/store"), **RUN)

    def lose_place(run):
        if run.place.is_first:
            (tmp_path / "store").rename(tmp_path / "aside")
            (tmp_path / "store").write_text("not a folder")

    def make_place(run):
        if run.place.is_first:
            while not list(read_events(folder.events, events.CHECKPOINT_NOT_STORED)):
                for event in run.uploader.reports():
                    run.log(**event)
            os.kill(run.uploader._process.pid, signal.SIGKILL)
            (tmp_path / "store").unlink()
            (tmp_path / "aside").rename(tmp_path / "store")

    fork_ranks(run_rank, 2, folder, {1: lose_place, 6: make_place})
    assert stored(folder, events.CHECKPOINT_NOT_STORED) == [4]
    assert stored(folder)[-1] == 12
    assert stored(folder, events.FINISHED) == [12]
