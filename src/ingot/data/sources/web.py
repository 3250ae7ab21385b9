"""A small HTTP client for large files: ranges, time-outs, a check of every redirect, connections to checked addresses.

It uses the standard library's http.client, because higher-level libraries resolve the host name again for every
connection. Proxy settings of the environment are ignored, because the address to which a proxy connects cannot be
checked.
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

from ingot.data.sources.remote import (
    Changed,
    NoSuchHost,
    RefusedAddress,
    RemoteRange,
    RemoteRules,
    ResolvedUrl,
    Resolver,
    Throttled,
    Unreachable,
    Version,
    forbidden_error,
    missing_error,
    resolve_url,
    system_resolver,
    without_secrets,
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
class StreamedResponse:
    """A response whose body is still to be read. url: the URL after all redirects. headers: names in lower case."""

    url: str
    status: int
    headers: dict[str, str]
    _response: http.client.HTTPResponse
    _connection: http.client.HTTPConnection

    def pieces(self) -> Iterator[bytes]:
        """Yield the body in pieces. Raises Unreachable if it is truncated, or slower than 1 KiB/s after a minute."""
        started, received = time.monotonic(), 0
        try:
            while piece := self._response.read1(_PIECE_BYTES):
                received += len(piece)
                yield piece
                seconds = time.monotonic() - started
                if seconds > _SLOW_AFTER_SECONDS and received < seconds * _SLOWEST_BYTES_PER_SECOND:
                    raise Unreachable(f"only {received} bytes in {seconds:.0f} s")
            if self._response.length:  # read1 does not raise for a truncated body
                raise Unreachable(f"the connection ended {self._response.length} bytes too early")
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(_describe(error)) from None

    def close(self) -> None:
        self._response.close()
        self._connection.close()

    def __enter__(self) -> "StreamedResponse":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def send_request(
    url: str,
    *,
    method: str = "GET",
    headers: dict[str, str],
    timeout_seconds: float,
    redirects: int,
    allow_hosts: tuple[str, ...] = (),
    resolver: Resolver = system_resolver,
) -> StreamedResponse:
    """Send a request and return its response, after at most `redirects` redirects, each checked like the first URL.

    Raises RefusedAddress; Unreachable if there is no response.
    """
    hops = 0
    while True:
        try:
            resolved = resolve_url(url, allow_hosts, resolver)
        except OSError as error:
            raise NoSuchHost(f"cannot resolve: {_describe(error)}") from None
        response = _send(resolved, method, headers, timeout_seconds)
        location = response.headers.get("location", "")
        if response.status not in REDIRECTS or not location:
            return response
        response.close()
        hops += 1
        if hops > redirects:
            raise _bad_redirect(url, f"more than {redirects} redirects")
        try:
            following = urljoin(url, location)
        except ValueError:
            raise _bad_redirect(url, f"a redirect to {location[:100]!r}, which is no URL") from None
        if url.startswith("https:") and following.startswith("http:"):
            raise _bad_redirect(url, "a redirect from https to http")
        url = following


def _send(resolved: ResolvedUrl, method: str, headers: dict[str, str], timeout_seconds: float) -> StreamedResponse:
    connection = _PinnedConnection(resolved, timeout_seconds)
    # The socket's time-out applies to one read. The timer limits all headers together, if a server sends them slowly.
    deadline = threading.Timer(2 * timeout_seconds + _CONNECT_SECONDS, connection.hang_up)
    deadline.daemon = True
    deadline.start()
    try:
        connection.putrequest(method, resolved.path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", resolved.authority)
        connection.putheader("Accept-Encoding", "identity")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        raise Unreachable(_describe(error)) from None
    finally:
        deadline.cancel()
    found = {name.lower(): value.strip() for name, value in reversed(response.getheaders())}
    return StreamedResponse(resolved.url, response.status, found, response, connection)


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to the checked address; the TLS certificate is verified against the host name."""

    def __init__(self, resolved: ResolvedUrl, timeout_seconds: float):
        super().__init__(resolved.host, resolved.port, timeout=timeout_seconds)
        self._resolved = resolved

    def connect(self) -> None:
        seconds = min(_CONNECT_SECONDS, self.timeout or _CONNECT_SECONDS)
        self.sock = socket.create_connection((self._resolved.address, self._resolved.port), seconds)
        if self._resolved.scheme == "https":
            self.sock = _tls().wrap_socket(self.sock, server_hostname=self._resolved.host)
        self.sock.settimeout(self.timeout)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class WebFile:
    """A remote file at an HTTP(S) URL."""

    def __init__(self, url: str, rules: RemoteRules, resolver: Resolver = system_resolver):
        self.url, self.rules, self.resolver = url, rules, resolver
        self.host = urlsplit(url).netloc.lower()

    def version(self) -> Version:
        with self._request("HEAD", {}) as response:
            if response.status == 200:
                return _version(response, _length(response))
        # Signed URLs often allow only GET.
        with self._request("GET", {"Range": "bytes=0-0"}) as response:
            self._check(response)
            return _version(response, _content_range(response)[1] if response.status == 206 else _length(response))

    def part(self, start: int, version: Version | None) -> RemoteRange:
        headers = {}
        if start and version:
            headers["Range"] = f"bytes={start}-"
            # Equal weak tags do not mean equal bytes (RFC 9110, 13.1.5).
            validator = (
                version.last_modified if version.etag.startswith("W/") else version.etag or version.last_modified
            )
            if validator:
                headers["If-Range"] = validator
        response = self._request("GET", headers)
        try:
            if response.status == 416:
                raise Changed(f"no bytes from {start} on")
            self._check(response)
            if response.status == 200:
                return RemoteRange(0, _version(response, _length(response)), _pieces_of(response))
            first, total = _content_range(response)
            found = _version(response, total)
            if first != start or not version or not version.same(found):
                raise Changed(f"bytes from {first} on of another version")
            return RemoteRange(start, found, _pieces_of(response))
        except BaseException:
            response.close()
            raise

    def _request(self, method: str, headers: dict[str, str]) -> StreamedResponse:
        return send_request(
            self.url,
            method=method,
            headers={"User-Agent": self.rules.user_agent, **headers},
            timeout_seconds=self.rules.timeout_seconds,
            redirects=self.rules.redirects,
            allow_hosts=self.rules.allow_hosts,
            resolver=self.resolver,
        )

    def _check(self, response: StreamedResponse) -> None:
        """Raise Throttled, Unreachable or DataError for every status other than 200 and 206."""
        status = response.status
        if status in (200, 206):
            return
        name, found = without_secrets(self.url), f"HTTP status {status}"
        # Common Crawl answers 403 to too many requests.
        crawl = self.url.startswith(self.rules.common_crawl.rstrip("/") + "/")
        if status in (429, 503) or (status == 403 and crawl):
            raise Throttled(f"{name}: {found}", _retry_after(response.headers.get("retry-after", "")))
        if status in (408, 425) or status >= 500:
            raise Unreachable(f"{name}: {found}")
        if status in (401, 403):
            raise forbidden_error(name, found, status=status)
        if status in (404, 410):
            raise missing_error(name, found, status=status)
        raise DataError(
            "E-REMOTE-STATUS",
            f"{name}: {found}",
            rule="a download is answered with 200 or 206",
            fix="check the URL",
            url=name,
            status=status,
        )


