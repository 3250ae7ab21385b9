"""The keeper of snapshots in memory and its callers, in one process: what is never kept, and what is never believed."""

import hashlib
import os
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.expect import refused

from ingot.errors import ResourceError
from ingot.schema.checkpoint import file_of
from ingot.trainer import restore
from ingot.trainer.checkpoint import images, keeper, replicas
from ingot.trainer.checkpoint.images import Connection, KeptImage
from ingot.trainer.checkpoint.keeper import Keeper, Peer, reach_local
from ingot.trainer.checkpoint.message import RankError, as_value, pack_json
from ingot.trainer.checkpoint.replicas import Copying, MemoryCheckpoint, Replicas

BYTES = b"12345678"
PEER = Peer(host="there", port=1, token="")
ERRORS = (
    OSError("gone"),
    ValueError("not a number"),
    RankError("KeyError: 3"),
    ResourceError("E-REPLICA-MEMORY", "no memory", rule="-", fix="-"),
)


def image(**changes):
    return KeptImage(
        **{"rank": 0, "snapshot": "7-0-1", "step": 40, "epoch": 7, "world": 2, "bytes": len(BYTES)} | changes
    )


def memory():
    fd = os.memfd_create("ingot-of-a-rank")
    os.write(fd, BYTES)
    return fd


