"""A connection between the launchers of a job on several nodes: messages of JSON, one per line. No torch, no pickle.

The leader writes where it listens, and a key, to a file of the run folder that only its user may read. Both sides prove
that they know the key before anything else is read, and the key itself is never sent. Messages are not encrypted, like
the traffic between ranks.
"""

import contextlib
import errno
import hmac
import json
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import ConfigError
from ingot.machine.interfaces import own_interfaces
from ingot.machine.processes import identity
from ingot.trainer.launch.repeated import repeated

_ALIVE_SECONDS = 1.0  # between two signs of life, at most
_SIGNS = 5  # in the time after which the other end counts as lost, at least
_HANDSHAKE_SECONDS = 5.0
_CHOICE_SECONDS = 0.5  # for an address that is preferred to one that answers; networks differ by less
_MOST_BYTES = 64 << 20  # of one message: the collectives of all ranks of a node
_MOST_UNSENT = 64 << 20
_TCP_RTO_MAX_MS = 44  # of linux/tcp.h
_REPEAT_MS = 1000
_GIVE_UP_MS = 24 * 3600 * 1000
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LeaderAddress:
    """The place at which the leader of a run can be reached.

    hosts: its addresses. place: the machine, as in `identity`, so that a process on the same one uses the loopback
    address.
    """

    hosts: tuple[str, ...]
    port: int
    key: str
    place: str

    def write(self, path: Path) -> None:
        """Write it so that only this user can read it."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(asdict(self)) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "LeaderAddress | None":
        """Return what `path` holds; None if there is no leader, or no file of one."""
        try:
            return from_dict(cls, json.loads(path.read_text()))
        except (OSError, ValueError, ConfigError):
            return None


class Link:
    """One end of a connection. Nothing waits: what the other end does not take yet is sent later. Only `live` may be
    called by another thread.

    own_host, other_host: the addresses of both ends, also when the connection is over; "" if it was over at once.
    closed: why it is over, "" while it is not. heard: when the last bytes came, in seconds of time.monotonic().
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # TCP waits twice as long before each repetition: a network that was gone for 8 s would be silent for 13. A
        # kernel before Linux 6.15 does not know this limit. With it, TCP would give up after 15 repetitions, in 14 s;
        # when the other end counts as lost is the launcher's decision.
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GIVE_UP_MS)
            connected.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _REPEAT_MS)
        self._socket = connected
        self.own_host, self.other_host = _hosts(connected)
        self._unread, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()
        self._said = 0.0
        self.heard = time.monotonic()
        self.closed = ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, unless the connection is over."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._sending:
            if not self.closed:
                self._unsent += line
                self._said = time.monotonic()
                self._flush()

    def live(self, seconds: float) -> None:
        """Send what is left, and a sign of life if this end has sent nothing for so long."""
        if time.monotonic() >= self._said + seconds:
            self.send(alive=True)
        elif self._unsent:
            with self._sending:
                self._flush()

    def silent(self) -> float:
        """Return for how many seconds the other end has sent nothing, whatever this end did meanwhile."""
        self._receive()
        return time.monotonic() - self.heard

    def read(self) -> Iterator[dict[str, Any]]:
        """Return the messages that have come, without signs of life."""
        self._receive()
        while not self.closed or self._unread:
            line, found, rest = self._unread.partition(b"\n")
            if not found:
                if len(line) > _MOST_BYTES:
                    self.close("it sent a message without an end")
                return
            self._unread = rest
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                self.close("it sent what is no message")
                return
            if isinstance(message, dict) and "alive" not in message:
                yield message

    def close(self, why: str) -> None:
        """End the connection, because of `why`."""
        if not self.closed:
            self.closed = why
            self._unread.clear()
            self._socket.close()

    def finish(self, seconds: float) -> None:
        """Send what is left, for at most so long, and end the connection."""
        ends = time.monotonic() + seconds
        while self._unsent and not self.closed and time.monotonic() < ends:
            with self._sending:
                self._flush()
            time.sleep(0.01)
        self.close("it ended")

    def _receive(self) -> None:
        while not self.closed:
            try:
                part = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
                return
            if not part:
                self._end(None)
                return
            self.heard = time.monotonic()
            self._unread += part

    def _end(self, error: OSError | None) -> None:
        if not self.closed:  # by the other thread
            self.closed = "its connection is closed" if error is None else f"its connection failed ({error.strerror})"
            self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT:
                self.close("it takes no messages")
        except OSError as error:
            self._end(error)


def signs_of_life(links: Callable[[], Iterable[Link]], patience: float) -> contextlib.AbstractContextManager[None]:
    """Give signs of life on all `links` during a block, in a thread: one that waits for a process of its own, or for
    its kernel, is not lost. patience: the seconds without one after which this end counts as lost."""
    seconds = min(_ALIVE_SECONDS, patience / _SIGNS)

    def live() -> None:
        for link in links():
            link.live(seconds)

    return repeated(live, seconds / 2, "ingot-signs-of-life")