def _pieces_of(response: StreamedResponse) -> Iterator[bytes]:
    with response:
        yield from response.pieces()


def _version(response: StreamedResponse, total: int) -> Version:
    return Version(total, response.headers.get("etag", "")[:200], response.headers.get("last-modified", "")[:200])


def _length(response: StreamedResponse) -> int:
    length = response.headers.get("content-length", "")
    return int(length) if re.fullmatch(r"[0-9]{1,18}", length) else -1


def _content_range(response: StreamedResponse) -> tuple[int, int]:
    """Return (first byte, size of the whole file or -1). Raises Changed if a 206 has no usable Content-Range."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if not match:
        raise Changed("a part without a usable Content-Range")
    return int(match[1]), -1 if match[3] == "*" else int(match[3])


def _retry_after(value: str) -> float:
    """Return the seconds to wait that a Retry-After value (seconds or a date) states, at most 600; 0 if invalid."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        seconds = float(value)
    else:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


def _bad_redirect(url: str, found: str) -> RefusedAddress:
    return RefusedAddress(
        "E-URL-REDIRECT",
        f"{without_secrets(url)} is not fetched: {found}",
        rule="the number of redirects is limited, and a redirect may not change https to http",
        fix="give the URL at which the redirects end",
        url=without_secrets(url),
    )


def _describe(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:160]
