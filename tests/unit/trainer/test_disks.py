"""Runs whose checkpoint files are on local disks: forked ranks with real writers, on one node and on two."""

import os
import shutil
import socket

import pytest
import torch.distributed as dist
from tests.expect import refused

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.checkpoint import file_of
from ingot.schema.run import RemoteCheckpoints
from ingot.stores.memory import MemoryStore
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint.folders import remove_leftovers
from ingot.trainer.checkpoint.manifest import list_checkpoints, read_manifest, verify_checkpoint
from ingot.trainer.checkpoint.nodes import NeededFiles, bring_files, open_disks
from ingot.trainer.checkpoint.places import Places, name_run, node, own_disks, recorded_names
from ingot.trainer.checkpoint.remote import RemoteTier, open_tier
from ingot.trainer.launch.checks import preflight
from ingot.trainer.launch.inspect import inspect_checkpoints
from ingot.trainer.launch.stored import fetch_checkpoint, push_checkpoint

from .test_background_saves import fill_disk, free_disk, run_rank
from .test_loop import files_of, ledger_proof, step_facts

RUN = {"dp_shard": 2, "steps": 12, "every_steps": 4, "mode": "async", "guard": {"proven_steps": 0}}


@pytest.fixture
def disks(tmp_path):
    made = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for disk in made:
        disk.mkdir()
    return made


def on_disk(disk):
    """The files of the only run on `disk`, by step."""
    (run,) = disk.iterdir()
    return {step.name: sorted(path.name[:10] for path in step.iterdir()) for step in sorted(run.iterdir())}


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_ranks_write_to_the_disks_of_their_node_and_continue_from_them_bit_for_bit(mode, fork_ranks, make_run, disks):
    undisturbed = make_run("undisturbed", **RUN)
    fork_ranks(run_rank, 2, undisturbed)
    folder = make_run(disks=tuple(map(str, disks)), keep=1, **RUN | {"mode": mode})
    fork_ranks(run_rank, 2, folder, None, 8)
    fork_ranks(run_rank, 2, folder)
    assert [e["from_step"] for e in read_events(folder.events, events.RUN_STARTED)] == [0, 8]
    assert step_facts(folder) == step_facts(undisturbed)
    assert files_of(folder) == files_of(undisturbed)
    ledger_proof(folder, load_run(folder.config))
    assert [on_disk(disk) for disk in disks] == [{"step-00000012": [f"rank-0000{n}"]} for n in range(2)]
    assert [path.name for path in folder.checkpoint(12).iterdir()] == ["manifest.json"]
    verify_checkpoint(folder.checkpoint(12))


def test_a_save_that_failed_leaves_nothing_on_any_disk(fork_ranks, make_run, disks):
    folder = make_run(disks=tuple(map(str, disks)), **RUN)

    def look(run):
        free_disk(run)
        dist.barrier()  # the save has ended on both ranks
        left = [str(path) for disk in disks for path in disk.rglob("*rank*")]
        assert not left, left

    fork_ranks(run_rank, 2, folder, {3: fill_disk, 5: look})
    assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_FAILED)] == [4]
    assert [one.step for one in list_checkpoints(folder.checkpoints)] == [12, 8]
    assert [sorted(on_disk(disk)) for disk in disks] == [["step-00000008", "step-00000012"]] * 2


def test_the_next_start_removes_what_killed_saves_left(fork_ranks, make_run, disks):
    folder = make_run(disks=tuple(map(str, disks)), **RUN)
    fork_ranks(run_rank, 2, folder, None, 4)
    (step,) = disks[0].glob("*/step-*")
    (kept,) = step.iterdir()
    unfinished = step / f".{file_of(0)}.7.tmp"
    other = step / "rank-00000-0000000000000000.safetensors"
    killed = step.with_name("step-00000008") / "rank-00000-0000000000000000.safetensors"
    killed.parent.mkdir()
    for path in (unfinished, other, killed):
        path.write_bytes(b"0")
    foreign = disks[0] / "another" / "step-00000008"
    foreign.mkdir(parents=True)
    names = [f"{step.name}/{unfinished.name}", f"{step.name}/{other.name}", "step-00000008"]
    assert remove_leftovers(folder) == names
    assert list(step.iterdir()) == [kept]
    assert foreign.is_dir() and not killed.parent.exists()


