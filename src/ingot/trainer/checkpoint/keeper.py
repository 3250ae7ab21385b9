"""The process of a node that keeps snapshots in memory: those of the node's ranks, and copies of other nodes' ranks.

The program `python -m ingot.trainer.checkpoint.keeper NAME OWNER ADDRESS` has no torch and reads no disk. It outlives
the ranks, and ends with the process OWNER, which starts ranks again: ingot's supervisor or torchrun's agent.

It answers the ranks of its node on a socket of the machine without a file, to processes of the same user. A rank lends
it the memory of its snapshot, so the node keeps no second copy. Keepers of other nodes, and ranks that replace lost
ones, connect to ADDRESS by TCP ("" on a single node) and send a token first. Like the traffic between ranks, this is
not encrypted.

A snapshot is one image: the bytes of the rank's checkpoint file. An image that is being replaced does not exist: while
a rank fills its memory anew, and while a copy arrives, the newest image is gone, and a run that fails at that moment
continues from its checkpoints.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, ResourceError
from ingot.machine.processes import identity_of
from ingot.trainer.checkpoint.images import (
    SECONDS,
    Connection,
    KeptImage,
    chunks_of,
    part_of_image,
    receive_image,
    sha256_of,
)
from ingot.trainer.checkpoint.message import as_error, as_value, pack_json, read_message, unpack_json

_CREDENTIALS = struct.Struct("3i")  # of unix(7), SO_PEERCRED: process, user, group
_POLL_SECONDS = 0.01
_NOTHING_LENT = b"-"  # the first byte to the keeper of a node, which a descriptor may come with


@dataclass(frozen=True)
class Peer:
    """The place at which the keeper of another node listens."""

    host: str
    port: int
    token: str


# -- the way to a keeper --


def reach_local(name: str) -> Connection:
    """Connect to the keeper `name` of this machine. Raises OSError if there is none."""
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect("\0" + name)
        if not _is_same_user(connected):  # the name can be guessed, and another user may have bound it
            raise PermissionError("the keeper of snapshots in memory belongs to another user")
    except OSError:
        connected.close()
        raise
    return Connection(connected)


def asking(name: str) -> Connection:
    """Connect to the keeper `name` of this machine, for a request that lends no memory. Raises OSError."""
    connection = reach_local(name)
    connection.socket.sendall(_NOTHING_LENT)
    return connection


def reach_peer(peer: Peer) -> Connection:
    """Connect to the keeper of another node. Raises OSError if it does not answer."""
    connection = Connection(socket.create_connection((peer.host, peer.port), timeout=SECONDS))
    connection.send(peer.token.encode())
    return connection


def keeper_name(owner: int, run: Path) -> str:
    """Return the name of the keeper of the ranks that the process `owner` starts, for the run in the folder `run`."""
    return "ingot-keeper-" + hashlib.sha256(f"{identity_of(owner)} {run.resolve()}".encode()).hexdigest()[:32]


def start_keeper(name: str, owner: int, address: str) -> None:
    """Start the keeper `name` unless it runs. address: see the program's; "" without other nodes.

    Raises ResourceError if it does not answer within a minute.
    """
    with contextlib.suppress(OSError), contextlib.closing(reach_local(name)):
        return
    command = [sys.executable, "-P", "-m", "ingot.trainer.checkpoint.keeper", name, str(owner), address]
    # Nothing by which a supervisor finds the processes of a job, because it ends those before it starts ranks again.
    env = {key: value for key, value in os.environ.items() if key.startswith(("PYTHON", "LD_")) or key == "PATH"}
    started = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(OSError), contextlib.closing(reach_local(name)):
            return
        time.sleep(_POLL_SECONDS)
    raise ResourceError(
        "E-REPLICA-KEEPER",
        "the process that keeps snapshots in memory does not start",
        rule="with checkpoint.replicas, each node has one",
        fix="see its error in the log of this attempt; training goes on without copies in memory",
        exit_code=started.poll(),
    )


def end_keeper(owner: int, run: Path) -> None:
    """End the keeper of the ranks that `owner` started, if there is one, and wait until its memory is free."""
    deadline = time.monotonic() + SECONDS
    with contextlib.suppress(OSError):  # it is gone
        while time.monotonic() < deadline:
            with contextlib.closing(asking(keeper_name(owner, run))) as connection:
                connection.ask({"do": "end"})
            time.sleep(_POLL_SECONDS)


# -- the process --


class Keeper:
    """The images of one node, by rank, and the answers to requests about them."""

    def __init__(self) -> None:
        self._images: dict[
            int, tuple[KeptImage, list[bytes], int]
        ] = {}  # with what its save says of it, and its memory
        self._lock = threading.Lock()
        self._turns: dict[int, int] = {}
        self._comparing: dict[tuple[int, str], threading.Lock] = {}
        self._compared: set[tuple[int, str]] = set()

    def answer(self, connection: Connection, request: dict[str, Any], more: list[bytes], lent: list[int]) -> Any:
        """Carry out one request. Returns a value of JSON. lent: descriptors that came with it."""
        do = request["do"]
        if do == "begin":
            return self._drop(request["rank"])
        if do == "keep":
            return self._keep(KeptImage(**request["image"]), more, lent, [Peer(**one) for one in request["peers"]])
        if do == "hold":
            return self._hold(KeptImage(**request["image"]), more, connection)
        if do == "list":  # the blocks of an image come with it; the ledger, which is large, is asked for by its own
            with self._lock:
                return [[asdict(image), about[0].decode()] for image, about, _ in self._images.values()]
        if do == "ledger":
            with self._lock:
                return self._images[request["rank"]][1][1].decode()
        if do == "adopt":
            return self._adopt(request["snapshot"], request["epoch"])
        if do == "forget":  # the run went back to an earlier step
            return self._drop_all(lambda image: image.step > request["after"])
        if do == "retain":  # images of ranks that this node has no more
            return self._drop_all(lambda image: image.snapshot != request["snapshot"])
        raise ValueError(f"a keeper cannot {do!r}")

    def find(self, rank: int, snapshot: str) -> int:
        """Return a descriptor of the memory of an image, which the caller closes, after its bytes were compared with
        their hash, once. Raises OSError if it is not here, or has changed."""
        with self._lock:
            image, _, fd = self._images.get(rank, (None, [], -1))
            if image is None or image.snapshot != snapshot:
                raise OSError(f"the snapshot of rank {rank} is no longer in memory")
            found = os.dup(fd)
            comparing = self._comparing.setdefault((rank, snapshot), threading.Lock())
        with comparing:
            if (rank, snapshot) not in self._compared and sha256_of(found, image.bytes) != image.sha256:
                os.close(found)
                raise OSError(f"the snapshot of rank {rank} has changed in memory")
            self._compared.add((rank, snapshot))
        return found

    def _drop(self, rank: int) -> None:
        with self._lock:
            self._turns[rank] = self._turn(rank) + 1
            _, _, fd = self._images.pop(rank, (None, [], -1))
        if fd >= 0:
            os.close(fd)

    def _drop_all(self, is_unwanted: Callable[[KeptImage], bool]) -> None:
        with self._lock:
            ranks = [rank for rank, (image, _, _) in self._images.items() if is_unwanted(image)]
        for rank in ranks:
            self._drop(rank)

    def _turn(self, rank: int) -> int:
        """Return the number of the image of a rank. What began an earlier one must not go on with it."""
        return self._turns.get(rank, 0)

    def _require_turn(self, rank: int, turn: int) -> None:
        if self._turn(rank) != turn:
            raise OSError(f"rank {rank} has begun another save meanwhile")

    def _put(self, image: KeptImage, about: list[bytes], fd: int, turn: int) -> None:
        with self._lock:
            self._require_turn(image.rank, turn)
            _, _, before = self._images.pop(image.rank, (None, [], -1))
            self._images[image.rank] = image, about, fd
            self._compared.clear()
            self._comparing.clear()
        if before >= 0:
            os.close(before)

    def _keep(self, image: KeptImage, about: list[bytes], lent: list[int], peers: Sequence[Peer]) -> dict[str, Any]:
        """Keep the memory that a rank of this node lent, and send a copy to `peers`."""
        (fd,), turn = lent, self._turn(image.rank)
        sha256, open_peers, failures = hashlib.sha256(), list[Connection](), list[str]()
        with contextlib.ExitStack() as stack:
            for peer in peers:
                try:
                    connection = reach_peer(peer)
                    stack.callback(connection.close)
                    open_peers.append(connection)
                except OSError as error:
                    failures.append(f"{peer.host}: {error}")
            request = pack_json({"do": "hold", "image": image, "more": len(about)})
            self._send_to(open_peers, failures, lambda one: one.send(request, *about))
            for chunk in chunks_of(fd, 0, image.bytes):
                self._require_turn(image.rank, turn)  # the rank may have given up, and fill its memory anew
                sha256.update(chunk)
                self._send_to(open_peers, failures, lambda one, chunk=chunk: one.socket.sendall(chunk))
            self._require_turn(image.rank, turn)
            whole = replace(image, sha256=sha256.hexdigest())
            self._send_to(open_peers, failures, lambda one: one.send(whole.sha256.encode()))
            self._send_to(open_peers, failures, lambda one: read_message(one.receive(), unpack_json))
        self._put(whole, about, fd, turn)
        lent.clear()
        return {"copies": len(open_peers), "failures": failures}

    def _send_to(self, peers: list[Connection], failures: list[str], send: Callable[[Connection], object]) -> None:
        """Call `send` with each of `peers`. One that fails is taken from them."""
        for connection in list(peers):
            try:
                send(connection)
            except (OSError, IngotError) as error:
                peers.remove(connection)
                failures.append(getattr(error, "found", str(error)))

    def _hold(self, image: KeptImage, about: list[bytes], connection: Connection) -> None:
        """Receive and keep a copy of the image of a rank of another node."""
        self._drop(image.rank)
        turn = self._turn(image.rank)
        fd, found = receive_image(connection, image.bytes)
        try:
            if connection.receive(1 << 10).decode() != found:
                raise OSError(f"the snapshot of rank {image.rank} arrived with other bytes than were sent")
            self._put(replace(image, sha256=found), about, fd, turn)
        except BaseException:
            os.close(fd)
            raise

    def _adopt(self, snapshot: str, epoch: int) -> None:
        with self._lock:
            for rank, (image, about, fd) in self._images.items():
                if image.snapshot == snapshot:
                    self._images[rank] = replace(image, epoch=epoch), about, fd


def _serve(listener: socket.socket, keeper: Keeper, token: str) -> None:
    while True:
        connected, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(Connection(connected), keeper, token), daemon=True).start()


def _serve_one(connection: Connection, keeper: Keeper, token: str) -> None:
    """Answer the request of one connection. token: what a node has to send first; "" for ranks of this node."""
    lent: list[int] = []
    with contextlib.suppress(OSError), contextlib.closing(connection):
        if not (_sends(connection, token) if token else _is_same_user(connection.socket)):
            return
        if not token:
            _, lent, _, _ = socket.recv_fds(connection.socket, 1, 1)  # one byte comes with the descriptor, or alone
        request = json.loads(connection.receive())
        more = [connection.receive() for _ in range(request["more"])]
        try:
            if request["do"] in ("lend", "read"):
                _give(connection, keeper, request)
            elif request["do"] == "end" and not token:
                connection.send(as_value(pack_json(None)))
                os._exit(0)
            elif request["do"] == "where" and not token:
                connection.send(as_value(pack_json(_WHERE)))
            else:
                connection.send(as_value(pack_json(keeper.answer(connection, request, more, lent))))
        except Exception as error:
            connection.send(as_error(error))
    for fd in lent:
        os.close(fd)


def _give(connection: Connection, keeper: Keeper, request: dict[str, Any]) -> None:
    """Lend the memory of an image to a rank of this node, or send the tensors that another node asks for."""
    fd = keeper.find(request["rank"], request["snapshot"])
    try:
        if request["do"] == "lend":
            connection.send(as_value(pack_json(None)))
            socket.send_fds(connection.socket, [b"+"], [fd])
            return
        header, spans = part_of_image(fd, request["keys"])
        size = len(header) + sum(end - begin for begin, end in spans)
        connection.send(as_value(pack_json(size)))
        sha256 = hashlib.sha256()
        for piece in itertools.chain([memoryview(header)], *(chunks_of(fd, *span) for span in spans)):
            sha256.update(piece)
            connection.socket.sendall(piece)
        connection.send(sha256.hexdigest().encode())
    finally:
        os.close(fd)


def _sends(connection: Connection, token: str) -> bool:
    return hmac.compare_digest(connection.receive(1 << 10), token.encode())


def _is_same_user(connected: socket.socket) -> bool:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] == os.getuid()


_WHERE: dict[str, Any] = {"host": "", "port": 0, "token": ""}  # the Peer that this process is to other nodes


def main(name: str, owner: str, address: str) -> None:
    """Serve until the process `owner` has ended."""
    keeper, local, token = Keeper(), socket.socket(socket.AF_UNIX), secrets.token_hex(16)
    owner_ends = os.pidfd_open(int(owner))
    try:
        local.bind("\0" + name)
    except OSError:
        return  # another rank was faster
    if address:
        listener = socket.create_server((address, 0))
        _WHERE.update(host=address, port=listener.getsockname()[1], token=token)
        threading.Thread(target=_serve, args=(listener, keeper, token), daemon=True).start()
    local.listen()
    threading.Thread(target=_serve, args=(local, keeper, ""), daemon=True).start()
    select.select([owner_ends], [], [])
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
