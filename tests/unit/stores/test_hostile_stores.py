"""An object store over HTTP with every fault of tests/s3_server.py: a write or a read is right, or an error says so."""

import os

import pytest
from tests.expect import refused
from tests.s3_server import BUCKET, KEY, SECRET, Fault, S3Server, md5

from ingot.errors import IngotError
from ingot.stores import objects
from ingot.stores.objects import ObjectStore, Patience
from ingot.stores.store import AlreadyStored, StoreRefused, StoreUnreachable, read_object

pytest.importorskip("obstore")
SHORT = Patience(retries=1, retry_seconds=5, timeout_seconds=0.5)
ONCE = {
    "429": {},
    "500": {},
    "503": {"seconds": 1},
    "reset": {},
    "lost-answer": {},
    "silent": {"seconds": 2},
}
# Requests that the library does not repeat, because they may have been executed: the caller does.
NOT_REPEATED = {("reset", "LIST")} | {(do, "DELETE") for do in ("reset", "lost-answer", "silent")}
PARTS = 40  # bytes of an object in three parts


@pytest.fixture
def server(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(objects, "_PART_BYTES", 16)
    with S3Server(page=2) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def store(server):
    return ObjectStore(f"s3://{BUCKET}/runs/a", patience=SHORT)


def held(server, name):
    return server.objects[f"runs/a/{name}"].data


@pytest.mark.parametrize("call", ["PUT", "HEAD", "GET", "LIST", "DELETE", "BEGIN", "PART", "END"])
@pytest.mark.parametrize("do", ONCE)
def test_a_fault_that_happens_once_costs_a_repetition(server, store, do, call):
    store.write("a", [b"old"])
    server.faults = [Fault(do=do, call=f"{call} *", **ONCE[do])]
    large = bytes(range(PARTS))
    acts = (
        lambda: store.write("a", [b"new"]),
        lambda: store.write("large", [large]),
        lambda: large == read_object(store, "large") or pytest.fail("other bytes were read"),
        lambda: [(one.name, one.bytes) for one in store.list()] == [("a", 3), ("large", PARTS)] or pytest.fail("names"),
        lambda: store.remove("a"),
    )
    for act in acts:
        try:
            act()
        except StoreUnreachable:
            assert (do, call) in NOT_REPEATED
            act()
    assert (held(server, "large"), store.list()[0].name) == (large, "large")
    assert len(server.failed) == 1


@pytest.mark.parametrize(
    ("do", "kind", "code"),
    [
        ("403", StoreRefused, "E-STORE-REFUSED"),
        ("404", StoreRefused, "E-STORE-REFUSED"),
        ("503", StoreUnreachable, "E-STORE-UNREACHABLE"),
        ("reset", StoreUnreachable, "E-STORE-UNREACHABLE"),
        ("silent", StoreUnreachable, "E-STORE-UNREACHABLE"),
    ],
)
@pytest.mark.parametrize("act", ["write", "multipart", "read", "list", "remove"])
def test_a_fault_that_stays_is_an_error_without_a_secret(server, store, do, kind, code, act):
    store.write("a", [b"data"])
    server.faults, before = [Fault(do=do, times=99, seconds=0.2)], dict(server.objects)
    acts = {
        "write": lambda: store.write("a", [b"new"]),
        "multipart": lambda: store.write("a", [bytes(PARTS)]),
        "read": lambda: read_object(store, "a"),
        "list": store.list,
        "remove": lambda: store.remove("a"),
    }
    server.calls.clear()
    with refused(code) as error:
        acts[act]()
    assert isinstance(error.value, kind)
    assert not any(secret in f"{error.value}{error.value.facts}" for secret in (SECRET, KEY))
    assert server.objects == before
    if kind is StoreRefused:
        assert len(server.calls) == 1  # another attempt would fail as well


@pytest.mark.parametrize("size", [4, PARTS])
@pytest.mark.parametrize("new", [False, True])
def test_bytes_that_a_store_changed_do_not_count_as_stored(server, store, size, new):
    server.faults = [Fault(do="other-bytes", call="P* *")]
    with refused("E-STORE-CONTENT"):
        store.write("a", [bytes(size)], new=new)
    store.write("a", [bytes(size)], new=new)  # what the first attempt left does not refuse the second
    assert held(server, "a") == bytes(size)


def test_a_wrong_tag_costs_a_reading_and_no_error(server, store):
    """Also stores that encrypt give other tags than the MD5."""
    server.faults = [Fault(do="wrong-tag", call="HEAD *")]
    store.write("a", [b"data"])
    assert server.calls[-1] == "GET runs/a/a" and md5(b"data") == server.objects["runs/a/a"].tag


def test_the_end_of_an_upload_that_fails_inside_of_a_200_is_repeated(server, store):
    server.faults = [Fault(do="error-in-200", call="END *")]
    store.write("a", [bytes(PARTS)])
    assert held(server, "a") == bytes(PARTS)
    assert server.calls.count("END runs/a/a") == 2


def test_an_upload_that_a_store_forgot_when_it_had_ended_costs_another_attempt(server, store):
    """The end is asked for again if its answer was lost: Ceph repeats the answer, others know the upload no more."""
    server.faults = [Fault(do="lost-answer", call="END *"), Fault(do="no-upload", call="END *", at=2)]
    with refused("E-STORE-UNREACHABLE"):
        store.write("a", [bytes(PARTS)])
    store.write("a", [bytes(PARTS)])
    assert held(server, "a") == bytes(PARTS)


@pytest.mark.parametrize("do", ["429", "503", "500", "reset", "lost-answer", "silent"])
def test_a_new_object_is_written_by_one_writer_whatever_gets_lost(server, store, do):
    """A request that may have been executed is not repeated by the library: the next attempt finds the object."""
    server.faults = [Fault(do=do, call="PUT *", **ONCE[do])]
    attempts = 0
    while attempts < 3:
        attempts += 1
        try:
            store.write("manifest", [b"first"], new=True)
            break
        except StoreUnreachable:
            continue
        except AlreadyStored:
            assert do == "lost-answer"
            break
    assert held(server, "manifest") == b"first"
    with pytest.raises(AlreadyStored):
        store.write("manifest", [b"second"], new=True)
    assert held(server, "manifest") == b"first"


def test_a_killed_or_failed_upload_leaves_no_object(server, store):
    server.faults = [Fault(do="503", call="PART *", at=2, times=99)]
    with pytest.raises(IngotError):
        store.write("a", [bytes(PARTS)])
    assert server.objects == {}
    assert server.uploads == {}


def test_a_pause_that_a_store_asks_for_is_not_kept_but_the_request_succeeds(server, store, monkeypatch):
    """The library does not read Retry-After: it repeats after its own pauses, and the uploader after up to a minute."""
    server.faults = [Fault(do="429", call="PUT *", seconds=3600)]
    store.write("a", [b"data"])
    assert server.calls[:2] == ["PUT runs/a/a"] * 2
