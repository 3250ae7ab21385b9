"""A server that answers with anything: the client ends with one of its own errors, or with bytes."""

import random
import socket
import threading

import pytest

from ingot.data.sources.remote import RemoteRules, Unreachable, Version
from ingot.data.sources.web import WebFile
from ingot.errors import DataError

ANSWERS = [
    b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nETag: "a"\r\n\r\nhello world',
    b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-10/11\r\nContent-Length: 6\r\nETag: "a"\r\n\r\n world',
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: 1\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 No\r\nRetry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nuntil the end",
    b"",
]
PIECES = (
    b"\r\n",
    b"\0",
    b"-1",
    b"\xff\xfe",
    b"9" * 30,
    b"A: " + b"b" * 70_000 + b"\r\n",
    b"X: y\r\n" * 200,
    b"chunked",
    b": ",
)


@pytest.fixture
def answering():
    """url, and a list whose first entry the server sends next, whatever it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    waiting: list[bytes] = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                try:
                    connection.recv(65536)
                    connection.sendall(waiting.pop(0))
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/f", waiting
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def damaged(pick: random.Random) -> bytes:
    made = bytearray(pick.choice(ANSWERS))
    for _ in range(pick.randrange(5)):
        place = pick.randrange(len(made) + 1)
        made[place : place + pick.choice((0, 0, 1, 5, 40))] = pick.choice((*PIECES, pick.randbytes(3)))
    return bytes(made)


def test_answers(answering):
    url, waiting = answering
    rules = RemoteRules(allow_hosts=(url.split("/")[2],), timeout_seconds=1)
    pick, ends = random.Random(1), set()
    for _ in range(300):
        waiting[:] = [damaged(pick)]
        version = pick.choice((None, Version(11, '"a"', "")))
        try:
            part = WebFile(url, rules).part(5 if version else 0, version)
            size = sum(map(len, part.pieces))
            ends.add("read")
            assert part.version.bytes < 0 or part.start + size <= part.version.bytes
        except (Unreachable, DataError) as error:
            ends.add(type(error).__name__)
    assert {"read", "Unreachable", "Changed", "Throttled", "RefusedAddress"} <= ends


def test_headers_that_never_end_have_a_deadline(answering, monkeypatch):
    url, waiting = answering
    monkeypatch.setattr("ingot.data.sources.web._CONNECT_SECONDS", 0.2)
    waiting[:] = [b"HTTP/1.1 100 Continue\r\n\r\n" * 400_000]
    with pytest.raises(Unreachable):
        WebFile(url, RemoteRules(allow_hosts=(url.split("/")[2],), timeout_seconds=1)).part(0, None)
