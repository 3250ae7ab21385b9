"""A small HTTP client for large files: ranges, time-outs, redirects one by one, connections to pinned addresses.

On the standard library's http.client, because the libraries above it resolve names themselves, once more for every
connection. Proxies of the environment are not used: what is behind one cannot be checked.
"""

import contextlib
import email.utils
import functools
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from ingot.data.sources.address import RefusedAddress, Resolver, Target, system_resolver, target, without_query
from ingot.data.sources.remote import (
    Changed,
    NoSuchHost,
    Part,
    RemoteRules,
    Throttled,
    Unreachable,
    Version,
    forbidden,
    gone,
)
from ingot.errors import DataError

REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PIECE_BYTES = 256 << 10
_CONNECT_SECONDS = 20
_SLOWEST_BYTES_PER_SECOND = 1024
_SLOW_AFTER_SECONDS = 60
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_LONGEST_RETRY_AFTER = 600.0


@dataclass
class Answer:
    """A response with its body still to be read. headers: names in lower case. url: where it came from at last."""

    url: str
    status: int
    headers: dict[str, str]
    _response: http.client.HTTPResponse
    _connection: http.client.HTTPConnection

    def pieces(self) -> Iterator[bytes]:
        """The body. Raises Unreachable when it ends before its length, or comes at less than 1 KiB/s for a minute."""
        started, received = time.monotonic(), 0
        try:
            while piece := self._response.read1(_PIECE_BYTES):
                received += len(piece)
                yield piece
                seconds = time.monotonic() - started
                if seconds > _SLOW_AFTER_SECONDS and received < seconds * _SLOWEST_BYTES_PER_SECOND:
                    raise Unreachable(f"only {received} bytes in {seconds:.0f} s")
            if self._response.length:  # read1 does not complain about a body that is cut
                raise Unreachable(f"the connection ended {self._response.length} bytes too early")
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(_words(error)) from None

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def ask(
    url: str,
    *,
    method: str = "GET",
    headers: dict[str, str],
    timeout_seconds: float,
    redirects: int,
    allow_hosts: tuple[str, ...] = (),
    resolver: Resolver = system_resolver,
) -> Answer:
    """The answer to one request, after at most `redirects` redirects. Every hop is checked like the first.

    Raises RefusedAddress; Unreachable when no answer came.
    """
    hops = 0
    while True:
        try:
            place = target(url, allow_hosts, resolver)
        except OSError as error:
            raise NoSuchHost(f"cannot resolve: {_words(error)}") from None
        answer = _one(place, method, headers, timeout_seconds)
        location = answer.headers.get("location", "")
        if answer.status not in REDIRECTS or not location:
            return answer
        answer.close()
        hops += 1
        if hops > redirects:
            raise _refused(url, f"more than {redirects} redirects")
        following = urljoin(url, location)
        if url.startswith("https:") and following.startswith("http:"):
            raise _refused(url, "a redirect from https to http")
        url = following


