"""Commands that look at the checkpoints of a disk, of a store, and of the disks of nodes."""

import json
import shutil
import socket
from dataclasses import replace

import pytest
from tests.checkpoints import NO_TENSORS, model_settings, write_checkpoint, write_weights
from tests.expect import named, refused, reported

from ingot.cli.main import main
from ingot.events import EventLog
from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS, FileEntry, file_of
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.storage import sha256_bytes, write_atomic
from ingot.stores.memory import MemoryStore
from ingot.trainer.checkpoint.manifest import read_manifest, write_manifest
from ingot.trainer.checkpoint.places import Places, name_run, with_hash
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.launch.inspect import IN_STORE, RESUMES_HERE, inspect_checkpoints
from ingot.trainer.launch.listing import list_run
from ingot.trainer.launch.stored import push_checkpoint

from .conftest import RUN_FILE

RANKS = 4
ENTRY = FileEntry(bytes=len(NO_TENSORS), sha256=sha256_bytes(NO_TENSORS))


@pytest.fixture
def run(folder, tmp_path):
    """The steps 10 and 20 of a run on the disk and in its store."""
    (tmp_path / "store").mkdir()
    folder.root.mkdir(parents=True)
    folder.config.write_text(f'{RUN_FILE}[checkpoint.remote]\nurl = "file://{tmp_path}/store"\n')
    for step in (10, 20):
        write_checkpoint(folder, step, model_settings(folder))
        push_checkpoint(folder.root, step)
    return folder


@pytest.fixture
def spread(run, tmp_path):
    """Step 30 of four ranks, whose files are on two disks: ranks 0 and 2 on the first one, and the log of who ran."""
    disks = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for disk in disks:
        disk.mkdir()
    setting = f"[checkpoint]\ndisks = {json.dumps([*map(str, disks)])}\n[checkpoint.remote]"
    run.config.write_text(run.config.read_text().replace("[checkpoint.remote]", setting))
    name_run(run)
    write_checkpoint(run, 30, model_settings(run), world=RANKS, files={file_of(rank): ENTRY for rank in range(RANKS)})
    (run.checkpoint(30) / file_of(0)).unlink()
    places = Places(run.checkpoint(30))
    for rank in range(RANKS):
        write_atomic(places.own_folder(rank) / with_hash(file_of(rank), ENTRY.sha256), NO_TENSORS)
    return run


def ranks_ran(run: RunFolder, *hosts: str, step: int = 30) -> None:
    log = EventLog(run.events)
    for rank, host in enumerate(hosts):
        log.write(events.RANK_STARTED, rank=rank, host=host)
    log.write(events.CHECKPOINT, step=step)


def unmount(disk) -> None:
    shutil.rmtree(disk)
    disk.mkdir()


def marks(run):
    return {(save.step, save.kind): save.resumes_here for save in list_run(run.root).saves}


def test_files_that_this_machine_wrote_and_lacks_are_lost(spread, tmp_path, capsys):
    ranks_ran(spread, *[socket.gethostname()] * RANKS)
    assert main(["ckpt", "verify", str(spread.root)]) == main(["ckpt", "ls", str(spread.root)]) == 0
    capsys.readouterr()
    unmount(tmp_path / "nvme1")
    assert main(["ckpt", "ls", str(spread.root)]) == 21
    shown = capsys.readouterr().out
    assert "2 of 4 tensor files are not on this machine" in shown and "FILES LOST" in shown
    assert [step for (step, _), here in marks(spread).items() if here] == [20]
    assert main(["ckpt", "verify", str(spread.root)]) == 21
    assert "unchecked 2 tensor files that are not on this machine" in capsys.readouterr().out.splitlines()
    _, twenty, thirty = inspect_checkpoints(spread.root, hash_files=True).checkpoints
    assert (thirty.state, thirty.unchecked, twenty.note) == ("NO", 2, RESUMES_HERE)
    assert named([thirty.note], "2 of 4", file_of(1), file_of(3), tmp_path / "nvme1")


def test_files_of_other_machines_are_not_checked_here(spread, tmp_path, capsys):
    """Also if the ranks start again on other machines later."""
    ranks_ran(spread, socket.gethostname(), "far", socket.gethostname(), "far")
    ranks_ran(spread, *[socket.gethostname()] * RANKS, step=40)
    unmount(tmp_path / "nvme1")
    inspected = inspect_checkpoints(spread.root, hash_files=True)
    row = inspected.checkpoints[-1]
    assert (row.step, row.state, row.unchecked, inspected.exit_code) == (30, "part", 2, 0)
    assert named([row.note], "2 of 4", "not checked here", "far") and row.note.endswith(RESUMES_HERE)
    assert main(["ckpt", "ls", str(spread.root), "--json"]) == 0
    (disk,) = (save["disk"] for save in json.loads(capsys.readouterr().out)["checkpoints"] if save["step"] == 30)
    assert (disk["lost"], disk["damage"]) == (0, "") and named([disk["absent"]], "2 of 4", "far")


