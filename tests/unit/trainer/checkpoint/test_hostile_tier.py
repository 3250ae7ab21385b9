"""The remote tier on an S3 server, with every fault at every request of a push and of a fetch."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tests.checkpoints import write_checkpoint
from tests.s3_server import BUCKET, Fault, S3Server

from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.objects import ObjectStore, Patience
from ingot.stores.store import StoreUnreachable
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier

pytest.importorskip("obstore")
FAULTS = ("503", "429", "500", "reset", "lost-answer", "wrong-tag", "other-bytes", "stale")
# Played on each change, the first ones in `make test`. The others differ from these in one answer; test_hostile_stores
# plays all kinds.
OFTEN, SLOW = ("lost-answer", "stale", "other-bytes"), ("503",)
STEP = 20
GOLDEN = Path(__file__).parents[3] / "golden"


def mostly_nightly(fault: str):
    marks = [] if fault in OFTEN else pytest.mark.slow if fault in SLOW else pytest.mark.nightly
    return pytest.param(fault, marks=marks)


@pytest.fixture
def server(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text("name = 'run'\n")
    for step in (10, STEP):
        write_checkpoint(folder, step)
    return folder


def tier_of(folder, **rules):
    remote = RemoteCheckpoints(url=f"s3://{BUCKET}/run", **rules)
    return RemoteTier(folder, ObjectStore(remote.url, patience=Patience(retries=1, retry_seconds=5)), remote)


def files_of(folder, step):
    return {path.name: path.read_bytes() for path in folder.checkpoint(step).iterdir()}


def completed(act):
    """Repeat `act` while the store does not answer, as the uploader does."""
    for _ in range(3):
        try:
            return act()
        except StoreUnreachable:
            continue
    return act()


@pytest.mark.parametrize("do", [mostly_nightly(fault) for fault in FAULTS])
def test_a_fault_at_every_request_of_an_upload_leaves_a_whole_checkpoint(server, folder, tmp_path, do):
    tier_of(folder).push(10)
    pushed = len(server.history) - 1
    for at in itertools.count(1):
        server.back_to(pushed)
        server.failed.clear()
        server.faults = [Fault(do=do, at=at, changes=2)]
        tier = tier_of(folder, keep=1)
        completed(lambda tier=tier: tier.push(STEP))
        completed(tier.prune)
        hit, server.faults = server.failed[:], []
        assert STEP in tier.steps(), hit
        other = RunFolder(tmp_path / f"other-{at}")
        other.checkpoints.mkdir(parents=True)
        assert tier_of(other).fetch_newest().step == STEP, hit
        assert files_of(other, STEP) == files_of(folder, STEP), hit
        verify_checkpoint(other.checkpoint(STEP))
        if not hit:
            break
    assert at > 8


PUSH = """
import sys
from pathlib import Path
from ingot.schema.run import RemoteCheckpoints
from ingot.schema.run_folder import RunFolder
from ingot.stores.places import open_store
from ingot.trainer.checkpoint.remote import RemoteTier

remote = RemoteCheckpoints(url=sys.argv[2], keep=1)
tier = RemoteTier(RunFolder(Path(sys.argv[1])), open_store(remote.url), remote)
tier.push(int(sys.argv[3]))
tier.prune()
"""


@pytest.mark.parametrize("do", ["kill-before", "kill-after"])
def test_an_upload_whose_process_is_killed_at_a_request_leaves_whole_checkpoints_and_is_repeated(
    server, folder, tmp_path, do
):
    """A sample of all requests; the board has each of them, in a run (tests/board/rows_upload.py)."""

    def push() -> int:
        command = [sys.executable, "-P", "-c", PUSH, str(folder.root), f"s3://{BUCKET}/run", str(STEP)]
        process = subprocess.Popen(command)
        server.kill = process.kill
        return process.wait(60)

    tier_of(folder).push(10)
    stored, begun = len(server.history) - 1, len(server.calls)
    assert push() == 0
    whole, requests = server.history[-1], len(server.calls) - begun
    random = Random(os.environ.get("INGOT_BOARD_SEED", "0"))
    for at in random.sample(range(1, requests + 1), 3):
        server.back_to(stored)
        server.faults = [Fault(do=do, at=at)]
        assert push() == -signal.SIGKILL, server.calls[-1]
        server.faults = []
        other = RunFolder(tmp_path / f"other-{at}")
        other.checkpoints.mkdir(parents=True)
        committed = STEP if f"run/checkpoints/step-{STEP:08d}/manifest.json" in server.objects else 10
        assert tier_of(other).fetch_newest().step == committed, server.failed
        for step in tier_of(other).steps():
            tier_of(other).fetch(step)
            assert files_of(other, step) == files_of(folder, step), server.failed
        assert push() == 0
        assert {name: one.data for name, one in server.objects.items()} == {
            name: one.data for name, one in whole.items()
        }


@pytest.mark.parametrize("do", [mostly_nightly(fault) for fault in FAULTS if fault != "stale"])
def test_a_fault_at_every_request_of_a_fetch_gives_equal_bytes(server, folder, tmp_path, do):
    tier_of(folder).push(STEP)
    for at in itertools.count(1):
        server.failed.clear()
        server.faults = [Fault(do=do, at=at)]
        other = RunFolder(tmp_path / f"other-{at}")
        other.checkpoints.mkdir(parents=True)
        tier = tier_of(other)
        assert completed(tier.fetch_newest).step == STEP
        assert files_of(other, STEP) == files_of(folder, STEP), server.failed
        if not server.failed:
            break
    assert at > 4


@pytest.mark.parametrize("changes", [1, 2, 3, 4, 8])
def test_a_late_listing_gives_an_older_whole_checkpoint_and_prunes_no_newer_one(server, folder, tmp_path, changes):
    for step in (10, STEP):
        tier_of(folder).push(step)
    server.faults = [Fault(do="stale", call="LIST *", times=99, changes=changes)]
    tier_of(folder, keep=1).prune()
    other = RunFolder(tmp_path / "other")
    other.checkpoints.mkdir(parents=True)
    fetched = tier_of(other).fetch_newest()
    assert fetched is None or files_of(other, fetched.step) == files_of(folder, fetched.step)
    server.faults = []
    assert tier_of(folder).steps()[0] == STEP
    assert tier_of(other).fetch(STEP) > 0


@pytest.mark.parametrize("name", ["dense-2-ranks", "experts-1-rank", "old/first", "old/layouts"])
def test_checkpoints_of_earlier_versions_go_up_and_come_back(server, tmp_path, name):
    run = RunFolder(Path(shutil.copytree(GOLDEN / name, tmp_path / "golden")))
    step = int(next(run.checkpoints.iterdir()).name.removeprefix("step-"))
    assert tier_of(run).push(step) > 0
    other = RunFolder(tmp_path / "other")
    other.checkpoints.mkdir(parents=True)
    assert tier_of(other).fetch_newest().step == step
    assert files_of(other, step) == files_of(run, step)
    verify_checkpoint(other.checkpoint(step))
