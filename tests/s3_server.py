"""An S3 server for tests, in memory, with faults by script: one bucket, path style, any credentials.

It enforces `If-None-Match: *` and gives the tags of S3 (the MD5 of an object; for a multipart upload the MD5 of the
MD5s of its parts). Real stores fail as the faults do; docs/design/checkpoints.md has the table.
"""

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "bucket"
SECRET = "s3cr3t-of-the-tests"
KEY = "AKIA0123456789TESTS0"
REFUSALS = {
    "403": (403, "AccessDenied"),
    "404": (404, "NoSuchBucket"),
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
    "lost-answer": "the request is executed, but the connection is reset before the answer",
    "stale": "a listing does not show the last `changes` changes",
    "kill-before": "the server's `kill` is called instead of the request, then the connection is reset",
    "kill-after": "the request is executed, and the server's `kill` is called before the connection is reset",
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


class Stored(NamedTuple):
    """An object. modified: as S3 prints it."""

    data: bytes
    tag: str
    modified: str


class S3Server:
    """A server on a free port of this machine, from `with` to its end. calls: what was asked, in order.

    kill: whom the faults that kill end, a client or this server itself.
    """

    handler: "type[Handler]"

    def __init__(self, *faults: Fault, page: int = 1000):
        self.faults, self.page = list(faults), page
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, Stored]] = {}
        self.calls: list[str] = []
        self.failed: list[str] = []
        self.lock = threading.Lock()
        self.history: list[dict[str, Stored]] = [{}]
        self.kill: Callable[[], None] = lambda: None
        self.connections: set[socket.socket] = set()
        self.ended = threading.Event()
        self._http = self._listening(0)

    def _listening(self, port: int) -> ThreadingHTTPServer:
        http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (self.handler,), {"s3": self}))
        http.daemon_threads, http.block_on_close = True, False
        return http

    def _serve(self) -> None:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "S3Server":
        self._serve()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
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
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds this server."""
        endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        return keys | {"AWS_ENDPOINT_URL": endpoint}

    def fault_of(self, call: str) -> Fault | None:
        with self.lock:
            self.calls.append(call)
            found = [fault for fault in self.faults if fault.hits(call)]
            if found:
                self.failed.append(f"{found[0].do} at {call}")
            return found[0] if found else None

    def put(self, key: str, data: bytes, tag: str, *, new: bool) -> bool:
        """Store an object. Returns False if `new` and there is one."""
        with self.lock:
            if new and key in self.objects:
                return False
            self.objects[key] = Stored(data, tag, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
            self.history.append(dict(self.objects))
            return True

    def delete(self, key: str) -> None:
        with self.lock:
            self.objects.pop(key, None)
            self.history.append(dict(self.objects))

    def back_to(self, changes: int) -> None:
        """Return to the objects that there were after the first `changes` changes, also in late listings."""
        with self.lock:
            del self.history[changes + 1 :]
            self.objects = dict(self.history[changes])

    def listed(self, changes: int) -> dict[str, Stored]:
        """Return the objects as they were before the last `changes` changes."""
        with self.lock:
            return self.history[max(0, len(self.history) - 1 - changes)]


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset."""
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Handler(BaseHTTPRequestHandler):
    s3: S3Server
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
        if torn or do in ("silent", "kill-before"):
            self._reset()
        elif do == "error-in-200":
            self._answer(200, error_of("InternalError"))
        elif do in REFUSALS:
            number, code = REFUSALS[do]
            self._answer(number, error_of(code), {"Retry-After": f"{fault.seconds:g}"} if fault.seconds else {})
        elif bucket != BUCKET:
            self._answer(404, error_of("NoSuchBucket"))
        else:
            number, body, headers = getattr(self, f"_{call.partition(' ')[0].lower()}")(key, query, body, fault)
            if do == "wrong-tag" and "ETag" in headers:
                headers["ETag"] = f'"{md5(b"of another object")}"'
            if do == "kill-after":
                self.s3.kill()
            if do in ("lost-answer", "kill-after"):
                self._reset()
            else:
                self._answer(number, body, headers, half=do == "reset")

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

    def _get(self, key, query, body, fault):
        if key not in self.s3.objects:
            return 404, error_of("NoSuchKey"), {}
        found = self.s3.objects[key]
        headers = {"ETag": f'"{found.tag}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or len(found.data)), len(found.data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
            return 206, found.data[first : last + 1], headers
        return 200, found.data, headers

    def _head(self, key, query, body, fault):
        number, data, headers = self._get(key, query, body, fault)
        return number, b"", headers | {"Content-Length": str(len(data))}

    def _put(self, key, query, body, fault):
        data = _changed(body) if fault and fault.do == "other-bytes" else body
        return self._store(key, data, md5(data))

    @property
    def only_new(self) -> bool:
        """The request stores its object only if there is none of that name."""
        return self.headers.get("If-None-Match") == "*"

    def _store(self, key, data, tag, answer=b""):
        if not self.s3.put(key, data, tag, new=self.only_new):
            return 412, error_of("PreconditionFailed"), {}
        return 200, answer, {"ETag": f'"{tag}"'}

    def _delete(self, key, query, body, fault):
        """Remove the objects that a list names, as the library of ingot asks even for one, or the one of the path."""
        keys = [unescape(one) for one in re.findall("<Key>(.*?)</Key>", body.decode())]
        for one in keys or [key]:
            self.s3.delete(one)
        return 200, xml_of("DeleteResult", "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)), {}

    def _begin(self, key, query, body, fault):
        upload = f"upload-{len(self.s3.calls)}"
        self.s3.uploads[upload] = {}
        return 200, xml_of("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"), {}

    def _part(self, key, query, body, fault):
        if (parts := self.s3.uploads.get(query["uploadId"])) is None:
            return 404, error_of("NoSuchUpload"), {}
        data = _changed(body) if fault and fault.do == "other-bytes" else body
        parts[int(query["partNumber"])] = Stored(data, md5(data), "")
        return 200, b"", {"ETag": f'"{md5(data)}"'}

    def _end(self, key, query, body, fault):
        if (parts := self.s3.uploads.get(query["uploadId"])) is None:
            return 404, error_of("NoSuchUpload"), {}
        wanted = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        if wanted != sorted(parts):
            return 400, error_of("InvalidPart"), {}
        tag = self.tag_of([parts[number] for number in wanted])
        del self.s3.uploads[query["uploadId"]]
        whole = b"".join(parts[number].data for number in wanted)
        return self._store(key, whole, tag, xml_of("CompleteMultipartUploadResult", f"<ETag>&quot;{tag}&quot;</ETag>"))

    @staticmethod
    def tag_of(parts: list[Stored]) -> str:
        return f"{md5(b''.join(bytes.fromhex(part.tag) for part in parts))}-{len(parts)}"

    def _abort(self, key, query, body, fault):
        self.s3.uploads.pop(query["uploadId"], None)
        return 204, b"", {}

    def _list(self, key, query, body, fault):
        objects = self.s3.listed(fault.changes if fault and fault.do == "stale" else 0)
        after, prefix = query.get("continuation-token", query.get("start-after", "")), query.get("prefix", "")
        names = sorted(name for name in objects if name.startswith(prefix) and name > after)
        page, rest = names[: self.s3.page], names[self.s3.page :]
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>{objects[name].modified}</LastModified>"
            f"<ETag>&quot;{objects[name].tag}&quot;</ETag><Size>{len(objects[name].data)}</Size></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        return 200, xml_of("ListBucketResult", f"<IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{rows}{more}"), {}


S3Server.handler = Handler


def _changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else b"?"


def xml_of(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{inner}</{name}>'.encode()


def error_of(code: str) -> bytes:
    return xml_of("Error", f"<Code>{code}</Code><Message>by the script of the test</Message>")
