"""Connections between launchers: who may join, what is sent, and what a broken or hostile other end can do."""

import json
import selectors
import socket
import threading
import time
from dataclasses import replace
from ipaddress import ip_address

import pytest

from ingot.machine.interfaces import interface_of
from ingot.trainer.launch import link as module
from ingot.trainer.launch.link import LeaderAddress, Link, answer, dial, listen, signs_of_life


@pytest.fixture
def pair():
    """Two ends of one connection."""
    ends = [Link(one) for one in _connected()]
    yield ends
    for end in ends:
        end.close("the test is over")


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def read(end: Link, count: int = 1) -> list[dict]:
    """Wait for `count` messages, or for the end of the connection."""
    found: list[dict] = []
    while len(found) < count and not end.closed:
        found += end.read()
        time.sleep(0.005)
    return found


@pytest.fixture
def join():
    """`join(key)`: what the leader and a node with this key have of their connection."""
    listener, address = listen()

    def make(key: str | None = None):
        found: list[Link | None] = []
        used = address if key is None else replace(address, hosts=("127.0.0.1",), key=key, place="elsewhere")
        thread = threading.Thread(target=lambda: found.append(answer(listener.accept()[0], address.key)), daemon=True)
        thread.start()
        node = dial(used)
        thread.join()
        return found[0], node

    yield make
    listener.close()


def test_both_ends_know_the_key(join):
    leader, node = join()
    leader.send(accepted={"epoch": 3})
    node.send(hello={"host": "b"})
    assert read(node) == [{"accepted": {"epoch": 3}}] and read(leader) == [{"hello": {"host": "b"}}]
    assert node.own_host == leader.own_host and interface_of(node.own_host)
    for end in (leader, node):
        end.close("the test is over")
        assert end.own_host and end.other_host  # a leader records nodes that have gone again


def test_a_node_with_another_key_does_not_get_in(join):
    leader, node = join("0" * 64)
    assert leader is None and node is None