def test_lost_files_that_the_store_has_are_fetched(spread, tmp_path):
    ranks_ran(spread, *[socket.gethostname()] * RANKS)
    push_checkpoint(spread.root, 30)
    unmount(tmp_path / "nvme1")
    row = inspect_checkpoints(spread.root, hash_files=True).checkpoints[-1]
    assert row.state == "NO" and f"the store has step 30: ingot ckpt fetch {spread.root} --step 30" in row.note
    assert row.note.endswith(RESUMES_HERE)  # its ranks fetch what they lack
    assert main(["ckpt", "fetch", str(spread.root), "--step", "30"]) == 0
    assert inspect_checkpoints(spread.root, hash_files=True).exit_code == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_has_its_copy_in_the_store_named(run, capsys):
    """The table names it, and so does the error of every command that reads the checkpoint."""
    flip(run.checkpoint(20) / file_of(0))
    fetch = f"ingot ckpt fetch {run.root} --step 20"
    row = inspect_checkpoints(run.root, hash_files=True).checkpoints[-1]
    assert row.state == "NO" and f"the store has step 20: {fetch}" in row.note and row.note.endswith("--step 20")
    assert main(["ckpt", "push", str(run.root), "--json"]) == 21
    assert named([reported(capsys.readouterr().out, "E-CKPT-HASH", stored_step=20)["fix"]], fetch)
    shutil.rmtree(run.checkpoints)
    EventLog(run.events).write(events.CHECKPOINT, step=20)
    assert main(["ckpt", "verify", str(run.root), "--json"]) == 21
    assert named([reported(capsys.readouterr().out, "E-CKPT-VANISHED", stored_step=20)["fix"]], fetch)


def test_weights_alone_have_their_own_copy(run, capsys):
    write_weights(run, 20)
    push_checkpoint(run.root, 20, kind=WEIGHTS)
    flip(run.weights.checkpoint(20) / file_of(0))
    notes = [row.note for row in inspect_checkpoints(run.root, hash_files=True).checkpoints]
    assert notes == ["", RESUMES_HERE, notes[2]] and notes[2].endswith("--step 20 --weights")


def test_damage_in_the_store_is_found_by_reading_and_mended_by_a_push(run, tmp_path, capsys):
    """So is a file of the ledger that is gone there. The damaged object has its size, and its manifest is as it was."""
    write_weights(run, 20)
    push_checkpoint(run.root, 20, kind=WEIGHTS)
    assert main(["ckpt", "verify", str(run.root), "--store"]) == 0
    (tensors,) = (tmp_path / "store/checkpoints/step-00000020").glob("rank*")
    flip(tensors)
    (segment,) = (tmp_path / "store/ledger").glob("steps-00000001-00000010*")
    segment.unlink()
    assert main(["ckpt", "verify", str(run.root)]) == 0
    rows = inspect_checkpoints(run.root, hash_files=True, stored=True).checkpoints
    assert [(row.step, row.kind, row.state) for row in rows if IN_STORE in row.note] == [
        (10, FULL, "NO"),
        (20, FULL, "NO"),
        (20, WEIGHTS, "yes"),
    ]
    assert all(named([row.note], f"ingot ckpt push {run.root} --step {row.step}") for row in rows if row.state == "NO")
    assert main(["ckpt", "verify", str(run.checkpoint(20)), "--store"]) == 21
    assert push_checkpoint(run.root, 20).bytes == len(NO_TENSORS)
    assert push_checkpoint(run.root, 10).bytes == segment.stat().st_size
    assert push_checkpoint(run.root, 20).bytes == push_checkpoint(run.root, 10).bytes == 0
    assert main(["ckpt", "verify", str(run.root), "--store"]) == 0


def test_the_store_is_read_only_if_there_is_one(run, tmp_path):
    (tmp_path / "store").rename(tmp_path / "aside")
    with refused("E-STORE-NO-FOLDER"):
        inspect_checkpoints(run.root, hash_files=True, stored=True)
    run.config.write_text(RUN_FILE)
    with refused("E-TIER-NONE", run=str(run.root)):
        inspect_checkpoints(run.root, hash_files=True, stored=True)


