"""A web server on this machine that serves bytes with ranges, and goes wrong in the way that a test scripts."""

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from ingot.data.sources.remote import RemoteRules


@dataclass
class Site:
    """files: path -> bytes. faults: path -> what the next GETs do instead, one after another: a status, one
    with headers, or a word that `file` knows.
    requests: (method, path, headers) in order. etags: off for a server that sends no
    validators. knows_head: off for one that refuses HEAD. silence: set, it ends a "silent" fault."""

    host: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list] = field(default_factory=dict)
    requests: list = field(default_factory=list)
    silence: threading.Event = field(default_factory=threading.Event)
    etags: bool = True
    knows_head: bool = True
    busiest: int = 0
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def rules(self) -> RemoteRules:
        """Impatient ones, for which this server is no private address."""
        return RemoteRules(
            allow_hosts=(self.host,), backoff_seconds=0.001, delay_seconds=0, timeout_seconds=2, common_crawl=self.url
        )

    def seen(self, header: str, method: str = "GET") -> list:
        return [headers.get(header) for m, _, headers in self.requests if m == method]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, format, *args):
        pass

    def end_headers(self):
        self.send_header("Connection", "close")
        super().end_headers()

    def do_HEAD(self):
        if self.site.knows_head:
            self.answer(head=True)
        else:
            self.empty(405)

    def do_GET(self):
        with self.site._lock:
            self.site._busy += 1
            self.site.busiest = max(self.site.busiest, self.site._busy)
        try:
            self.answer(head=False)
        finally:
            with self.site._lock:
                self.site._busy -= 1

    def answer(self, head: bool):
        self.close_connection = True
        self.site.requests.append((self.command, self.path, dict(self.headers)))
        path = urlsplit(self.path).path
        faults = self.site.faults.get(path, [])
        fault = faults.pop(0) if faults and not head else None
        if "list-type" in self.path:
            return self.list_bucket(fault)
        data = self.site.files.get(path)
        if isinstance(fault, int):
            return self.empty(fault)
        if isinstance(fault, tuple):  # status, headers
            return self.empty(fault[0], **fault[1])
        if data is None:
            return self.empty(404)
        return self.file(data, head, fault or "")

    def empty(self, status: int, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def file(self, data: bytes, head: bool, fault: str):
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        start, end, status = 0, len(data), 200
        wanted = self.headers.get("Range", "")
        fits = self.headers.get("If-Range", etag) == etag and fault != "no-ranges"
        if self.headers.get("If-Match", etag) != etag:
            return self.empty(412)
        if wanted and fits:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last) + 1 if last else len(data), len(data)), 206
            if start >= len(data):
                return self.empty(416, Content_Range=f"bytes */{len(data)}")
        if fault == "off-by-one":
            start += 1
        self.send_response(status)
        if self.site.etags:
            self.send_header("ETag", etag)
        self.send_header("Last-Modified", "Tue, 02 Jan 2024 03:04:05 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        body = data[start:end]
        if fault == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
            return None
        self.send_header("Content-Length", str(len(body) - (3 if fault == "says-less" else 0)))
        self.end_headers()
        if head:
            return None
        if fault == "silent":
            self.site.silence.wait(60)
        cut = body[: len(body) // 2] if fault == "cut" else body
        self.wfile.write(cut)
        return None

    def list_bucket(self, fault):
        if isinstance(fault, int):
            return self.empty(fault)
        bucket = urlsplit(self.path).path.rstrip("/")
        prefix = f"{bucket}/" + parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        names = [n for n in sorted(self.site.files) if n.startswith(prefix)] + (fault or [])
        rows = "".join(
            f"<Contents><Key>{n.removeprefix(bucket + '/')}</Key><LastModified>2024-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>&quot;x&quot;</ETag><Size>{len(self.site.files.get(n, b'stale'))}</Size></Contents>"
            for n in names
        )
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>b</Name><KeyCount>{len(names)}</KeyCount><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        return None


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # clients that hang up are part of the tests


@pytest.fixture
def site():
    site = Site()
    server = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"site": site}))
    site.host = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield site
    server.shutdown()
    server.server_close()
    thread.join()
