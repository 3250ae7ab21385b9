"""A run whose store is a Ceph object gateway that is killed, frozen and away in the middle of uploads. Nightly.

Faults that a gateway cannot be ordered to have (503, 429 with Retry-After, resets, late listings) are played by
tests/s3_server.py.
"""

import os
import shutil
import threading
import time
from unittest.mock import patch

import pytest
from tests.board.bench import Bench, options
from tests.ceph import BUCKET, CephGateway, missing

from ingot.drill.job import DEADLINE_SECONDS
from ingot.drill.oracles import o1, o2, o3, read_facts, read_trace
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run import RemoteCheckpoints
from ingot.stores.objects import ObjectStore
from ingot.stores.places import open_store
from ingot.stores.store import AlreadyStored, read_object
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier

_MISSING = missing()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(_MISSING), reason=_MISSING)]

URL = f"s3://{BUCKET}/run"
# The file of each rank has more than one part of a multipart upload (16 MiB), and an upload takes some seconds.
SETTINGS = ("model.d_model=128", "model.num_heads=16", "model.d_ffn=1024", "model.num_layers=8")
REMOTE = (f'checkpoint.remote.url="{URL}"', "checkpoint.remote.bytes_per_second=8000000", 'checkpoint.mode="async"')


@pytest.fixture(scope="module")
def gateway():
    with CephGateway() as one:
        yield one


@pytest.fixture
def variables(gateway):
    with patch.dict(os.environ, gateway.environment):
        yield gateway.environment


def test_of_many_writers_of_a_new_object_one_succeeds(variables):
    """The commit of a checkpoint is such a write."""
    store, outcomes = open_store(f"s3://{BUCKET}/commits"), {}

    def write(number: int) -> None:
        try:
            store.write("manifest.json", [b"%d" % number], new=True)
            outcomes[number] = "wrote"
        except AlreadyStored:
            outcomes[number] = "already there"

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number, outcome in outcomes.items() if outcome == "wrote"]
    assert len(outcomes) == 8 and len(winners) == 1
    assert read_object(store, "manifest.json") == b"%d" % winners[0]


def test_an_upload_in_parts_is_compared_by_its_tag_alone(variables, monkeypatch):
    store, data = open_store(f"s3://{BUCKET}/parts"), os.urandom(40 << 20)
    with monkeypatch.context() as forbidden:
        forbidden.setattr(ObjectStore, "stream", lambda *_: pytest.fail("the object is read back"))
        store.write("x", [data])
    assert b"".join(store.stream("x")) == data


def killed(gateway, folder):
    """The gateway dies and is there again within the repetitions of a request, or soon after."""
    gateway.kill()
    time.sleep(1)
    gateway.start()


def frozen(gateway, folder):
    with gateway.frozen():
        time.sleep(5)


def away(gateway, folder):
    """The gateway comes back after the library has given up, and the uploader has reported that."""
    gateway.kill()
    wait_for(lambda: list(read_events(folder.events, events.CHECKPOINT_NOT_STORED)))
    gateway.start()


def wait_for(is_true) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_loses_nothing_to_a_gateway_that_is_killed_frozen_or_away_during_uploads(gateway, variables):
    with Bench() as bench:
        reference = bench.reference(*SETTINGS)
        folder = bench.folder("run")
        for until, fault in ((8, killed), (12, frozen), (16, away)):
            begun = set(gateway.uploads())
            command = (*options([*SETTINGS, *REMOTE]), "--until-step", str(until))
            process = bench.start("run", *command, env=variables)
            wait_for(lambda begun=begun: set(gateway.uploads()) - begun)
            fault(gateway, folder)
            ended = bench.ended(process)
            assert ended.code == 10, f"{fault.__name__}: {ended.output[-2000:]}"
            stored = [e["step"] for e in read_events(folder.events, events.CHECKPOINT_STORED) if e["what"] == "full"]
            assert stored[-1] == until, fault.__name__
        empty = bench.folder("fetched")
        empty.checkpoints.mkdir(parents=True)
        tier = RemoteTier(empty, open_store(URL), RemoteCheckpoints(url=URL))
        assert tier.steps() == sorted({*stored}, reverse=True)[: RemoteCheckpoints.keep]
        for step in tier.steps():
            tier.fetch(step)
            verify_checkpoint(empty.checkpoint(step))
        before = read_trace(folder)
        shutil.rmtree(folder.root)
        ended = bench.train("run", *options([*SETTINGS, *REMOTE]), env=variables)
        assert ended.code == 0, ended.output[-2000:]
        assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_FETCHED)] == [16]
        found = read_facts(folder)
        assert o1(before | found.trace, reference.trace) == ""
        assert o2(found.state, reference.state) == "" and o3(found.samples, reference.samples) == ""
