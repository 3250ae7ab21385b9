"""The promises of every store: a folder, memory, the object stores of the library (its store in memory, S3, Azure)."""

import contextlib
import os
import stat
import threading

import pytest
from tests import azurite, ceph
from tests.expect import refused
from tests.gcs_server import GoogleServer
from tests.s3_server import BUCKET, S3Server

from ingot.errors import ConfigError
from ingot.stores import objects
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from ingot.stores.objects import ObjectStore
from ingot.stores.places import open_store
from ingot.stores.store import AlreadyStored, NotStored, read_object

PARTS = 3 * objects._PART_BYTES + 17


def object_store():
    return ObjectStore("s3://bucket/runs", pytest.importorskip("obstore.store").MemoryStore())


# Servers that people use, every night where they are installed: started once, with a place for each test.
SERVERS = {
    "ceph": (ceph.CephGateway, f"s3://{ceph.BUCKET}", ceph.NEEDED),
    "azure": (azurite.Azurite, f"az://{azurite.CONTAINER}", azurite.NEEDED),
}


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        running = {}

        def place_of(name):
            if name not in running:
                running[name] = stack.enter_context(SERVERS[name][0]())
            return SERVERS[name][1], running[name].environment

        yield place_of


@pytest.fixture(
    params=[
        "local",
        "memory",
        "objects",
        "s3",
        "gs",
        *(pytest.param(name, marks=[pytest.mark.nightly, needed]) for name, (_, _, needed) in SERVERS.items()),
    ]
)
def store(request, tmp_path, monkeypatch):
    if request.param in ("s3", "gs"):
        pytest.importorskip("obstore")
        with {"s3": S3Server, "gs": GoogleServer}[request.param](page=1) as server:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            yield ObjectStore(f"{request.param}://{BUCKET}/runs")
    elif request.param in SERVERS:
        pytest.importorskip("obstore")
        bucket, variables = request.getfixturevalue("servers")(request.param)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield ObjectStore(f"{bucket}/{tmp_path.name}")
    elif request.param == "objects":
        yield object_store()
    else:
        yield LocalStore(tmp_path / "a" / "store") if request.param == "local" else MemoryStore()


def names(store, prefix=""):
    return [(one.name, one.bytes) for one in store.list(prefix)]


