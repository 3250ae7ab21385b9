"""Snapshots in the memory of nodes: forked ranks, real keepers, and nodes that are lost with everything on them."""

import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch

from ingot.events import read_events
from ingot.machine.topology import VARIABLE
from ingot.schema import events
from ingot.schema.checkpoint import WEIGHTS, file_of
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import load_run
from ingot.trainer.checkpoint import background, replicas
from ingot.trainer.checkpoint.images import Connection, KeptImage
from ingot.trainer.checkpoint.keeper import (
    Peer,
    asking,
    end_keeper,
    keeper_name,
    reach_local,
    reach_peer,
    start_keeper,
)
from ingot.trainer.checkpoint.message import pack_json, read_message, unpack_json
from ingot.trainer.checkpoint.replicas import Replicas
from ingot.trainer.loop import train
from ingot.trainer.mesh.environment import SUPERVISOR_VARIABLE
from ingot.trainer.mesh.start import RankInfo
from ingot.trainer.resilience.policy import Verdict
from ingot.trainer.run import build_trainer
from ingot.trainer.save import save, settle

from .test_background_saves import run_rank as run_with_script
from .test_background_saves import written
from .test_loop import ledger_proof, step_facts
from .test_loop import run_rank as run_undisturbed

RANKS, STEPS, SAVED = 4, 12, 8
CHANGES = {"dp_shard": RANKS, "steps": STEPS, "every_steps": 4, "keep": 9}


def run_rank(rank, ranks, folder, owners, until_step=None, weights_of=None):
    """Train as a rank of the node whose processes `owners[node]` starts. weights_of: at the end, save the weights alone
    as those of this step."""
    inside = ranks // len(owners)
    os.environ[SUPERVISOR_VARIABLE] = str(owners[rank // inside])
    os.environ |= {"LOCAL_WORLD_SIZE": str(inside), "MASTER_ADDR": "127.0.0.1"}
    place = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank % inside,
        local_world_size=inside,
        attempt=rank // inside,  # the agents of nodes that replaced lost ones have counted fewer restarts
        device=torch.device("cpu"),
    )
    lines = []
    run = build_trainer(load_run(folder.config), folder, place, until_step=until_step, say=lines.append)
    try:
        train(run)
        if weights_of is not None:
            assert save(run, weights_of, WEIGHTS)
            assert settle(run, wait=True)
    finally:
        run.close()
    return lines


class Nodes:
    """Processes that stand for the agents of nodes. One that is killed takes its keeper with it."""

    def __init__(self, count):
        self._processes = [self._start() for _ in range(count)]

    def _start(self):
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    @property
    def owners(self):
        return [one.pid for one in self._processes]

    def keeper(self, number, folder):
        """Return the process id of a node's keeper."""
        with closing(reach_local(keeper_name(self.owners[number], folder.root))) as connection:
            found = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return struct.unpack("3i", found)[0]

    def replace(self, number, folder):
        """Lose a node, and put a new one in its place."""
        name = keeper_name(self.owners[number], folder.root)
        reach_local(name).close()  # it has a keeper
        self.end(number)
        while True:  # it ends by the end of its owner
            try:
                reach_local(name).close()
            except OSError:
                break
        self._processes[number] = self._start()

    def end(self, number):
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].communicate()

    def close(self):
        for number in range(len(self._processes)):
            self.end(number)


@pytest.fixture
def nodes():
    found = []

    def make(count):
        found.append(Nodes(count))
        return found[0]

    yield make
    for one in found:
        one.close()


_UNDISTURBED = {}


@pytest.fixture
def reference(fork_ranks, make_run):
    """The losses and gradient norms of a run that nothing disturbs, by step."""
    if not _UNDISTURBED:
        folder = make_run("undisturbed", **CHANGES)
        fork_ranks(run_undisturbed, RANKS, folder)
        _UNDISTURBED.update(step_facts(folder))
    return _UNDISTURBED


def lose_files(folder):
    """Remove the tensors of every checkpoint: what continues, continues without them."""
    for path in folder.checkpoints.glob("step-*/rank-*"):
        path.unlink()


def last(folder, kind):
    return list(read_events(folder.events, kind))[-1]