def dial(address: LeaderAddress) -> Link | None:
    """Connect to the leader; None if it cannot be reached within a few seconds, or does not know the key."""
    here = address.place == _place()
    with contextlib.closing(_connected((*([LOOPBACK] if here else []), *address.hosts), address.port)) as reached:
        for connected in reached:
            with contextlib.suppress(OSError, ValueError):
                try:
                    _introduce(connected, address.key)
                except BaseException:
                    connected.close()
                    raise
                return Link(connected)
    return None


def _connected(hosts: Iterable[str], port: int) -> Generator[socket.socket, None, None]:
    """Connect to all `hosts` at once, because an address of a network that this machine does not see gives no answer.
    Returns those that are reached within a few seconds, in the order of `hosts`: once one is reached, those before it
    have a short time left. So each node chooses by that order, and not by which network was quicker this time."""
    ends, reached = time.monotonic() + _HANDSHAKE_SECONDS, dict[int, socket.socket]()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as left:
        for number, host in enumerate(hosts):
            one = left.enter_context(contextlib.closing(socket.socket()))
            one.setblocking(False)
            with contextlib.suppress(OSError, ValueError):
                if one.connect_ex((host, port)) in (0, errno.EINPROGRESS):
                    selector.register(one, selectors.EVENT_WRITE, number)
        chooses = math.inf  # when a network that has answered is used, although one before it has not
        while calls := {key.data for key in selector.get_map().values()} | reached.keys():
            best = min(reached, default=None)
            if best is not None and (best == min(calls) or time.monotonic() >= chooses):
                yield reached.pop(best).dup()
                continue
            ready = selector.select(max(min(ends, chooses) - time.monotonic(), 0.0))
            if not ready and best is None:
                return
            for key, _ in ready:
                one = key.fileobj
                assert isinstance(one, socket.socket)
                selector.unregister(one)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    reached[key.data] = one
                    chooses = min(chooses, time.monotonic() + _CHOICE_SECONDS)


def answer(connected: socket.socket, key: str) -> Link | None:
    """Let a node that connected prove that it knows the key; None if it does not. Takes a few seconds at most."""
    try:
        ends = time.monotonic() + _HANDSHAKE_SECONDS
        ours = secrets.token_hex(16)
        connected.sendall(f"{ours}\n".encode())
        theirs, proof = _line(connected, ends).split(" ")
        if not hmac.compare_digest(proof, _proof(key, "node", ours, theirs)):
            raise ValueError("another key")
        connected.sendall(f"{_proof(key, 'leader', theirs, ours)}\n".encode())
        return Link(connected)
    except (OSError, ValueError):
        connected.close()
        return None


def _introduce(connected: socket.socket, key: str) -> None:
    ends = time.monotonic() + _HANDSHAKE_SECONDS
    theirs, ours = _line(connected, ends), secrets.token_hex(16)
    connected.sendall(f"{ours} {_proof(key, 'node', theirs, ours)}\n".encode())
    if not hmac.compare_digest(_line(connected, ends), _proof(key, "leader", ours, theirs)):
        raise ValueError("another process listens there")


def _proof(key: str, who: str, asked: str, own: str) -> str:
    return hmac.new(key.encode(), f"{who} {asked} {own}".encode(), "sha256").hexdigest()


def _line(connected: socket.socket, ends: float) -> str:
    """Read one short line, byte by byte: what follows it belongs to others. Raises TimeoutError after `ends`."""
    read = b""
    while not read.endswith(b"\n"):
        connected.settimeout(max(ends - time.monotonic(), 0.001))
        part = connected.recv(1)
        if not part or len(read) > 256:
            raise ValueError("no line")
        read += part
    return read.decode("ascii").strip()


def listen() -> tuple[socket.socket, LeaderAddress]:
    """Open a socket for the other nodes, on all interfaces. Returns it, and what they need to reach it."""
    listener = socket.create_server(("", 0), backlog=1024)
    # No name: all addresses are there, and to look one up takes longer than a silence may, when the network is gone.
    own = tuple(address for address in own_interfaces() if not address.startswith("127."))
    return listener, LeaderAddress(hosts=own, port=listener.getsockname()[1], key=secrets.token_hex(32), place=_place())


def _hosts(connected: socket.socket) -> tuple[str, str]:
    with contextlib.suppress(OSError):  # the other end has gone again
        own, other = connected.getsockname(), connected.getpeername()
        if isinstance(own, tuple):
            return own[0], other[0]
    return "", ""


def own_host(links: Iterable[Link]) -> str:
    """Return the address of this machine for those at the other ends of `links`. Processes of this machine come by the
    loopback address, and reach the other ones as well."""
    hosts = sorted((link.own_host.startswith("127."), link.own_host) for link in links if link.own_host)
    return hosts[0][1] if hosts else LOOPBACK


def host_of(link: Link, here: str) -> str:
    """Return the address of the other end of `link` for everyone. here: that of this machine, which the other end has,
    too, if it comes by the loopback address."""
    return here if link.other_host.startswith("127.") else link.other_host


def _place() -> str:
    """Return a text that only processes with the same loopback interface share."""
    with contextlib.suppress(OSError):
        return f"{identity().split(' ')[0]} {Path('/proc/self/ns/net').readlink()}"
    return ""