def test_a_leader_that_does_not_know_the_key_is_not_believed():
    """Another process has got the port of a leader that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = LeaderAddress(hosts=("127.0.0.1",), port=listener.getsockname()[1], key="a" * 64, place="elsewhere")

        def pretend() -> None:
            connected = listener.accept()[0]
            connected.sendall(b"1234\n")
            connected.recv(1000)
            connected.sendall(b"5678\n")

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        assert dial(address) is None
        thread.join()


def test_an_address_that_does_not_answer_keeps_no_node_waiting(monkeypatch):
    """A leader has addresses in networks that a node does not see: such a call waits until it gives up."""
    monkeypatch.setattr(module, "_HANDSHAKE_SECONDS", 20.0)
    with socket.create_server(("127.0.0.2", 0), backlog=0) as silent:
        port = silent.getsockname()[1]
        waiting = [socket.create_connection(silent.getsockname())]  # no other one is let in
        with socket.create_server(("127.0.0.3", port)) as listener:
            address = LeaderAddress(hosts=("127.0.0.2", "127.0.0.3"), port=port, key="a" * 64, place="elsewhere")
            threading.Thread(target=lambda: answer(listener.accept()[0], address.key), daemon=True).start()
            began = time.monotonic()
            node = dial(address)
            assert node is not None and node.other_host == "127.0.0.3" and time.monotonic() < began + 10
            node.close("the test is over")
        for one in waiting:
            one.close()


def test_of_two_networks_the_first_address_is_used_whichever_answers_first(monkeypatch):
    """Ranks use the network of that connection: nodes, and the next start, have to choose the same one."""

    class SecondIsQuicker(selectors.DefaultSelector):
        looked = False

        def select(self, timeout=None):
            found = super().select(timeout)
            while not self.looked and len(found) < 2:
                found = super().select(timeout)
            found = [one for one in found if self.looked or one[0].data == 1]
            self.looked = True
            return found

    monkeypatch.setattr(module.selectors, "DefaultSelector", SecondIsQuicker)
    with socket.create_server(("127.0.0.2", 0)) as first:
        port = first.getsockname()[1]
        with socket.create_server(("127.0.0.3", port)) as second:
            address = LeaderAddress(hosts=("127.0.0.2", "127.0.0.3"), port=port, key="a" * 64, place="elsewhere")
            for one in (first, second):
                threading.Thread(target=lambda one=one: answer(one.accept()[0], address.key), daemon=True).start()
            node = dial(address)
    assert node is not None and node.other_host == "127.0.0.2"
    node.close("the test is over")


def test_the_leader_is_called_by_addresses_only():
    """A name is looked up, which takes long if the network is gone."""
    listener, address = listen()
    listener.close()
    assert all(ip_address(host) for host in address.hosts)


def test_tcp_does_not_wait_long_between_its_repetitions():
    """A link that is whole again after eight seconds would otherwise be silent for thirteen. Older kernels refuse."""

    class OfAnOlderKernel(socket.socket):
        asked: tuple = ()

        def setsockopt(self, level, name, value):
            if (level, name) == (socket.IPPROTO_TCP, 44):  # TCP_RTO_MAX_MS of linux/tcp.h
                self.asked = value, "ms"
                raise OSError(92, "Protocol not available")
            super().setsockopt(level, name, value)

    with socket.create_server(("127.0.0.1", 0)) as server, OfAnOlderKernel() as connected:
        connected.connect(server.getsockname())
        Link(connected)
        assert connected.asked == (1000, "ms")
        # With that limit, TCP itself would give up after 14 s, however long a node may be silent.
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) >= 3600 * 1000


def test_the_key_is_for_the_user_only_and_a_file_that_is_none_leads_nowhere(tmp_path):
    path = tmp_path / "leader.json"
    assert LeaderAddress.read(path) is None
    LeaderAddress(hosts=("10.0.0.1",), port=7, key="k", place="p").write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert LeaderAddress.read(path) == LeaderAddress(hosts=("10.0.0.1",), port=7, key="k", place="p")
    path.write_text('{"hosts": 3}')
    assert LeaderAddress.read(path) is None
    assert [one.name for one in tmp_path.iterdir()] == ["leader.json"]


def test_messages_come_whole_and_in_order_however_large(pair):
    """The other end reads late: nothing waits, and nothing is lost."""
    near, far = pair
    for number in range(200):
        near.send(number=number, text="x" * 50_000)
    thread = threading.Thread(target=lambda: near.finish(10))
    thread.start()
    assert [message["number"] for message in read(far, 200)] == list(range(200))
    thread.join()


def test_what_was_sent_before_an_end_is_read(pair):
    near, far = pair
    near.send(bye=1)
    near.finish(1)
    while not far.closed:
        messages = list(far.read())
    assert messages == [{"bye": 1}] and far.closed == "its connection is closed"


@pytest.mark.parametrize("bytes_", [b"no json\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n"])
def test_what_is_no_message_ends_the_connection(bytes_):
    ours, theirs = _connected()
    end = Link(ours)
    theirs.sendall(bytes_)
    assert read(end) == [] and "no message" in end.closed
    theirs.close()


def test_a_message_without_an_end_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 1000)
    ours, theirs = _connected()
    end = Link(ours)
    theirs.sendall(b"1" * 2000)
    assert read(end) == [] and "without an end" in end.closed
    theirs.close()


def test_values_that_are_no_messages_are_skipped(pair):
    near, far = pair
    near._unsent += json.dumps([1]).encode() + b"\n"
    near.send(real=True)
    assert read(far) == [{"real": True}]


def test_an_end_that_did_something_else_does_not_take_the_other_one_for_silent(pair):
    near, far = pair
    time.sleep(0.2)
    near.send(first=1)
    near.send(second=2)
    for message in far.read():  # which takes long, as the start of ranks does
        assert far.silent() < 0.15 or "second" in message
        time.sleep(0.2)
        near.live(0.1)
    assert far.silent() < 0.15


def test_signs_of_life_come_while_the_sender_waits_for_something_else(pair):
    near, far = pair
    with signs_of_life(lambda: [near], patience=0.1):
        longest, ends = 0.0, time.monotonic() + 1.0
        while time.monotonic() < ends:
            assert list(far.read()) == []
            longest = max(longest, far.silent())
            time.sleep(0.005)
        heard = far.heard
    assert heard > ends - 0.5