def test_objects_are_written_read_listed_and_removed(store):
    assert names(store) == names(store, "nothing/here") == []
    large = bytes(range(256)) * (PARTS // 256) + b"end"
    store.write("a/b/large", [memoryview(large)[:1000], large[1000:]])
    store.write("a/small", [b"12", b"", b"3"])
    store.write("ab", [])
    assert read_object(store, "a/b/large") == large
    assert read_object(store, "a/small") == b"123"
    assert read_object(store, "ab") == b""
    assert names(store, "a") == [("a/b/large", len(large)), ("a/small", 3)]
    store.write("a/small", [b"other"])
    assert read_object(store, "a/small") == b"other"
    store.remove("a/b/large")
    store.remove("a/b/large")
    assert names(store) == [("a/small", 5), ("ab", 0)]


def test_of_two_writers_of_a_new_name_one_succeeds(store):
    store.write("manifest", [b"first"], new=True)
    with pytest.raises(AlreadyStored, match="already has an object 'manifest'"):
        store.write("manifest", [b"second"], new=True)
    assert read_object(store, "manifest") == b"first"


def test_of_many_writers_at_once_exactly_one_succeeds(store):
    successes, start = [], threading.Barrier(8)

    def write(number):
        start.wait()
        try:
            store.write("epoch", [b"%d" % number], new=True)
            successes.append(number)
        except AlreadyStored:
            pass

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(successes) == 1
    assert read_object(store, "epoch") == b"%d" % successes[0]


def test_a_write_whose_data_ends_early_changes_nothing(store):
    store.write("a", [b"old"])

    def torn():
        yield b"x" * PARTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write("a", torn())
    assert read_object(store, "a") == b"old"
    assert names(store) == [("a", 3)]


def test_what_is_not_there_is_named(store):
    with pytest.raises(NotStored, match="has no object 'a/b'"):
        read_object(store, "a/b")


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a/..", "a\\b", "a\nb", "."])
def test_no_name_leaves_the_store(store, name):
    for act in (lambda: store.write(name, [b""]), lambda: read_object(store, name), lambda: store.remove(name)):
        with pytest.raises(ConfigError, match="is not the name of an object"):
            act()


def test_an_object_that_is_too_large_is_not_read_into_memory(store):
    store.write("a", [b"12345"])
    with refused("E-STORE-SIZE"):
        read_object(store, "a", most=4)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("E-STORE-FOLDER"):
        LocalStore(tmp_path / "file").write("a", [b""])


def test_the_folder_of_a_store_is_not_made(tmp_path):
    """A disk that is not mounted would look like an empty store."""
    folder = tmp_path / "disk" / "store"
    store = open_store(f"file://{folder}")
    for act in (
        lambda: store.write("a", [b"data"]),
        lambda: read_object(store, "a"),
        lambda: store.list("checkpoints"),
        lambda: store.remove("a"),
    ):
        with refused("E-STORE-NO-FOLDER", store=f"file://{folder}"):
            act()
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    store.write("a/b", [b"data"])
    assert (names(store), read_object(store, "a/b")) == ([("a/b", 4)], b"data")


def test_the_leftover_of_a_killed_writer_is_no_object(tmp_path):
    (tmp_path / ".a.host.7.tmp").write_text("half")
    assert names(LocalStore(tmp_path)) == []


def test_a_store_that_changed_the_bytes_is_noticed(monkeypatch):
    """The memory store of the library has no MD5 as the tag of an object: what it holds is read."""
    store = object_store()
    put = store._obstore.put
    monkeypatch.setattr(store, "_obstore", Lying(store._obstore, put))
    with refused("E-STORE-CONTENT"):
        store.write("a", [b"right"])


class Lying:
    """The library, with a `put` that changes the last byte."""

    def __init__(self, library, put):
        self.__dict__ |= {name: getattr(library, name) for name in ("head", "get", "list", "delete")}
        self._put = put

    def put(self, store, name, data, **options):
        return self._put(store, name, bytes(data)[:-1] + b"?", **options)


@pytest.mark.parametrize("new", [False, True])
def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, new):
    done = []
    for name in ("fsync", "link", "rename", "replace"):
        call = getattr(os, name)

        def recorded(first, *more, name=name, call=call, **options):
            done.append(name if name != "fsync" else "folder" if stat.S_ISDIR(os.fstat(first).st_mode) else "file")
            return call(first, *more, **options)

        monkeypatch.setattr(os, name, recorded)
    (tmp_path / "store").mkdir()
    LocalStore(tmp_path / "store").write("a", [b"data"], new=new)
    assert done == ["file", "link" if new else "replace", "folder"]


@pytest.mark.parametrize(
    "url",
    ["s3://", "http://host/x", "s3://key:secret@bucket/x", "s3://bucket/x?token=1", "file://relative", "bucket/x"],
)
def test_other_places_are_refused_without_their_secrets(url):
    with refused("E-STORE-URL") as error:
        open_store(url)
    assert "secret" not in str(error.value)
    assert "token=1" not in str(error.value)


def test_google_refuses_a_wrong_token_and_bucket_at_once_and_without_the_secret(monkeypatch):
    pytest.importorskip("obstore")
    with GoogleServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with refused("E-STORE-REFUSED") as error:
            open_store("gs://nowhere/run").write("a", [b"1"])
        assert "no such bucket" in error.value.found
        monkeypatch.setenv(server.secret_variable, "another-t0k3n")
        with refused("E-STORE-REFUSED") as error:
            open_store(f"gs://{BUCKET}/run").list()
    assert "denies access" in error.value.found and "t0k3n" not in str(error.value)


def test_errors_of_the_library_are_shown_without_credentials():
    text = "GET http://h/x?X-Amz-Credential=AKIA1&X-Amz-Signature=s3cr3t failed\n\nDebug source:\nToken: t0k3n"
    assert objects._without_credentials(text) == "GET http://h/x?X-Amz-Credential=***&X-Amz-Signature=*** failed"