def test_a_step_that_was_trained_again_replaces_damaged_files_of_nodes(spread):
    """The same bits have the same names, so objects from before its manifest do not count as sent."""
    store = MemoryStore()
    tier = RemoteTier(spread, store, RemoteCheckpoints(url="s3://bucket/run"))
    saved = read_manifest(spread.checkpoint(30))
    for epoch in (1, 2):
        write_manifest(spread.checkpoint(30), replace(saved, epoch=epoch))
        assert tier.push(30) >= RANKS * len(NO_TENSORS)
        assert (tier.push(30), tier.damaged_objects(30)) == (0, [])
        (name,) = (one.name for one in store.list("checkpoints") if "rank-00003" in one.name)
        store._objects[name] = (bytes(len(NO_TENSORS)), store._objects[name][1])
        assert tier.damaged_objects(30) == [file_of(3)]


def test_segments_that_cannot_be_computed_come_from_the_store(run, tmp_path, capsys):
    """The tokens of this run are gone, so the order of samples is unknown."""
    first, second = sorted(run.ledger.iterdir())
    whole = first.read_bytes()
    first.unlink()
    second.write_bytes(bytes(second.stat().st_size))
    assert main(["ckpt", "repair", str(run.root)]) == 0
    assert "fetched from the store" in capsys.readouterr().out and first.read_bytes() == whole
    first.unlink()
    for stored in (tmp_path / "store/ledger").glob(f"{first.stem}*"):
        flip(stored)
    assert main(["ckpt", "repair", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"].keys() == {"10"}
    assert not first.exists()


def test_a_step_of_the_other_kind_is_named(run, capsys):
    write_weights(run, 30)
    for command, fix in ((["push", "--step"], "--weights"), (["fetch", "--step"], "--weights"), (["pin"], "10, 20")):
        assert main(["ckpt", command[0], str(run.root), *command[1:], "30", "--json"]) == 2
        error = reported(capsys.readouterr().out, "E-CKPT-STEP-UNKNOWN", step=30, steps=[10, 20])
        assert "the weights alone" in error["found"] and fix in error["fix"]
    push_checkpoint(run.root, 30, kind=WEIGHTS)
    with refused("E-CKPT-STEP-UNKNOWN", step=20, steps=[30]) as caught:
        push_checkpoint(run.root, 20, kind=WEIGHTS)
    assert "leave --weights out" in caught.value.fix


def test_a_damaged_copy_is_not_named(run, tmp_path, capsys):
    flip(run.checkpoint(20) / file_of(0))
    for path in (tmp_path / "store/checkpoints/step-00000020").glob("rank*"):
        path.unlink()
    assert "ingot ckpt fetch" not in inspect_checkpoints(run.root, hash_files=True).checkpoints[-1].note
    assert main(["ckpt", "push", str(run.root), "--json"]) == 21
    assert "stored_step" not in reported(capsys.readouterr().out, "E-CKPT-HASH")["facts"]


def test_training_resumes_from_the_store_if_that_is_newer(run, capsys):
    shutil.rmtree(run.checkpoint(20))
    inspected = inspect_checkpoints(run.root, hash_files=True)
    assert (inspected.resumes_at, inspected.resumes_elsewhere) == (20, True)
    assert main(["ckpt", "verify", str(run.root)]) == 0
    out = capsys.readouterr().out
    assert RESUMES_HERE not in out and named(out.splitlines()[-1:], 20, inspected.store)


def test_a_store_without_a_folder_or_without_checkpoints_is_named(run, tmp_path, capsys):
    store, aside = tmp_path / "store", tmp_path / "aside"
    store.rename(aside)
    for verb in ("ls", "verify"):
        assert main(["ckpt", verb, str(run.root)]) == 0
        assert f"store     not listed: file://{store} does not exist" in capsys.readouterr().out
    for verb in ("push", "fetch"):
        assert main(["ckpt", verb, str(run.root), "--json"]) == 3
        reported(capsys.readouterr().out, "E-STORE-NO-FOLDER", path=str(store))
    store.mkdir()
    assert main(["ckpt", "ls", str(run.root)]) == 0
    assert capsys.readouterr().out.endswith(f"store     file://{store}, which holds no checkpoint\n")
    shutil.rmtree(run.checkpoints)
    with refused("E-CKPT-NONE", store=f"file://{store}"):
        list_run(run.root)
    assert list(store.iterdir()) == []
