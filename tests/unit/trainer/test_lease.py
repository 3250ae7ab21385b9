"""The lease of a run: one launcher at a time, whichever machine it is on, and the checkpoints of those before it."""

import json
import shutil
import signal
import subprocess
import threading
import time
import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pytest
from tests.checkpoints import write_checkpoint, write_weights
from tests.expect import refused

from ingot.events import read_events
from ingot.machine.processes import identity, identity_of, is_gone, is_running
from ingot.schema import events
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from ingot.stores.store import StoreRefused, StoreUnreachable, read_object
from ingot.trainer import lease as leases
from ingot.trainer.checkpoint.fence import (
    Epoch,
    alive_name,
    newest_epoch,
    newest_local_epoch,
    record_name,
    require_newest,
    to_bytes,
)
from ingot.trainer.checkpoint.files import CheckpointFacts, CheckpointFiles
from ingot.trainer.checkpoint.folders import prune
from ingot.trainer.checkpoint.headers import LEAST_BYTES
from ingot.trainer.checkpoint.manifest import candidate_folders, late_folders, list_checkpoints
from ingot.trainer.checkpoint.remote import RemoteTier
from ingot.trainer.checkpoint.tiers import fetch_instead, fetch_newest
from ingot.trainer.lease import RunLease
from ingot.trainer.loader.ledger import write_segment

LONG = 3600.0  # no sign of life within a test, except those that a test gives
REMOTE = RemoteCheckpoints(url="s3://bucket/run")
ORDER = np.arange(10).reshape(10, 1)
ELSEWHERE = "another-boot pid:[1] 7 7"  # a process of which nobody here knows whether it lives


class Store(MemoryStore):
    """A store that can stop to answer, and that can refuse records of attempts."""

    answers, refuses = True, False

    def write(self, name, data, *, new=False):
        if self.refuses and name == record_name(1):
            raise StoreRefused("E-STORE-REFUSED", "no permission", rule="", fix="")
        super().write(name, data, new=new)

    def list(self, prefix=""):
        if not self.answers:
            raise StoreUnreachable("E-STORE-UNREACHABLE", "no answer", rule="", fix="")
        return super().list(prefix)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text("")
    return folder


def lease_of(folder, store=None, seconds=LONG):
    return RunLease(folder, RemoteTier(folder, store, REMOTE) if store else None, seconds)


def take(folder, store=None, seconds=LONG):
    lease = lease_of(folder, store, seconds)
    lease.wait(lambda line: None)
    lease.take()
    return lease


def wait_until(happened):
    ends = time.monotonic() + 20
    while not happened() and time.monotonic() < ends:
        time.sleep(0.01)


def held_elsewhere(place, epoch=1, seconds=0.2):
    """Write what a launcher on another machine has written."""
    place.write(record_name(epoch), [to_bytes(Epoch(epoch=epoch, process=ELSEWHERE, seconds=seconds, host="far"))])
    place.write(alive_name(epoch), [b"0"])


def test_attempts_are_numbered_and_adopt_what_they_find(folder):
    store = MemoryStore()
    with take(folder, store) as first:
        write_checkpoint(folder, 10, epoch=first.epoch)
        RemoteTier(folder, store, REMOTE, first.epoch).push(10)
        write_weights(folder, 5, epoch=first.epoch)
        RemoteTier(folder.weights, store, REMOTE, first.epoch).push(5)
    with take(folder, store) as second:
        assert (first.epoch, second.epoch) == (1, 2)
        here, there = newest_local_epoch(folder.root), newest_epoch(store)
        assert here.adopted.keys() == {"10"} and len(here.adopted["10"]) == 64 and there.adopted == {"10": ""}
        assert here.weights.keys() == {"5"} and len(here.weights["5"]) == 64 and there.weights == {"5": ""}
        assert replace(here, adopted=None, weights=None) == replace(there, adopted=None, weights=None)
        assert here.process == identity()
    with take(folder, store) as third:
        assert third.epoch == 3
        assert [one.name for one in store.list("lease")] == [
            *(alive_name(n) for n in (2, 3)), *(record_name(n) for n in (2, 3))
        ]  # fmt: skip


