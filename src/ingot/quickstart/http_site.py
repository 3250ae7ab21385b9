"""A web site on the loopback address that serves the quickstart's pages, and the client that fetches them."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ingot.errors import ResourceError

_DEADLINE_SECONDS = 20.0
_NOT_FOUND = b"<html><head><title>404</title></head><body><h1>Not found</h1></body></html>"


@contextlib.contextmanager
def serve(pages: Mapping[str, tuple[str, bytes]], http_date: str) -> Iterator[tuple[str, int]]:
    """Serve `pages` on a free port of 127.0.0.1 during the `with` block, and yield the address (host, port).

    pages: the (content type, body) of each URL; other URLs get a 404. The Host header selects the site, as on any
    server with several host names. http_date: the value of the Date header, fixed so that two crawls of the same pages
    have the same bytes.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Send header and body in one packet; with Nagle's algorithm every page would wait 40 ms for an ACK.
        wbufsize = -1
        disable_nagle_algorithm = True
        timeout = _DEADLINE_SECONDS
        server_version, sys_version = "guide/1.0", ""

        def do_GET(self):
            kind, body = pages.get(f"http://{self.headers['Host']}{self.path}", ("", b""))
            self.send_response(200 if kind else 404)
            body = body if kind else _NOT_FOUND
            self.send_header("Content-Type", kind or "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp=None):
            return http_date

        def log_message(self, format, *args):
            """Log nothing, because the crawl reports its own progress."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    except OSError as error:
        raise ResourceError(
            "E-LOOPBACK-PORT",
            f"cannot open a port on 127.0.0.1: {error}",
            rule="the quickstart serves its pages on 127.0.0.1 and fetches them over HTTP",
            fix="allow loopback sockets, or use your own crawl files: ingot quickstart --warc FILE...",
        ) from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield "127.0.0.1", server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_DEADLINE_SECONDS)


class Fetcher:
    """A client that fetches pages over one kept-alive connection and returns each response byte for byte."""

    def __init__(self, address: tuple[str, int], user_agent: str):
        self._user_agent = user_agent
        try:
            self._socket = socket.create_connection(address, timeout=_DEADLINE_SECONDS)
        except OSError as error:
            raise _unreachable(error) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")

    def get(self, host: str, path: str) -> bytes:
        """Return the whole response to a GET of http://HOST/PATH, `path` beginning with "/".

        Raises ResourceError if there is no response within 20 seconds.
        """
        request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {self._user_agent}\r\nAccept: text/html\r\n\r\n"
        try:
            self._socket.sendall(request.encode("ascii"))
            head, length = [], 0
            while (line := self._stream.readline()) not in (b"\r\n", b""):
                head.append(line)
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            body = self._stream.read(length)
        except OSError as error:
            raise _unreachable(error) from None
        if not head or len(body) < length:
            raise _unreachable("the connection closed in the middle of a response")
        return b"".join(head) + b"\r\n" + body

    def __enter__(self) -> "Fetcher":
        return self

    def __exit__(self, *exception) -> None:
        self._stream.close()
        self._socket.close()


def _unreachable(why: object) -> ResourceError:
    return ResourceError(
        "E-LOOPBACK-SILENT",
        f"the site on 127.0.0.1 does not answer: {why}",
        rule=f"every page arrives within {_DEADLINE_SECONDS:.0f} seconds",
        fix="try again when the machine is less busy, or use your own crawl files: ingot quickstart --warc FILE...",
    )
