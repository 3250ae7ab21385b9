"""Faults of a server that speaks S3, by script: what it refuses, resets, loses, does twice or does late.

tests/s3_server.py is a server that has them. tests/fault_proxy.py puts them in front of any other one.
"""

import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REFUSALS = {
    "403": (403, "AccessDenied"),
    "404": (404, "NoSuchBucket"),
    "no-upload": (404, "NoSuchUpload"),
    "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
}
# What a fault can do, other than a refusal.
DEEDS = {
    "reset": "the connection is reset in the middle of a body, of the answer to a GET and of the request otherwise",
    "silent": "no answer for `seconds`, then the connection is closed",
    "wrong-tag": "the answer has the tag of another object",
    "other-bytes": "the object is stored with one wrong bit, and its tag is that of the wrong bytes",
    "wrong-bit": "one bit of the body differs from what was sent when it arrives",
    "lost-answer": "the request is executed, but the connection is reset before the answer",
    "stale": "a listing does not show the last `changes` changes",
    "kill-before": "the server's `kill` is called instead of the request, then the connection is reset",
    "kill-after": "the request is executed, and the server's `kill` is called before the connection is reset",
    "twice": "the request is executed twice, as by a load balancer that repeats it, and the second answer is given",
    "late": "the request is executed when the server's `released` is set, then `executed` is; `held` is before",
    "error-in-200": "the end of a multipart upload is not executed: an error in the body of a 200",
}


@dataclass(kw_only=True)
class Fault:
    """A fault of the requests that match, from the match number `at` on, `times` times.

    do: a key of REFUSALS or DEEDS. call: pattern of "METHOD key"; "LIST prefix" for listings, "BEGIN key", "PART key"
    and "END key" for the requests of a multipart upload. seconds: of Retry-After or of silence.
    """

    do: str
    call: str = "*"
    at: int = 1
    times: int = 1
    seconds: float = 0.0
    changes: int = 1
    matched: int = 0

    def hits(self, call: str) -> bool:
        """Count `call` if it matches. Returns whether it fails."""
        if not fnmatchcase(call, self.call):
            return False
        self.matched += 1
        return self.at <= self.matched < self.at + self.times


class FaultyServer:
    """A server on a free port of this machine, from `with` to its end.

    calls: the requests, in order. failed: those that a fault struck, as "FAULT at CALL".
    kill: whom the faults that kill end, a client or this server itself. held, released, executed: of a late request.
    """

    handler: "type[FaultyHandler]"

    def __init__(self, *faults: Fault):
        self.faults = list(faults)
        self.calls: list[str] = []
        self.failed: list[str] = []
        self.lock = threading.Lock()
        self.kill: Callable[[], None] = lambda: None
        self.connections: set[socket.socket] = set()
        self.held, self.released, self.executed = threading.Event(), threading.Event(), threading.Event()
        self.ended = threading.Event()
        self._http = self._listening(0)

    def _listening(self, port: int) -> ThreadingHTTPServer:
        http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (self.handler,), {"s3": self}))
        http.daemon_threads, http.block_on_close = True, False
        return http

    def _serve(self) -> None:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        self._serve()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def stop(self) -> None:
        """End as a server whose process is killed: nothing listens, every connection is reset. Its objects stay, as on
        a disk."""
        self._http.shutdown()
        self._http.server_close()
        with self.lock:
            for connection in self.connections:
                reset(connection)

    def start(self) -> None:
        """Listen on the same port again, after `stop`."""
        self._http = self._listening(self._http.server_address[1])
        self._serve()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def fault_of(self, call: str) -> Fault | None:
        with self.lock:
            self.calls.append(call)
            found = [fault for fault in self.faults if fault.hits(call)]
            if found:
                self.failed.append(f"{found[0].do} at {call}")
            return found[0] if found else None


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset."""
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class FaultyHandler(BaseHTTPRequestHandler):
    """Names each request, and carries out its fault. `_execute` does what was asked without one."""

    s3: FaultyServer
    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = -1, True
    timeout = 60

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with self.s3.lock:
            self.s3.connections.add(self.connection)
        with contextlib.suppress(OSError):
            super().handle()
        with self.s3.lock:
            self.s3.connections.discard(self.connection)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        names = {
            "delete": "DELETE",
            "uploads": "BEGIN",
            "partNumber": "PART",
            "uploadId": "END" if self.command == "POST" else "ABORT",
        }
        kind = next((names[name] for name in names if name in query), self.command)
        call = f"LIST {query.get('prefix', '')}" if "list-type" in query else f"{kind} {key}"
        self._serve(call, bucket, key, query, self.s3.fault_of(call))

    def _serve(self, call: str, bucket: str, key: str, query: dict[str, str], fault: Fault | None) -> None:
        do, size = fault.do if fault else "", int(self.headers.get("Content-Length") or 0)
        torn = do == "reset" and (size > 0 or self.command != "GET")
        body = self.rfile.read(size // 2 if torn else size)
        if do == "silent":
            self.s3.ended.wait(fault.seconds)
        if do == "kill-before":
            self.s3.kill()
        if torn:
            self._torn(body)
        if torn or do in ("silent", "kill-before"):
            self._reset()
        elif do == "error-in-200":
            self._answer(200, error_of("InternalError"))
        elif do in REFUSALS:
            number, code = REFUSALS[do]
            self._answer(number, error_of(code), {"Retry-After": f"{fault.seconds:g}"} if fault.seconds else {})
        else:
            body = changed(body) if do == "wrong-bit" else body
            if do == "late":
                self.s3.held.set()
                self.s3.released.wait()
            if do == "twice":
                self._execute(call, bucket, key, query, body, fault)
            number, body, headers = self._execute(call, bucket, key, query, body, fault)
            if do == "wrong-tag" and "ETag" in headers:
                headers["ETag"] = f'"{md5(b"of another object")}"'
            if do == "kill-after":
                self.s3.kill()
            if do == "late":
                self.s3.executed.set()
            if do in ("lost-answer", "kill-after"):
                self._reset()
            else:
                self._answer(number, body, headers, half=do == "reset")

    def _execute(
        self, call: str, bucket: str, key: str, query: dict[str, str], body: bytes, fault: Fault | None
    ) -> tuple[int, bytes, dict[str, str]]:
        raise NotImplementedError

    def _torn(self, half: bytes) -> None:
        """Take in the part of a body that arrived before its connection was reset."""

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _reset(self) -> None:
        """Close the connection with a reset, as a load balancer that gives up on it does."""
        self.close_connection = True
        reset(self.connection)

    def _answer(self, number: int, body: bytes = b"", headers: dict | None = None, *, half: bool = False) -> None:
        self.send_response(number)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        self.wfile.flush()
        if half:
            time.sleep(0.02)  # a reset discards what has not been sent yet
            self._reset()


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"?"


def xml_of(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{inner}</{name}>'.encode()


def error_of(code: str) -> bytes:
    return xml_of("Error", f"<Code>{code}</Code><Message>by the script of the test</Message>")