@pytest.mark.parametrize("in_store", [False, True])
def test_a_launcher_that_gives_signs_of_life_keeps_the_run(folder, in_store):
    store = MemoryStore()
    place = store if in_store else LocalStore(folder.root)
    held_elsewhere(place, seconds=30.0)
    beats = threading.Thread(target=lambda: place.write(alive_name(1), [b"1"]))
    lines = []

    def say(line):
        lines.append(line)
        beats.start()

    with refused("E-RUN-BUSY", owner="far:0"):
        lease_of(folder, store).wait(say)
    beats.join()
    assert "waiting 30" in lines[0]


def test_copies_of_a_run_folder_that_share_a_store_are_reported_at_each_change(folder, tmp_path):
    store, copy = MemoryStore(), RunFolder(tmp_path / "copy")

    def lines(run):
        printed = []
        with lease_of(run, store) as lease:
            lease.wait(printed.append)
            lease.take()
        return [str(named) for line in printed for named in (folder.root, copy.root) if f"folder {named}," in line]

    assert lines(folder) == lines(folder) == []
    shutil.copytree(folder.root, copy.root)
    assert lines(copy) == [str(folder.root)] and lines(copy) == []
    assert lines(folder) == [str(copy.root)]
    shutil.rmtree(copy.root / "lease")  # as a new folder, which continues what the store has
    assert lines(copy) == []
    moved = RunFolder(folder.root.rename(tmp_path / "moved"))
    shutil.rmtree(copy.root)
    assert lines(moved) == []  # no two copies: the other folder is gone


def test_a_copy_at_the_same_path_of_another_machine_is_reported_and_a_shared_folder_is_not(
    folder, tmp_path, monkeypatch
):
    store = MemoryStore()

    def lines(host):
        printed = []
        monkeypatch.setattr("socket.gethostname", lambda: host)
        with lease_of(folder, store) as lease:
            lease.wait(printed.append)
            lease.take()
        return printed

    for host in ("node-a", "node-b", "node-a"):
        assert lines(host) == []
    shutil.copytree(folder.root, tmp_path / "disk of node-a")
    assert lines("node-b") == []  # the first start of a copy looks like that of a shared folder
    shutil.rmtree(folder.root)
    shutil.copytree(tmp_path / "disk of node-a", folder.root)
    (line,) = lines("node-a")
    assert line.startswith("store ") and "by node-b:" in line and f"folder {folder.root}," in line


def test_a_silent_launcher_loses_the_run(folder):
    place = LocalStore(folder.root)
    held_elsewhere(place)
    with take(folder) as lease:
        assert lease.epoch == 2
        with refused("E-LEASE-LOST", epoch=2):
            require_newest(place, 1)


def test_nobody_waits_for_a_launcher_that_ended(folder, monkeypatch):
    with take(folder):
        pass
    place = LocalStore(folder.root)
    monkeypatch.setattr(leases, "_POLLS", 0)  # a wait would fail
    with take(folder) as second:  # the first one reported its end
        record = newest_epoch(place)
    gone = identity().rsplit(" ", 1)[0] + " 1"  # its process id belongs to another process
    place.write(record_name(second.epoch), [to_bytes(replace(record, process=gone))])
    place.write(alive_name(second.epoch), [b"5"])
    with take(folder) as third:
        assert third.epoch == 3


@pytest.mark.parametrize(("process", "left"), [("gone", False), ("elsewhere", True)])
def test_a_half_sign_of_life_of_a_killed_launcher_is_removed(folder, process, left):
    """Only if it has certainly ended: a launcher of another machine may be writing it."""
    place = LocalStore(folder.root)
    gone = identity().rsplit(" ", 1)[0] + " 1"
    who = gone if process == "gone" else ELSEWHERE
    place.write(record_name(1), [to_bytes(Epoch(epoch=1, process=who, seconds=0.05, host="here"))])
    half = folder.root / "lease" / ".alive-00000001.host.7.1.tmp"
    half.write_bytes(b"1")
    with take(folder):
        assert half.exists() == left