def _one(place: Target, method: str, headers: dict[str, str], timeout_seconds: float) -> Answer:
    connection = _Pinned(place, timeout_seconds)
    # The socket's time-out is for one read; a server that sends its headers byte by byte has a deadline for all.
    deadline = threading.Timer(2 * timeout_seconds + _CONNECT_SECONDS, connection.hang_up)
    deadline.daemon = True
    deadline.start()
    try:
        connection.putrequest(method, place.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", place.authority)
        connection.putheader("Accept-Encoding", "identity")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        raise Unreachable(_words(error)) from None
    finally:
        deadline.cancel()
    found = {name.lower(): value.strip() for name, value in reversed(response.getheaders())}
    return Answer(place.url, response.status, found, response, connection)


class _Pinned(http.client.HTTPConnection):
    """A connection to the address that was checked; TLS is for the name."""

    def __init__(self, place: Target, timeout_seconds: float):
        super().__init__(place.host, place.port, timeout=timeout_seconds)
        self._place = place

    def connect(self) -> None:
        seconds = min(_CONNECT_SECONDS, self.timeout or _CONNECT_SECONDS)
        self.sock = socket.create_connection((self._place.address, self._place.port), seconds)
        if self._place.scheme == "https":
            self.sock = _tls().wrap_socket(self.sock, server_hostname=self._place.host)
        self.sock.settimeout(self.timeout)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class WebFile:
    """A Remote behind an HTTP(S) URL."""

    def __init__(self, url: str, rules: RemoteRules, resolver: Resolver = system_resolver):
        self.url, self.rules, self.resolver = url, rules, resolver
        self.host = urlsplit(url).netloc.lower()

    def version(self) -> Version:
        with self._ask("HEAD", {}) as answer:
            if answer.status == 200:
                return _version(answer, _length(answer))
        # Signed URLs are often for GET alone.
        with self._ask("GET", {"Range": "bytes=0-0"}) as answer:
            self._check(answer)
            return _version(answer, _content_range(answer)[1] if answer.status == 206 else _length(answer))

    def part(self, start: int, version: Version | None) -> Part:
        headers = {}
        if start and version:
            headers["Range"] = f"bytes={start}-"
            # Weak tags do not say that the bytes are the same (RFC 9110, 13.1.5).
            validator = (
                version.last_modified if version.etag.startswith("W/") else version.etag or version.last_modified
            )
            if validator:
                headers["If-Range"] = validator
        answer = self._ask("GET", headers)
        try:
            if answer.status == 416:
                raise Changed(f"no bytes from {start} on")
            self._check(answer)
            if answer.status == 200:
                return Part(0, _version(answer, _length(answer)), _closing(answer))
            first, total = _content_range(answer)
            found = _version(answer, total)
            if first != start or not version or not version.same(found):
                raise Changed(f"bytes from {first} on of another version")
            return Part(start, found, _closing(answer))
        except BaseException:
            answer.close()
            raise

    def _ask(self, method: str, headers: dict[str, str]) -> Answer:
        return ask(
            self.url,
            method=method,
            headers={"User-Agent": self.rules.user_agent, **headers},
            timeout_seconds=self.rules.timeout_seconds,
            redirects=self.rules.redirects,
            allow_hosts=self.rules.allow_hosts,
            resolver=self.resolver,
        )

    def _check(self, answer: Answer) -> None:
        """Raises for every status that brings no bytes."""
        status = answer.status
        if status in (200, 206):
            return
        name, found = without_query(self.url), f"HTTP status {status}"
        # Common Crawl answers 403 to those who ask too fast.
        crawl = self.url.startswith(self.rules.common_crawl.rstrip("/") + "/")
        if status in (429, 503) or (status == 403 and crawl):
            raise Throttled(f"{name}: {found}", _retry_after(answer.headers.get("retry-after", "")))
        if status in (408, 425) or status >= 500:
            raise Unreachable(f"{name}: {found}")
        if status in (401, 403):
            raise forbidden(name, found)
        if status in (404, 410):
            raise gone(name, found)
        raise DataError(f"{name}: {found}", rule="a download is answered with 200 or 206", fix="check the URL")


def _closing(answer: Answer) -> Iterator[bytes]:
    with answer:
        yield from answer.pieces()


def _version(answer: Answer, total: int) -> Version:
    return Version(total, answer.headers.get("etag", "")[:200], answer.headers.get("last-modified", "")[:200])


def _length(answer: Answer) -> int:
    length = answer.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else -1


def _content_range(answer: Answer) -> tuple[int, int]:
    """(first byte, bytes of the whole file or -1). Raises Changed for a 206 that does not say what it brings."""
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if not match:
        raise Changed("a part without a usable Content-Range")
    return int(match[1]), -1 if match[3] == "*" else int(match[3])


def _retry_after(value: str) -> float:
    """Seconds, from seconds or a date; at most ten minutes, 0 for what is neither."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        seconds = float(value)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


def _refused(url: str, found: str) -> RefusedAddress:
    return RefusedAddress(
        f"{without_query(url)} is not fetched: {found}",
        rule="redirects are followed a few times, and never to where a download could not go at once",
        fix="give the URL that the redirects end at",
    )


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:160]