def test_a_copy_of_a_run_reads_the_files_of_the_original_and_never_removes_them(fork_ranks, make_run, disks, tmp_path):
    folder = make_run(disks=tuple(map(str, disks)), **RUN)
    fork_ranks(run_rank, 2, folder, None, 4)
    copy = make_run("copy", disks=tuple(map(str, disks)), **RUN)
    shutil.copytree(folder.root, copy.root, dirs_exist_ok=True)
    shutil.rmtree(copy.checkpoints)  # nothing of the original is listed any more
    shutil.copytree(folder.checkpoints, copy.checkpoints)
    verify_checkpoint(copy.checkpoint(4))
    shutil.rmtree(copy.checkpoint(4))
    assert remove_leftovers(copy) == []
    name_run(copy)
    assert remove_leftovers(copy) == []
    verify_checkpoint(folder.checkpoint(4))
    assert Places(copy.checkpoint(4)).own_folder(0) != Places(folder.checkpoint(4)).own_folder(0)


def test_names_that_are_damaged_while_a_copy_trains_send_no_file_to_the_original(fork_ranks, make_run, disks):
    folder = make_run("original", disks=tuple(map(str, disks)), **RUN)
    fork_ranks(run_rank, 2, folder, None, 4)
    copy = make_run("z-copy", disks=tuple(map(str, disks)), **RUN)
    shutil.copytree(folder.root, copy.root, dirs_exist_ok=True)

    def damage(run):
        if dist.get_rank() == 0:
            flip(copy.root / "disks.json")
        dist.barrier()

    fork_ranks(run_rank, 2, copy, {6: damage}, 8)
    written = [path.parent.parent.name for disk in disks for path in disk.glob("*/step-00000008/rank-*")]
    assert [name[: len("z-copy")] for name in written] == ["z-copy"] * 2
    verify_checkpoint(folder.checkpoint(4))