@pytest.fixture
def other():
    """Another process of this machine, which is no launcher."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def held_by(place, process, folder):
    """Write what a launcher of this machine has written that is the process `process`."""
    record = Epoch(
        epoch=1, process=identity_of(process.pid), folder=str(folder), pid=process.pid, host="here", seconds=0.2
    )
    place.write(record_name(1), [to_bytes(record)])
    place.write(alive_name(1), [b"0"])


def test_a_living_launcher_of_this_machine_is_named_at_once(folder, other, monkeypatch):
    store = MemoryStore()
    held_by(store, other, "/runs/first")
    monkeypatch.setattr(leases, "_POLLS", 0)  # a wait would fail
    with refused("E-RUN-BUSY", owner=f"here:{other.pid}", folder="/runs/first"):
        lease_of(folder, store).wait(print)
    other.kill()
    wait_until(lambda: is_gone(identity_of(other.pid)))  # no parent has asked for it yet
    with take(folder, store) as second:
        assert second.epoch == 2


def test_a_stopped_launcher_of_this_machine_loses_the_run_after_its_time(folder, other):
    store, lines = MemoryStore(), []
    held_by(store, other, "/runs/first")
    other.send_signal(signal.SIGSTOP)
    wait_until(lambda: not is_running(identity_of(other.pid)))
    lease_of(folder, store).wait(lines.append)
    assert len(lines) == 1 and "waiting" in lines[0]


def test_a_copy_of_the_folder_of_a_living_launcher_is_trained_at_once(folder, other, monkeypatch):
    """Unless it is the folder itself, where the file system has no locks."""
    here = LocalStore(folder.root)
    monkeypatch.setattr(leases, "_POLLS", 0)  # a wait would fail
    held_by(here, other, folder.root.resolve())
    with refused("E-RUN-BUSY", folder=str(folder.root.resolve())):
        lease_of(folder).wait(print)
    held_by(here, other, "/runs/first")
    with take(folder) as second:
        assert second.epoch == 2


def test_nothing_is_known_of_a_process_in_another_namespace(other):
    boot, _, pid, started = identity_of(other.pid).split(" ")
    elsewhere = f"{boot} pid:[1] {pid} {started}"
    assert not is_running(elsewhere) and not is_gone(elsewhere)


def test_of_two_launchers_one_takes_the_run(folder):
    first, second = lease_of(folder), lease_of(folder)
    first.wait(print)
    second.wait(print)
    place = LocalStore(folder.root)
    real = leases.newest_epoch
    try:
        leases.newest_epoch = lambda place: None  # both look before either writes
        first.take()
        with refused("E-RUN-BUSY"):
            second.take()
    finally:
        leases.newest_epoch = real
        first.__exit__()
    numbers = [one.name for one in place.list("lease") if "epoch" in one.name]
    assert numbers == [record_name(1)]


@pytest.mark.parametrize("in_store", [False, True])
def test_a_launcher_that_began_since_the_wait_keeps_the_run(folder, in_store):
    """Two launchers found the same one gone; the slower one had more to prepare."""
    store = Store() if in_store else None
    slow = lease_of(folder, store)
    slow.wait(lambda line: None)
    with take(folder, store) as quick:
        if in_store:
            shutil.rmtree(folder.root / "lease")  # on another disk
        with refused("E-RUN-BUSY"):
            slow.take()
        quick.require()
        assert slow.epoch == 0


def test_a_holder_that_was_replaced_hears_of_it(folder):
    with take(folder, seconds=0.05) as lease:
        lease.require()
        held_elsewhere(LocalStore(folder.root), epoch=2)
        wait_until(lambda: lease.lost is not None)
        with refused("E-LEASE-LOST", owner="far:0"):
            lease.require()
    assert read_object(LocalStore(folder.root), alive_name(2)) == b"0"


def test_a_store_that_does_not_answer_gets_its_record_later(folder):
    store = Store()
    write_checkpoint(folder, 5, epoch=1)
    RemoteTier(folder, store, REMOTE).push(5)
    store.answers = False
    write_checkpoint(folder, 10, epoch=1)
    with take(folder, store, seconds=0.05) as lease:
        store.answers = True
        with refused("E-LEASE-PENDING", had_it=False):
            RemoteTier(folder, MemoryStore(), REMOTE, lease.epoch).push(10)
        wait_until(lambda: newest_epoch(store) is not None)
        assert RemoteTier(folder, store, REMOTE, lease.epoch).push(10) > 0
        assert newest_epoch(store).adopted == {"5": ""}


def empty(store):
    for one in store.list():
        store.remove(one.name)


def test_a_store_that_was_emptied_gets_the_record_and_all_objects_again(folder, tmp_path):
    """The uploader has sent a segment of the ledger before, which vanishes with the rest."""
    store, lines = Store(), []
    with lease_of(folder, store, seconds=0.05) as lease:
        lease.wait(lines.append)
        lease.take()
        tier = RemoteTier(folder, store, REMOTE, lease.epoch)
        write_checkpoint(folder, 10, epoch=1)
        tier.push(10)
        segments = list_checkpoints(folder.checkpoints)[0].manifest.ledger
        write_checkpoint(folder, 20, epoch=1, ledger=(*segments, write_segment(folder.ledger, 11, 20, ORDER)))
        store.refuses = True
        empty(store)
        with refused("E-LEASE-PENDING", had_it=True):
            tier.push(20)
        wait_until(lambda: list(read_events(folder.events, events.LEASE_NOT_RECORDED)))
        time.sleep(0.05)
        store.refuses = False
        wait_until(lambda: newest_epoch(store) is not None)
        assert tier.push(20) > 0 and lease.lost is None
    for kind in (events.LEASE_NOT_RECORDED, events.LEASE_RECORDED):
        assert [(one["store"], one["epoch"]) for one in read_events(folder.events, kind)] == [(store.url, 1)]
    assert [line.split()[0] for line in lines] == ["WARNING", "lease"]
    other = RunFolder(tmp_path / "other")
    assert RemoteTier(other, store, REMOTE).fetch_newest().step == 20


def test_the_record_stays_away_from_a_store_that_another_launcher_took_when_it_was_empty(folder):
    """The other launcher has a lower number than the run, which had three attempts."""
    store = Store()
    for _ in range(2):
        with take(folder, store):
            pass
    with take(folder, store, seconds=0.05) as lease:
        store.remove(record_name(3))
        wait_until(lambda: newest_epoch(store).epoch == 3)  # the record of the second attempt is nobody's sign
        assert lease.lost is None
        names = [one.name for one in store.list()]
        store.answers = False
        for name in names:
            store.remove(name)
        held_elsewhere(store)
        store.answers = True
        wait_until(lambda: lease.lost is not None)
        with refused("E-LEASE-LOST", owner="far:0", epoch=1):
            lease.require()
    assert record_name(3) not in [one.name for one in store.list()]


def test_a_run_folder_gets_its_record_again_unless_it_was_removed(folder):
    here = LocalStore(folder.root)
    with take(folder, seconds=0.05) as lease:
        here.remove(record_name(1))
        wait_until(lambda: list(read_events(folder.events, events.LEASE_RECORDED)))
        folder.events.unlink()
        folder.config.unlink()
        here.remove(record_name(1))
        time.sleep(0.1)
        assert newest_epoch(here) is None and not folder.events.exists() and lease.lost is None
        shutil.rmtree(folder.root)  # as where its mount is gone
        time.sleep(0.1)
    assert not folder.root.exists()


def test_a_living_launcher_writes_its_damaged_record_again(folder):
    """Nobody else writes under its number, so a wrong bit is no other launcher."""
    store = MemoryStore()
    with take(folder, store, seconds=0.05) as lease:
        record = newest_local_epoch(folder.root)
        for place, path in ((store, None), (LocalStore(folder.root), folder.root / record_name(1))):
            place.write(record_name(1), [to_bytes(record).replace(b'"pid"', b'"qid"')])
            assert newest_epoch(place).is_damaged or path
            wait_until(lambda place=place: not newest_epoch(place).is_damaged)
            assert newest_epoch(place).holder == record.holder and lease.lost is None
        lease.require()
    assert {event["file"] for event in read_events(folder.events, events.RECORD_DAMAGED)} == {record_name(1)}


@pytest.mark.parametrize("is_damaged", ["before the fetch", "after it"])
def test_a_record_that_is_written_again_has_what_came_from_the_store(folder, is_damaged):
    """But not what an earlier attempt published too late."""
    store, path = Store(), folder.root / record_name(2)

    def damage():
        path.write_bytes(path.read_bytes().replace(b'"pid"', b'"qid"'))

    with take(folder, store):
        write_checkpoint(folder, 10, epoch=1)
        RemoteTier(folder, store, REMOTE, 1).push(10)
    shutil.rmtree(folder.checkpoint(10))
    with take(folder, store) as second:
        if is_damaged == "before the fetch":
            damage()
        RemoteTier(folder, store, REMOTE, second.epoch).fetch(10)
        if is_damaged == "after it":
            damage()
        write_checkpoint(folder, 20, epoch=1)
        assert second._look(second._here) and not newest_local_epoch(folder.root).is_damaged
        assert candidate_folders(folder.checkpoints) == [folder.checkpoint(10)]
        assert late_folders(folder.checkpoints) == [folder.checkpoint(20)]


def test_a_start_names_the_record_that_is_damaged(folder):
    with take(folder):
        write_checkpoint(folder, 20, epoch=1)
    path = folder.root / record_name(1)
    path.write_bytes(path.read_bytes().replace(b'"run"', b'"sun"'))
    lines = []
    lease = lease_of(folder)
    lease.wait(lines.append)
    assert [record_name(1) in line for line in lines] == [True]
    assert late_folders(folder.checkpoints) == []


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("way", ["restart", "roll back", "next start"])
def test_what_comes_from_a_store_that_was_silent_at_the_start_counts(folder, local, way):
    """The first attempt saved the steps 10 and 20. The disk lost step 20, or both, before the second one began."""
    store, quiet = Store(), {"log": lambda *_, **__: None, "say": lambda line: None}
    with take(folder, store):
        for step in (10, 20):
            write_checkpoint(folder, step, epoch=1)
            RemoteTier(folder, store, REMOTE, 1).push(step)
    for step in (20,) if local else (10, 20):
        shutil.rmtree(folder.checkpoint(step))
    store.answers = False
    with take(folder, store) as second:
        store.answers = True
        tier = RemoteTier(folder, store, REMOTE, second.epoch)
        if way == "roll back":
            assert fetch_instead(tier, 30, {30}, None, again=False, **quiet) == (20, [])
        elif way == "restart":
            fetch_newest(folder, tier, **quiet)
    if way == "next start":
        fetch_newest(folder, RemoteTier(folder, store, REMOTE), **quiet)
    assert candidate_folders(folder.checkpoints)[0] == folder.checkpoint(20)
    assert newest_local_epoch(folder.root).holder == second._record.holder
    with take(folder, store):
        assert candidate_folders(folder.checkpoints)[0] == folder.checkpoint(20)


def test_an_attempt_that_was_replaced_fetches_nothing(folder):
    store = Store()
    with take(folder, store) as first:
        write_checkpoint(folder, 10, epoch=1)
        tier = RemoteTier(folder, store, REMOTE, first.epoch)
        tier.push(10)
        shutil.rmtree(folder.checkpoint(10))
        with take_over(folder):
            with refused("E-LEASE-LOST"):
                tier.fetch(10)
            assert newest_local_epoch(folder.root).adopted == {}
            assert not any(folder.checkpoints.iterdir())


def test_a_store_that_answers_late_may_be_of_another_run(folder, tmp_path):
    store, other = Store(), RunFolder(tmp_path / "other")
    other.root.mkdir()
    other.config.write_text("")
    with take(folder, store) as lease:
        write_checkpoint(folder, 10, epoch=lease.epoch)
        RemoteTier(folder, store, REMOTE, lease.epoch).push(10)
    for _ in range(2):  # with a higher number than the record in the store
        with take(other):
            pass
    store.answers = False
    with take(other, store, seconds=0.05) as lease:
        store.answers = True
        wait_until(lambda: lease.lost is not None)
        with refused("E-LEASE-OTHER-RUN"):
            lease.require()


def test_a_store_of_another_run_is_refused(folder, tmp_path):
    store, other = MemoryStore(), RunFolder(tmp_path / "other")
    other.root.mkdir()
    other.config.write_text("")
    with take(folder, store) as lease:
        write_checkpoint(folder, 10, epoch=lease.epoch)
        RemoteTier(folder, store, REMOTE, lease.epoch).push(10)
    with take(other):
        pass
    with refused("E-LEASE-OTHER-RUN"):
        take(other, store)
    empty = RunFolder(tmp_path / "empty")  # a new disk of the same run
    empty.root.mkdir()
    with take(empty, store):
        assert newest_local_epoch(empty.root).run == newest_local_epoch(folder.root).run


def test_a_checkpoint_that_comes_too_late_is_nobodys(folder):
    write_checkpoint(folder, 10, epoch=1)
    with take(folder), take_over(folder) as second:
        assert second.epoch == 2
        write_checkpoint(folder, 20, epoch=1)  # the first one was suspended in its commit
        assert [path.name for path in candidate_folders(folder.checkpoints)] == ["step-00000010"]
        assert late_folders(folder.checkpoints) == [folder.checkpoint(20)]
        assert "another one had taken over" in list_checkpoints(folder.checkpoints)[0].damage
        write_checkpoint(folder, 15, epoch=2)
        prune(folder, 15, keep=3)
        assert [one.step for one in list_checkpoints(folder.checkpoints)] == [15, 10]


def take_over(folder):
    """Take the lease of a run that another launcher of this process holds."""
    lease = lease_of(folder)
    lease.take()
    return lease


def test_a_replaced_checkpoint_is_late_and_a_restored_one_is_not(folder):
    for step in (10, 20):
        write_checkpoint(folder, step, epoch=1)
    with take(folder), take_over(folder):
        write_checkpoint(folder, 20, epoch=1, tokens=7)
        assert late_folders(folder.checkpoints) == [folder.checkpoint(20)]
        write_checkpoint(folder, 5, epoch=1)  # from a copy: older than what was found
        write_checkpoint(folder, 30)  # of an earlier version of ingot
        assert late_folders(folder.checkpoints) == [folder.checkpoint(20)]


def test_a_record_that_only_an_old_listing_has_is_none(monkeypatch):
    """The store was emptied: its listing shows a record that cannot be read any more."""
    store = MemoryStore()
    for epoch in (1, 2):
        held_elsewhere(store, epoch)
    listed = store.list()
    monkeypatch.setattr(store, "list", lambda prefix="": listed)
    store.remove(record_name(2))
    assert newest_epoch(store).epoch == 1
    store.remove(record_name(1))
    assert newest_epoch(store) is None


def test_a_damaged_record_still_counts_and_makes_nothing_late(folder):
    with take(folder), take_over(folder):
        write_checkpoint(folder, 20, epoch=1)
        (folder.root / record_name(2)).write_text("{")
        assert late_folders(folder.checkpoints) == []
        with refused("E-LEASE-LOST", epoch=2):
            require_newest(LocalStore(folder.root), 1)
        for broken in ({"epoch": 3}, {"adopted": {"x": ""}}, {"adopted": 3}, {"adopted": {"9" * 5000: ""}}):
            (folder.root / record_name(2)).write_text(json.dumps(asdict(Epoch(epoch=2)) | broken))
            assert newest_local_epoch(folder.root) == Epoch(epoch=2)
        many = "{}," * (LEAST_BYTES // 32)  # in memory, 20 times as large
        for text in ("[" * 5000 + "]" * 5000, f"[{many}0]", " " * (LEAST_BYTES // 2 + 1)):
            (folder.root / record_name(2)).write_text(text)
            tracemalloc.start()
            try:
                assert newest_local_epoch(folder.root) == Epoch(epoch=2)
                assert tracemalloc.get_traced_memory()[1] < LEAST_BYTES
            finally:
                tracemalloc.stop()


def test_a_save_is_refused_before_it_changes_anything(folder):
    write_checkpoint(folder, 10, epoch=1)
    files = CheckpointFiles(folder, 20, 1)
    with take(folder), take_over(folder):
        files.make_folder([1])
        before = sorted(folder.root.rglob("*"))
        with refused("E-LEASE-LOST"):
            files.finish(CheckpointFacts(20, 1, {}, "", "", {}, epoch=1), [], (), b"", 1)
        assert sorted(folder.root.rglob("*")) == before
        files.discard()


def test_an_upload_is_refused_and_a_late_one_is_replaced(folder, tmp_path):
    store = MemoryStore()
    tier = RemoteTier(folder, store, REMOTE, 1)
    with take(folder, store):
        write_checkpoint(folder, 10, epoch=1)
        tier.push(10)
        other = RunFolder(tmp_path / "other")
        other.root.mkdir()
        other.config.write_text("")
        RemoteTier(other, store, REMOTE).fetch(10)
        with lease_of(other, store) as second:
            second.take()
            write_checkpoint(folder, 20, epoch=1)
            with refused("E-LEASE-LOST"):
                tier.push(20)
            late = (folder.checkpoint(20) / "manifest.json").read_bytes()
            store.write("checkpoints/step-00000020/manifest.json", [late])  # it was suspended after its last look
            theirs = RemoteTier(other, store, REMOTE, second.epoch)
            assert theirs.steps() == [10]
            write_checkpoint(other, 20, epoch=2, tokens=7)
            assert theirs.push(20) > 0 and theirs.steps() == [20, 10]
            assert theirs.manifest(20).tokens == 7
            write_weights(folder, 5, epoch=1)
            late = (folder.weights.checkpoint(5) / "manifest.json").read_bytes()
            store.write("weights/step-00000005/manifest.json", [late])
            assert RemoteTier(other.weights, store, REMOTE).steps() == []
