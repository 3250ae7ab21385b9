"""Every fault at every kind of request, on every S3 server: our own, and each night Ceph and moto where they are."""

import contextlib
import os
from unittest.mock import patch

import pytest
from tests.fault_proxy import FaultProxy
from tests.http_faults import Fault
from tests.s3_servers import SERVERS

from ingot.stores import objects
from ingot.stores.objects import ObjectStore, Patience
from ingot.stores.store import AlreadyStored, StoreUnreachable, read_object

pytest.importorskip("obstore")
SHORT = Patience(retries=2, retry_seconds=20, timeout_seconds=3)
FAULTS = {
    "429": {"seconds": 1},
    "500": {},
    "503": {"seconds": 1},
    "reset": {},
    "lost-answer": {},
    "silent": {"seconds": 4},
    "twice": {},
    "wrong-bit": {},
    "wrong-tag": {},
}
CALLS = ("PUT", "HEAD", "GET", "LIST", "DELETE", "BEGIN", "PART", "END")
QUICK = ("twice", "wrong-bit")  # on our own server with each change; test_hostile_stores.py has the others
PART = {"own": 1 << 10}  # bytes; the others have the least of S3, 5 MiB


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        running = {}

        def started(name):
            if name not in running:
                running[name] = stack.enter_context(SERVERS[name].start())
            return running[name]

        yield started


def played(name, do=""):
    reason = SERVERS[name].missing()
    marks = [pytest.mark.skipif(bool(reason), reason=reason)]
    return pytest.param(name, do, marks=marks if name == "own" and do in QUICK else [*marks, pytest.mark.nightly])


def opened(name, variables, prefix):
    with patch.dict(os.environ, variables):
        return ObjectStore(f"s3://{SERVERS[name].bucket}/{prefix}", patience=SHORT)


def completed(act):
    """Repeat `act` while the store does not answer as it should, as the uploader does."""
    for _ in range(3):
        with contextlib.suppress(StoreUnreachable):
            return act()
    return act()


@pytest.mark.parametrize(("name", "do"), [played(name, do) for name in SERVERS for do in FAULTS])
def test_a_fault_costs_repetitions_and_no_byte(servers, monkeypatch, name, do):
    part, server = PART.get(name, 5 << 20), servers(name)
    monkeypatch.setattr(objects, "_PART_BYTES", part)
    large = os.urandom(part) + b"the last part"
    for call in CALLS:
        with FaultProxy(server.environment) as proxy:
            place = f"{do}-{call}"
            through, direct = opened(name, proxy.environment, place), opened(name, server.environment, place)
            through.write("a", [b"old"])
            proxy.faults = [Fault(do=do, call=f"{call} *", **FAULTS[do])]
            completed(lambda s=through: s.write("a", [b"new"]))
            completed(lambda s=through: s.write("large", [large]))
            with contextlib.suppress(AlreadyStored):  # the first attempt wrote it
                completed(lambda s=through: s.write("manifest", [b"first"], new=True))
            assert completed(lambda s=through: read_object(s, "large")) == large
            assert [one.name for one in completed(through.list)] == ["a", "large", "manifest"]
            completed(lambda s=through: s.remove("a"))
            assert len(proxy.failed) == 1, call
            with pytest.raises(AlreadyStored):
                through.write("manifest", [b"second"], new=True)
            found = {one.name: read_object(direct, one.name) for one in direct.list()}
            assert found == {"large": large, "manifest": b"first"}, call


@pytest.mark.parametrize(("name", "do"), [played(name) for name in SERVERS])
def test_a_late_listing_is_an_earlier_one(servers, name, do):
    with FaultProxy(servers(name).environment) as proxy:
        store = opened(name, proxy.environment, "late")
        names = []
        for number in range(3):
            store.write(f"{number}", [b"x"])
            names.append([one.name for one in store.list()])
        proxy.faults = [Fault(do="stale", call="LIST *", changes=1), Fault(do="stale", call="LIST *", changes=9, at=2)]
        assert [one.name for one in store.list()] == names[1]
        assert [one.name for one in store.list()] == []
        assert [one.name for one in store.list()] == names[2] == ["0", "1", "2"]
