"""Runs whose store is a server that people use, which is killed, frozen and away in the middle of uploads. Nightly.

The servers are a Ceph object gateway (S3), and Azurite (Azure).

Faults that these cannot be ordered to have (503, 429 with Retry-After, resets, late listings) are played in front of
them by tests/fault_proxy.py: in tests/unit/stores/test_s3_servers.py, and on runs by benchmarks/store_faults.py.
"""

import base64
import os
import shutil
import time
from unittest.mock import patch

import pytest
from tests import azurite, ceph
from tests.board.bench import Bench, options
from tests.expect import refused

from ingot.drill.job import DEADLINE_SECONDS
from ingot.drill.oracles import o1, o2, o3, read_facts, read_trace
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run import RemoteCheckpoints
from ingot.stores.objects import ObjectStore
from ingot.stores.places import open_store
from ingot.stores.store import read_object
from ingot.trainer.checkpoint.manifest import verify_checkpoint
from ingot.trainer.checkpoint.remote import RemoteTier

pytestmark = pytest.mark.nightly

CEPH = pytest.param(ceph.CephGateway, f"s3://{ceph.BUCKET}", id="ceph", marks=ceph.NEEDED)
AZURE = pytest.param(azurite.Azurite, f"az://{azurite.CONTAINER}", id="azure", marks=azurite.NEEDED)
# The file of each rank has more than one part of a multipart upload (16 MiB), and an upload takes some seconds.
SETTINGS = ("model.d_model=128", "model.num_heads=16", "model.d_ffn=1024", "model.num_layers=8")


@pytest.fixture
def server(start):
    """Return a running server, with the variables of its clients in the environment."""
    with start() as one, patch.dict(os.environ, one.environment):
        yield one


@pytest.mark.parametrize(("start", "bucket"), [CEPH, AZURE])
def test_a_place_or_key_that_is_wrong_is_refused_at_once_and_without_the_secret(server, bucket, monkeypatch):
    elsewhere = f"{bucket.partition('://')[0]}://nowhere/run"
    for act in (lambda one: one.list(), lambda one: one.write("a", [b"1"]), lambda one: read_object(one, "a")):
        with refused("E-STORE-REFUSED") as caught:
            act(open_store(elsewhere))
        assert "no such bucket" in caught.value.found
    wrong = base64.b64encode(b"another key").decode()
    monkeypatch.setenv(server.secret_variable, wrong)
    with refused("E-STORE-REFUSED") as caught:
        open_store(f"{bucket}/run").write("a", [b"1"])
    assert "denies access" in caught.value.found and wrong not in str(caught.value)


@pytest.mark.parametrize(("start", "bucket"), [CEPH])
def test_an_upload_in_parts_is_compared_by_its_tag_alone(server, bucket, monkeypatch):
    store, data = open_store(f"{bucket}/parts"), os.urandom(40 << 20)
    with monkeypatch.context() as forbidden:
        forbidden.setattr(ObjectStore, "stream", lambda *_: pytest.fail("the object is read back"))
        store.write("x", [data])
    assert b"".join(store.stream("x")) == data


def killed(server, folder):
    """The server dies and is there again within the repetitions of a request, or soon after."""
    server.kill()
    time.sleep(1)
    server.start()


def frozen(server, folder):
    with server.frozen():
        time.sleep(5)


def away(server, folder):
    """The server comes back after the library has given up, and the uploader has reported that."""
    server.kill()
    wait_for(lambda: list(read_events(folder.events, events.CHECKPOINT_NOT_STORED)))
    server.start()


def wait_for(is_true) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("start", "bucket"), [CEPH, AZURE])
def test_a_run_loses_nothing_to_a_server_that_is_killed_frozen_or_away_during_uploads(server, bucket):
    url = f"{bucket}/run"
    remote = (f'checkpoint.remote.url="{url}"', "checkpoint.remote.bytes_per_second=8000000", 'checkpoint.mode="async"')
    with Bench() as bench:
        reference = bench.reference(*SETTINGS)
        folder = bench.folder("run")
        for until, fault in ((8, killed), (12, frozen), (16, away)):
            begun = set(server.uploads())
            command = (*options([*SETTINGS, *remote]), "--until-step", str(until))
            process = bench.start("run", *command, env=server.environment)
            wait_for(lambda begun=begun: set(server.uploads()) - begun)
            fault(server, folder)
            ended = bench.ended(process)
            assert ended.code == 10, f"{fault.__name__}: {ended.output[-2000:]}"
            stored = [e["step"] for e in read_events(folder.events, events.CHECKPOINT_STORED) if e["what"] == "full"]
            assert stored[-1] == until, fault.__name__
        empty = bench.folder("fetched")
        empty.checkpoints.mkdir(parents=True)
        tier = RemoteTier(empty, open_store(url), RemoteCheckpoints(url=url))
        assert tier.steps() == sorted({*stored}, reverse=True)[: RemoteCheckpoints.keep]
        for step in tier.steps():
            tier.fetch(step)
            verify_checkpoint(empty.checkpoint(step))
        before = read_trace(folder)
        shutil.rmtree(folder.root)
        ended = bench.train("run", *options([*SETTINGS, *remote]), env=server.environment)
        assert ended.code == 0, ended.output[-2000:]
        assert [e["step"] for e in read_events(folder.events, events.CHECKPOINT_FETCHED)] == [16]
        found = read_facts(folder)
        assert o1(before | found.trace, reference.trace) == ""
        assert o2(found.state, reference.state) == "" and o3(found.samples, reference.samples) == ""