def kept_memory():
    """Return the number of images that this process has in memory."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:ingot-image" in str(link.readlink()) for link in links)


class OtherNode(threading.Thread):
    """The keeper of another node: it receives an image, calls `before_answer`, and answers. has: what arrived whole."""

    def __init__(self, before_answer=lambda: None):
        super().__init__(daemon=True)
        self.has, self.before_answer = [], before_answer
        ours, theirs = socket.socketpair()
        self.way, self.own = Connection(ours), Connection(theirs)

    def run(self):
        with closing(self.own):
            try:
                self.own.receive()
                found = bytearray(len(BYTES))
                self.own.fill(memoryview(found))
                if self.own.receive().decode() == hashlib.sha256(found).hexdigest():
                    self.has.append(bytes(found))
                self.before_answer()
                self.own.send(as_value(pack_json(None)))
            except OSError:
                return


def keep(own: Keeper, peers=(), about=()):
    """Keep the image of rank 0 in `own`, as its request does. Returns the answer."""
    request = {"do": "keep", "image": vars(image()), "peers": [vars(one) for one in peers]}
    return own.answer(Connection(socket.socketpair()[0]), request, list(about), [memory()])


def listed(own: Keeper):
    return [one for one, _, _ in own._images.values()]


@pytest.mark.parametrize("when", ["while it is copied", "while another node answers"])
def test_a_rank_that_begins_another_save_meanwhile_leaves_no_image_of_two_saves(monkeypatch, when):
    """The rank gave the copy up, and fills the same memory anew."""
    own = Keeper()

    def begin():
        own.answer(None, {"do": "begin", "rank": 0}, [], [])

    def chunks(fd, start, end):
        yield memoryview(BYTES)
        begin()

    peer = OtherNode() if when == "while it is copied" else OtherNode(begin)
    if when == "while it is copied":
        monkeypatch.setattr(keeper, "chunks_of", chunks)
    monkeypatch.setattr(keeper, "reach_peer", lambda _: peer.way)
    peer.start()
    with pytest.raises(OSError, match="rank 0 has begun another save"):
        keep(own, [PEER])
    assert listed(own) == []
    peer.join(20)
    assert peer.has == ([] if when == "while it is copied" else [BYTES])  # that one is of one save


def test_an_image_that_is_received_twice_at_once_is_the_later_one():
    """The sender gave up the first copy, and the node had not noticed that yet."""
    own, (first, theirs), (second, later) = Keeper(), socket.socketpair(), socket.socketpair()
    failures = []

    def hold(connected, number):
        try:
            own._hold(image(snapshot=f"7-0-{number}"), [], Connection(connected))
        except OSError as error:
            failures.append((number, str(error)))

    early = threading.Thread(target=hold, args=(theirs, 1), daemon=True)
    early.start()
    Connection(first).socket.sendall(BYTES[:4])
    while own._turns.get(0, 0) == 0:
        time.sleep(0.001)
    Connection(second).socket.sendall(BYTES)
    Connection(second).send(hashlib.sha256(BYTES).hexdigest().encode())
    hold(later, 2)
    assert [one.snapshot for one in listed(own)] == ["7-0-2"]
    first.sendall(BYTES[4:])
    Connection(first).send(hashlib.sha256(BYTES).hexdigest().encode())
    early.join(20)
    assert [one.snapshot for one in listed(own)] == ["7-0-2"]
    assert [number for number, _ in failures] == [1]


def test_the_memory_of_a_copy_whose_sender_dies_is_given_back():
    own, before = Keeper(), kept_memory()
    for sent in (BYTES[:3], BYTES):
        ours, theirs = socket.socketpair()
        ours.sendall(sent)
        ours.close()
        with closing(theirs), pytest.raises(OSError, match="closed"):
            own._hold(image(), [], Connection(theirs))
        assert (kept_memory(), listed(own)) == (before, [])


def test_a_node_that_takes_nothing_costs_its_copy_alone(monkeypatch):
    monkeypatch.setattr(images, "SECONDS", 0.1)
    own, (ours, silent) = Keeper(), socket.socketpair()
    monkeypatch.setattr(keeper, "reach_peer", lambda _: Connection(ours))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(keep(own, [PEER])), daemon=True)
    thread.start()
    thread.join(20)
    with closing(silent):
        assert [(one["copies"], len(one["failures"])) for one in answers] == [(0, 1)]
        assert [one.sha256 for one in listed(own)] == [hashlib.sha256(BYTES).hexdigest()]


def test_a_keeper_of_another_user_is_not_believed_and_answers_no_other_user(monkeypatch):
    name = f"ingot-test-{os.getpid()}"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("\0" + name)
        listener.listen()
        reach_local(name).close()
        own = os.getuid()
        monkeypatch.setattr(keeper.os, "getuid", lambda: own + 1)
        with pytest.raises(PermissionError, match="another user"):
            reach_local(name)
        ours, theirs = socket.socketpair()
        with closing(ours):
            ours.sendall(b"-")
            Connection(ours).send(pack_json({"do": "list", "more": 0}))
            keeper._serve_one(Connection(theirs), Keeper(), "")
            with suppress(ConnectionResetError):
                assert ours.recv(1) == b""


class Asked:
    """A keeper that raises `error`, or answers None, and records how long its callers wait for it."""

    def __init__(self, error=None):
        self.error, self.seconds = error, 0.0
        self.socket = SimpleNamespace(settimeout=self._wait, fileno=lambda: -1)

    def _wait(self, seconds):
        self.seconds = seconds

    def ask(self, request, *more):
        if self.error is not None:
            raise self.error
        return {"failures": [], "copies": 0}

    def close(self):
        pass


def memory_checkpoint(asked, size):
    manifest = SimpleNamespace(step=40)
    own = SimpleNamespace(node=0, connect=lambda holders: asked)
    return MemoryCheckpoint(own, [image(bytes=size)], [[0]], manifest)


def test_large_images_have_time(monkeypatch):
    """At 10 MB/s, 60 GB take 100 minutes."""
    asked = Asked()
    monkeypatch.setattr(replicas, "reach_local", lambda name: asked)
    monkeypatch.setattr(replicas.socket, "send_fds", lambda *arguments: None)
    Copying("name", -1, image(bytes=60 * 10**9), [], []).wait()
    assert asked.seconds >= 6000
    asked = Asked(OSError("asked"))
    with refused("E-REPLICA-LOST"):
        memory_checkpoint(asked, 60 * 10**9).find(file_of(0), ["a"])
    assert asked.seconds >= 6000


@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
def test_whatever_a_keeper_answers_a_run_has_its_checkpoints(error, monkeypatch):
    with refused("E-REPLICA-LOST", rank=0):
        memory_checkpoint(Asked(error), 8).find(file_of(0), ["a"])
    monkeypatch.setattr(replicas, "asking", lambda name: Asked(error))
    own, lines, log = Replicas("name", [PEER], 0, 0, []), [], []
    if not isinstance(error, ValueError):  # which no order of ingot's gets
        own.retain("7-0-1")
    folder = SimpleNamespace(checkpoints=Path("nowhere"))
    facts = SimpleNamespace(epoch=7)
    parts = None  # nothing of the model is looked at
    assert restore.load_from_memory(parts, folder, facts, own, log.append, lines.append) is None
    assert len(lines) == 1 and getattr(error, "found", str(error)) in lines[0]


@pytest.mark.parametrize(
    ("first_node", "local", "found"),
    [("10.0.0.1", None, "10.0.0.7"), ("node-1", "127.0.1.1", "10.0.0.7"), ("localhost", "127.0.0.1", "127.0.0.1")],
)
def test_a_node_is_found_by_the_others(monkeypatch, first_node, local, found):
    """A machine's own name often means itself; its address is then that of the way to any other machine."""

    class Probe(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, place):
            self.name = local if local and place[0] == first_node else "10.0.0.7"

        def getsockname(self):
            return self.name, 9

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", first_node)
    monkeypatch.setattr(replicas, "world", lambda: 8)
    monkeypatch.setattr(replicas, "socket", SimpleNamespace(AF_INET=0, SOCK_DGRAM=0, socket=lambda *_: Probe()))
    assert replicas._own_address() == found
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert replicas._own_address() == ""  # no other node