def test_a_lost_node_is_replaced_from_the_memory_of_another_without_a_checkpoint(
    fork_ranks, make_run, nodes, reference
):
    cluster, folder = nodes(2), make_run("run", mode="async", replicas=1, **CHANGES)
    lines = fork_ranks(run_rank, RANKS, folder, cluster.owners, SAVED)[0]
    assert any("in the memory of 2 nodes" in line for line in lines)
    assert not any("checkpoint.replicas" in line for line in lines)
    kept = last(folder, events.SNAPSHOT_KEPT)
    assert (kept["step"], kept["nodes"], kept["failures"]) == (SAVED, 2, [])
    lose_files(folder)
    cluster.replace(1, folder)
    fork_ranks(run_rank, RANKS, folder, cluster.owners)
    restored = last(folder, events.SNAPSHOT_RESTORED)
    assert restored["step"] == SAVED
    # Half of the ranks are on each node, and only those of the lost one need another node.
    assert restored["own_bytes"] == restored["peer_bytes"] <= kept["bytes"] / 2
    assert step_facts(folder) == reference
    assert ledger_proof(folder, load_run(folder.config))


@pytest.mark.slow
def test_the_ranks_survive_in_the_memory_of_their_own_node(fork_ranks, make_run, nodes, reference, tmp_path):
    """Also if the checkpoint of the snapshot was never published: there is nothing to upload then."""
    (tmp_path / "store").mkdir()
    place = RemoteCheckpoints(url=f"file://{tmp_path}/store")
    cluster, folder = nodes(1), make_run("run", mode="async", replicas=1, remote=place, **CHANGES)
    lines = fork_ranks(run_rank, RANKS, folder, cluster.owners, SAVED, SAVED + 1)[0]
    assert [line for line in lines if "checkpoint.replicas = 1, but the job has one node" in line]
    assert last(folder, events.WEIGHTS_SAVED)["step"] == SAVED + 1
    keeper = cluster.keeper(0, folder)
    assert os.getsid(keeper) == keeper  # torchrun ends a rank with its process group
    shutil.rmtree(folder.checkpoint(SAVED))
    lose_files(folder)
    fork_ranks(run_rank, RANKS, folder, cluster.owners)
    restored = last(folder, events.SNAPSHOT_RESTORED)
    assert (restored["step"], restored["peer_bytes"]) == (SAVED, 0)
    assert step_facts(folder) == reference
    assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_NOT_STORED)] in ([], [4])
    assert last(folder, events.CHECKPOINT_STORED)["step"] == STEPS


def flip_a_bit(keeper):
    """Change one byte of one image of a keeper, as broken memory does."""
    fds = Path(f"/proc/{keeper}/fd")
    image = next(fd for fd in sorted(fds.iterdir()) if "memfd:ingot" in str(fd.readlink()))
    with image.open("r+b") as memory:
        memory.seek(-5, os.SEEK_END)
        byte = memory.read(1)
        memory.seek(-5, os.SEEK_END)
        memory.write(bytes([byte[0] ^ 4]))


def test_a_snapshot_that_changed_in_memory_is_refused_and_the_checkpoint_is_used(
    fork_ranks, make_run, nodes, reference
):
    cluster, folder = nodes(1), make_run("run", mode="async", replicas=1, **CHANGES)
    fork_ranks(run_rank, RANKS, folder, cluster.owners, SAVED)
    flip_a_bit(cluster.keeper(0, folder))
    lines = fork_ranks(run_rank, RANKS, folder, cluster.owners)[0]
    assert any("has changed in memory" in line for line in lines)
    assert not list(read_events(folder.events, events.SNAPSHOT_RESTORED))
    assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_REFUSED)] == [SAVED]
    assert step_facts(folder) == reference
    assert ledger_proof(folder, load_run(folder.config))


def test_a_keeper_that_dies_costs_nothing_but_its_copies(fork_ranks, make_run, nodes, reference):
    """The first attempt saves the steps 4 and 8, and its keeper is killed before the second save."""
    cluster, folder = nodes(2), make_run("run", mode="async", replicas=1, **CHANGES)
    fork_ranks(run_rank, RANKS, folder, cluster.owners, 4)
    os.kill(cluster.keeper(1, folder), signal.SIGKILL)
    lines = fork_ranks(run_rank, RANKS, folder, cluster.owners)[0]  # starts another one
    assert last(folder, events.SNAPSHOT_RESTORED)["step"] == 4
    assert sum("in the memory of 2 nodes" in line for line in lines) >= 1
    assert step_facts(folder) == reference