def own_names(rank, ranks, folder):
    os.environ.update(GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert "disks.json is damaged" in open_disks(folder)


def test_damaged_names_are_looked_for_on_the_disks_of_all_nodes(fork_ranks, make_run, tmp_path):
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    folder = make_run(disks=(f"{tmp_path}/node{{node}}",), **RUN)
    fork_ranks(alone_on_a_node, 2, folder, None, 4)
    shutil.rmtree(tmp_path / "node0")
    (tmp_path / "node0").mkdir()
    flip(folder.root / "disks.json")
    fork_ranks(own_names, 2, folder)
    assert Places(folder.checkpoint(4)).find(file_of(1), files_of(folder)[file_of(1)].sha256) is not None


def test_the_number_of_the_node_is_part_of_the_name_of_a_disk(monkeypatch):
    for name in ("GROUP_RANK", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (node(), own_disks(["/a-{node}/b"])[0].as_posix()) == (None, "/a-0/b")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (node(), own_disks(["/a-{node}/b"])[0].as_posix()) == (2, "/a-2/b")
    monkeypatch.setenv("GROUP_RANK", "7")
    assert own_disks(["/a-{node}/b"])[0].as_posix() == "/a-7/b"


def test_disks_that_no_rank_of_a_node_uses_are_noted_before_the_start(make_run, disks, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    more = tuple(str(disk) for disk in (*disks, disks[0].parent))
    for used, noted in ((2, False), (3, True)):
        folder, lines = make_run(disks=more[:used], **RUN), []
        preflight(folder, load_run(folder.config), lines.append)
        assert [line.endswith(f": {more[2]} stays unused") for line in lines if "checkpoint.disks" in line] == [
            True
        ] * noted


def test_files_of_other_nodes_are_named_and_are_no_damage(fork_ranks, make_run, disks, monkeypatch):
    """Files that this machine wrote are lost, or their disk is not mounted."""
    folder = make_run(disks=tuple(map(str, disks)), **RUN)
    fork_ranks(run_rank, 2, folder, None, 4)
    shutil.move(disks[1], disks[1].with_name("elsewhere"))
    inspected = inspect_checkpoints(folder.root, hash_files=True)
    (row,) = inspected.checkpoints
    assert (row.state, row.unchecked, inspected.exit_code) == ("NO", 1, 21)
    assert "1 of 2 tensor files are not on this machine" in row.note and f"{disks[1]}" in row.note
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    inspected = inspect_checkpoints(folder.root, hash_files=True)
    (row,) = inspected.checkpoints
    assert (row.state, row.unchecked, inspected.exit_code) == ("part", 1, 0)
    assert "1 of 2 tensor files" in row.note and file_of(1) in row.note
    (here,) = disks[0].glob("*/step-*/rank*")
    data = bytearray(here.read_bytes())
    data[-1] ^= 1
    here.write_bytes(data)
    (row,) = inspect_checkpoints(folder.root, hash_files=True).checkpoints
    assert row.state == "NO" and file_of(0) in row.note


def test_a_disk_that_is_missing_stops_the_start(fork_ranks, make_run, disks):
    folder = make_run(disks=(str(disks[0]), str(disks[1] / "unmounted")), **RUN)
    with pytest.raises(pytest.fail.Exception, match="is no folder on node 0"):
        fork_ranks(run_rank, 2, folder, None, 4)
    assert not list(disks[0].iterdir())


def on_nodes(rank, ranks, folder, script=None, until_step=None):
    """Train as a rank of a node with two ranks."""
    os.environ.update(GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return run_rank(rank, ranks, folder, script, until_step)


def test_every_node_removes_what_is_no_longer_listed(fork_ranks, make_run, tmp_path):
    disks = [tmp_path / f"node{number}" for number in range(2)]
    for disk in disks:
        disk.mkdir()
    folder = make_run(disks=(f"{tmp_path}/node{{node}}",), keep=1, **RUN | {"dp_shard": 4, "mode": "sync"})
    fork_ranks(on_nodes, 4, folder)
    expected = [["rank-00000", "rank-00001"], ["rank-00002", "rank-00003"]]
    assert [on_disk(disk) for disk in disks] == [{"step-00000012": names} for names in expected]
    verify_checkpoint(folder.checkpoint(12))  # a command sees the disks of all nodes that are on its machine


def fetched(folder):
    """The events of nodes that fetched files: (step, node, files, bytes)."""
    found = [e for e in read_events(folder.events, events.CHECKPOINT_FETCHED) if "node" in e]
    return [(e["step"], e["node"], e["files"], e["bytes"]) for e in found]


def flip(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_only_the_files_that_are_missing_or_damaged_come_from_the_store(fork_ranks, make_run, disks, tmp_path):
    undisturbed = make_run("undisturbed", **RUN)
    fork_ranks(run_rank, 2, undisturbed)
    (tmp_path / "store").mkdir()
    place = RemoteCheckpoints(url=f"file://{tmp_path}/store")
    folder = make_run(disks=tuple(map(str, disks)), remote=place, **RUN)
    fork_ranks(run_rank, 2, folder, None, 8)
    sizes = {name: entry.bytes for name, entry in files_of(folder).items()}
    (lost,) = disks[1].glob("*/step-00000008/rank*")
    lost.unlink()
    fork_ranks(run_rank, 2, folder, None, 10)
    assert fetched(folder) == [(8, 0, 1, sizes[file_of(1)])]
    (other,) = disks[1].glob("*/step-00000010/rank*")
    (beside,) = disks[0].glob("*/step-00000010")
    flipped = other.rename(beside / other.name)  # another number of ranks has put it there; readers look there first
    flip(flipped)
    fork_ranks(run_rank, 2, folder)
    assert fetched(folder)[1:] == [(10, 0, 1, flipped.stat().st_size)]
    assert list(read_events(folder.events, events.CHECKPOINT_REFUSED)) == []
    assert step_facts(folder) == step_facts(undisturbed)
    assert files_of(folder) == files_of(undisturbed)
    (here,) = disks[0].glob("*/step-00000012/rank*")
    flip(here)
    path = folder.checkpoint(12)
    with refused("E-CKPT-HASH", file=file_of(0)):  # what arrived is not what readers find
        bring_files(path, read_manifest(path), lambda: NeededFiles({file_of(0)}, set()), lambda manifest, name: 1)


def test_a_fetch_reports_damaged_names_and_the_start_of_a_run_leaves_them_to_its_ranks(
    fork_ranks, make_run, disks, tmp_path
):
    (tmp_path / "store").mkdir()
    place = RemoteCheckpoints(url=f"file://{tmp_path}/store")
    folder = make_run(disks=tuple(map(str, disks)), remote=place, **RUN)
    fork_ranks(run_rank, 2, folder, None, 4)
    push_checkpoint(folder.root, 4)
    flip(folder.root / "disks.json")
    shutil.rmtree(folder.checkpoint(4))
    tier = open_tier(folder, load_run(folder.config).checkpoint)
    assert tier.fetch_newest().step == 4
    assert "disks.json is damaged" in recorded_names(folder.root)[1]
    lines = []
    fetch_checkpoint(folder.root, 4, lines.append)
    assert [line for line in lines if "disks.json is damaged" in line] == lines[-1:]
    assert [event["file"] for event in read_events(folder.events, events.RECORD_DAMAGED)] == ["disks.json"]
    assert recorded_names(folder.root)[1] == ""
    verify_checkpoint(folder.checkpoint(4))


def test_a_file_that_is_nowhere_is_named_and_all_ranks_take_the_next_older_checkpoint(fork_ranks, make_run, disks):
    folder = make_run(disks=tuple(map(str, disks)), **RUN)
    fork_ranks(run_rank, 2, folder, None, 8)
    (lost,) = disks[1].glob("*/step-00000008/rank*")
    lost.unlink()
    fork_ranks(run_rank, 2, folder)
    (refused,) = read_events(folder.events, events.CHECKPOINT_REFUSED)
    assert refused["step"] == 8
    assert f"{file_of(1)} is on no disk of node 0" in refused["reason"]
    assert [e["from_step"] for e in read_events(folder.events, events.RUN_STARTED)] == [0, 4]
    verify_checkpoint(folder.checkpoint(8))


@pytest.mark.slow
def test_a_node_reads_only_the_files_that_its_ranks_need(fork_ranks, make_run, tmp_path):
    """Two nodes with two ranks each. The disk of node 1 is lost: it fetches its own two files, and node 0 nothing. Then
    two ranks on node 0 go on alone: they fetch the files of node 1, and read their own from their disk."""
    disks = [tmp_path / f"node{number}" for number in range(2)]
    for disk in disks:
        disk.mkdir()
    shape = RUN | {"dp_shard": 4}
    undisturbed = make_run("undisturbed", **shape)
    fork_ranks(run_rank, 4, undisturbed)
    (tmp_path / "store").mkdir()
    place = RemoteCheckpoints(url=f"file://{tmp_path}/store")
    folder = make_run(disks=(f"{tmp_path}/node{{node}}",), remote=place, **shape)
    fork_ranks(on_nodes, 4, folder, None, 8)
    sizes = [entry.bytes for _, entry in sorted(files_of(folder).items())]
    shutil.rmtree(disks[1])
    disks[1].mkdir()
    fork_ranks(on_nodes, 4, folder, None, 10)
    assert fetched(folder) == [(8, 1, 2, sum(sizes[2:]))]
    whole = step_facts(undisturbed)
    assert step_facts(folder) == {step: whole[step] for step in range(1, 11)}
    sizes = [entry.bytes for _, entry in sorted(files_of(folder).items())]
    smaller = make_run("smaller", disks=(f"{tmp_path}/node{{node}}",), remote=place, **RUN)
    folder.config.write_bytes(smaller.config.read_bytes())
    shutil.rmtree(disks[1])
    fork_ranks(on_nodes, 2, folder)
    assert fetched(folder)[1:] == [(10, 0, 2, sum(sizes[2:]))]
    for step in (11, 12):
        assert step_facts(folder)[step] == pytest.approx(whole[step], rel=1e-4)
    assert list(read_events(folder.events, events.CHECKPOINT_NOT_STORED)) == []


def alone_on_a_node(rank, ranks, folder, script=None, until_step=None):
    os.environ.update(GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return run_rank(rank, ranks, folder, script, until_step)


class RecordingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, name, data, *, new=False):
        self.written.append(name.rpartition("/")[2][:10])
        super().write(name, data, new=new)


def test_the_first_node_commits_when_the_files_of_all_nodes_are_in_the_store(
    fork_ranks, make_run, tmp_path, monkeypatch
):
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
    folder = make_run(disks=(f"{tmp_path}/node{{node}}",), **RUN)
    fork_ranks(alone_on_a_node, 2, folder, None, 4)
    store = RecordingStore()

    def push(number):
        monkeypatch.setenv("GROUP_RANK", str(number))
        store.written.clear()
        return RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run")).push(4)

    with refused("E-TIER-INCOMPLETE", absent=[file_of(1)]):
        push(0)
    assert "rank-00000" in store.written and "manifest.j" not in store.written
    assert push(1) == files_of(folder)[file_of(1)].bytes
    assert store.written == ["rank-00001"]
    push(0)
    assert store.written[-1] == "manifest.j" and "rank-00000" not in store.written
    assert push(1) == push(0) == 0
    shutil.rmtree(folder.checkpoints)
    for number in range(2):
        shutil.rmtree(tmp_path / f"node{number}")
        (tmp_path / f"node{number}").mkdir()
    tier = RemoteTier(folder, store, RemoteCheckpoints(url="s3://bucket/run"))
    assert tier.fetch(4) > 0  # all files to node 0
    verify_checkpoint(folder.checkpoint(4))
    (there,) = tmp_path.glob("node*/*/step-00000004/rank-00001*")
    flip(there)
    assert tier.fetch(4) == there.stat().st_size  # and the damaged one again
    verify_checkpoint(folder.checkpoint(4))