@pytest.mark.slow
def test_two_ranks_continue_from_the_snapshots_of_four(fork_ranks, make_run, nodes):
    cluster, folder = nodes(2), make_run("run", mode="async", replicas=1, **CHANGES)
    fork_ranks(run_rank, RANKS, folder, cluster.owners, SAVED)
    folder.config.write_text(folder.config.read_text().replace(f"dp_shard = {RANKS}", "dp_shard = 2"))
    from_disk = RunFolder(shutil.copytree(folder.root, folder.root.with_name("from-disk")))
    lose_files(folder)
    cluster.replace(0, folder)
    fork_ranks(run_rank, 2, folder, cluster.owners)
    fork_ranks(run_undisturbed, 2, from_disk)
    assert last(folder, events.SNAPSHOT_RESTORED)["step"] == SAVED
    assert [held(owner, folder) for owner in cluster.owners] == [{0: STEPS, 1: STEPS}] * 2  # no rank of before
    assert step_facts(folder) == step_facts(from_disk)
    assert ledger_proof(folder, load_run(folder.config))


def run_disturbed(rank, ranks, folder, owners, script, until_step):
    """Train, and call after each step what `script` has for it, with the trainer."""
    os.environ[SUPERVISOR_VARIABLE] = str(owners[0])
    return run_with_script(rank, ranks, folder, script, until_step)


def held(owner, folder):
    """Return rank -> step of the images that the keeper of a node has."""
    with closing(asking(keeper_name(owner, folder.root))) as keeper:
        return {image["rank"]: image["step"] for image, _ in keeper.ask({"do": "list"})}


def test_a_state_that_is_not_fit_to_be_saved_is_not_kept_in_memory_either(fork_ranks, make_run, nodes):
    def spoil(run):
        run.state.callbacks["probe.x"] = torch.tensor([float("nan")])

    cluster, folder = nodes(1), make_run("run", mode="async", replicas=1, **CHANGES | {"dp_shard": 2})
    codes = fork_ranks(run_disturbed, 2, folder, cluster.owners, {10: spoil}, 11)
    assert codes == ["E-STATE-NOT-FINITE"] * 2
    assert held(cluster.owners[0], folder) == {}


def test_a_run_that_goes_back_forgets_what_it_went_back_from(fork_ranks, make_run, nodes):
    """The checkpoint of step 8 is damaged when the run goes back, so it goes to that of step 4."""
    cluster, folder = nodes(1), make_run("run", mode="async", replicas=1, **CHANGES | {"dp_shard": 2})
    went = []

    def go_back(run):
        if went:
            return None
        written(run)
        went.append(held(cluster.owners[0], folder)[run.place.rank])
        if run.place.is_first:
            (folder.checkpoint(SAVED) / file_of(0)).unlink()
        return Verdict.ROLL_BACK

    def look(run):
        if not went:
            written(run)  # so that the next save is not left out
        else:
            assert (went, held(cluster.owners[0], folder)) == ([SAVED], {})

    codes = fork_ranks(run_disturbed, 2, folder, cluster.owners, {6: look, 10: go_back}, 11)
    assert codes == ["ended"] * 2
    assert [(e["from_step"], e["to_step"]) for e in read_events(folder.events, events.ROLLED_BACK)] == [(10, 4)]


def test_a_failure_of_one_rank_costs_that_snapshot_alone(fork_ranks, make_run, nodes):
    """Rank 1 cannot take the snapshot of step 4, and not lend that of step 8. That of step 12 is whole again."""
    cluster, folder = nodes(1), make_run("run", mode="async", replicas=1, **CHANGES | {"dp_shard": 2})
    take, lend = background.file_contents, Replicas.keep

    def fail(*arguments):
        raise OSError("no room")

    def let(run, contents, keep):
        written(run)
        if run.place.rank == 1:
            background.file_contents, Replicas.keep = contents, keep

    script = {3: lambda run: let(run, fail, lend), 6: lambda run: let(run, take, fail)}
    script[10] = lambda run: let(run, take, lend)
    assert fork_ranks(run_disturbed, 2, folder, cluster.owners, script, None) == ["ended"] * 2
    assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_FAILED)] == [4]
    kept = {e["step"]: (e["nodes"], e["failures"]) for e in read_events(folder.events, events.SNAPSHOT_KEPT)}
    assert kept[8] == (0, ["rank 1: no room"]) and kept[12] == (1, [])
    with closing(asking(keeper_name(cluster.owners[0], folder.root))) as keeper:
        found = keeper.ask({"do": "list"})
    assert {image["step"] for image, _ in found} == {12} and len(found) == 2
    assert len({image["snapshot"] for image, _ in found}) == 1  # or no run could continue from it


@pytest.mark.slow
def test_a_job_that_cannot_replace_a_lost_node_says_so(fork_ranks, make_run, nodes, monkeypatch):
    folder, cluster = make_run("run", mode="async", replicas=1, **CHANGES | {"dp_shard": 2}), nodes(2)

    def lines(owners, until_step):
        return [line for line in fork_ranks(run_rank, 2, folder, owners, until_step)[0] if "cannot be replaced" in line]

    assert not lines(cluster.owners, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not lines(cluster.owners[:1], 2)
    (warning,) = lines(cluster.owners, 3)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in warning


RACKS = {0: "west/rack1", 1: "east/rack3", 2: "west/rack2", 3: "east/rack4"}


def keep_on(rank, ranks, folder, owners):
    """Return the nodes that keep the snapshots of this rank's node, without and with known racks."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    by_number = replicas.open_replicas(1, folder, owners[rank], rank, print).keep_on
    os.environ[VARIABLE] = RACKS[rank]
    return by_number, replicas.open_replicas(1, folder, owners[rank], rank, print).keep_on


def test_copies_of_a_node_are_in_another_rack(fork_ranks, tmp_path, nodes):
    found = fork_ranks(keep_on, RANKS, RunFolder(tmp_path), nodes(RANKS).owners)
    assert found == [([2], [1]), ([3], [0]), ([0], [3]), ([1], [2])]  # by number, west would keep the copies of west


def image(**changes):
    return vars(KeptImage(**{"rank": 0, "snapshot": "7-0-1", "step": 40, "epoch": 7, "world": 2, "bytes": 8} | changes))


def chosen(*by_node, at_least=0):
    """The step of the snapshot that an attempt 7 would continue from, and the nodes that have each rank's image."""
    plan = replicas._choose([[[one, ""] for one in held] for held in by_node], {7, 6}, at_least)
    return plan and (plan["images"][0]["step"], plan["holders"])


def test_only_whole_and_new_snapshots_are_chosen():
    both = [image(), image(rank=1)]
    assert chosen(both, both) == (40, [[0, 1], [0, 1]])
    assert chosen(both[:1], both[1:]) == (40, [[0], [1]])
    assert chosen(both[:1]) is None and chosen([]) is None
    assert chosen(both, at_least=40) and chosen(both, at_least=41) is None  # a checkpoint on the disk is newer
    other = image(rank=1, snapshot="7-0-2", step=60)
    assert chosen(both[:1], [other]) is None
    newer = [image(snapshot="7-0-2", step=60), other]
    assert chosen(both, newer) == (60, [[1], [1]])
    assert chosen([image(epoch=6), image(rank=1, epoch=6)]) == (40, [[0], [0]])
    assert chosen([image(epoch=5), image(rank=1, epoch=5)]) is None


def test_a_copy_that_arrives_with_other_bytes_is_refused(tmp_path):
    name = keeper_name(os.getpid(), tmp_path)
    start_keeper(name, os.getpid(), "127.0.0.1")
    try:
        with closing(asking(name)) as keeper:
            peer = Peer(**keeper.ask({"do": "where"}))
        for sent, refusal in ((b"12345679", "other bytes than were sent"), (b"12345678", "")):
            with closing(reach_peer(peer)) as connection:
                connection.send(pack_json({"do": "hold", "image": image(), "more": 1}), b"{}")
                connection.socket.sendall(sent)
                connection.send(hashlib.sha256(b"12345678").hexdigest().encode())
                with pytest.raises(OSError, match=refusal) if refusal else nullcontext():
                    read_message(connection.receive(), unpack_json)
            with closing(asking(name)) as keeper:
                assert len(keeper.ask({"do": "list"})) == (not refusal)
        with closing(asking(name)) as keeper:
            keeper.ask({"do": "forget", "after": 40})
        with closing(asking(name)) as keeper:
            assert len(keeper.ask({"do": "list"})) == 1  # it is of step 40
        with closing(asking(name)) as keeper:
            keeper.ask({"do": "forget", "after": 39})  # the run went back
        with closing(asking(name)) as keeper:
            assert keeper.ask({"do": "list"}) == []
        with closing(socket.create_connection((peer.host, peer.port))) as stranger, pytest.raises(OSError):
            connection = Connection(stranger)
            connection.send(b"0" * 32, pack_json({"do": "list", "more": 0}))
            connection.receive()  # closed without an answer
    finally:
        end_keeper(os.getpid(), tmp_path)
    with pytest.raises(OSError):
        reach_local(name)
    end_keeper(os.getpid(), tmp_path)  # there is none
