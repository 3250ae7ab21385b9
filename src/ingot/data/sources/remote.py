"""Remote files: request settings, versions, and the addresses to which a download may connect.

A path list of a crawl, or a redirect, must not make ingot fetch http://169.254.169.254/ or a service inside the
firewall (server-side request forgery). So a URL is parsed strictly, its host is resolved once, every address of the
host must be public, and the connection goes to exactly the checked address, because a second look-up could give another
address (DNS rebinding). The URL of a redirect is checked in the same way.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol
from urllib.parse import urlsplit

from ingot import __version__
from ingot.errors import DataError, DataMissing
from ingot.ranges import Deadline, PositiveBytes, PositiveQueue, Queue, Seconds


@dataclass(frozen=True, kw_only=True)
class RemoteRules:
    """The settings of downloads.

    attempts: number of failed attempts without new bytes after which a file is given up. The pause between two attempts
    is `backoff_seconds`, doubled each time up to five minutes, with jitter; or the server's Retry-After if longer.
    timeout_seconds: time limit of one read. connections: simultaneous connections to one HTTP host by all workers.
    delay_seconds: pause between two uses of a connection. redirects: maximum per request. max_bytes: maximum size of a
    file. allow_hosts: "host" or "host:port" that may have private addresses (mirrors inside your network).
    common_crawl: the https:// or s3:// location from which cc: names are read. s3_endpoint: URL of an S3-compatible
    store; "" means AWS_ENDPOINT_URL. Credentials and region come from the usual environment variables. s3_anonymous:
    send unsigned requests, for public buckets.
    """

    user_agent: str = f"ingot/{__version__}"
    attempts: PositiveQueue = 10
    backoff_seconds: Seconds = 1.0
    timeout_seconds: Deadline = 60.0
    connections: PositiveQueue = 1
    delay_seconds: Seconds = 0.5
    redirects: Queue = 2
    max_bytes: PositiveBytes = 64 << 30
    allow_hosts: tuple[str, ...] = ()
    common_crawl: str = "https://data.commoncrawl.org"
    s3_endpoint: str = ""
    s3_anonymous: bool = False

    def without_secrets(self) -> "RemoteRules":
        """Return the rules to write to files: the locations without user names, passwords and queries."""
        shown = {name: without_secrets(getattr(self, name)) for name in ("common_crawl", "s3_endpoint")}
        return replace(self, **shown)

    def problems(self) -> Iterator[tuple[str, str]]:
        leasts = {"attempts": 1, "backoff_seconds": 0, "timeout_seconds": 1, "connections": 1, "delay_seconds": 0}
        for name, least in (leasts | {"redirects": 0, "max_bytes": 1}).items():
            if getattr(self, name) < least:
                yield name, f"is {getattr(self, name)}, must be at least {least}"
        if not self.user_agent.isprintable() or not self.user_agent.isascii() or not self.user_agent:
            yield "user_agent", f"is {self.user_agent!r}, must be printable ASCII"
        if not self.common_crawl.startswith(("https://", "s3://")) and _host(self.common_crawl) not in self.allow_hosts:
            yield "common_crawl", f"is {without_secrets(self.common_crawl)!r}, must begin with https:// or s3://"


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a remote file. bytes: -1 if unknown. etag, last_modified: "" if the server does not send them."""

    bytes: int = -1
    etag: str = ""
    last_modified: str = ""

    def to_dict(self) -> dict:
        return asdict(self)

    def same(self, other: "Version") -> bool:
        """Return True if no known field differs, so that both may be the same version."""
        pairs = ((self.bytes, other.bytes, -1), (self.etag, other.etag, ""))
        if not (self.etag and other.etag):
            pairs += ((self.last_modified, other.last_modified, ""),)
        return all(one == two or unknown in (one, two) for one, two, unknown in pairs)


@dataclass(frozen=True)
class RemoteRange:
    """The bytes of a remote file from `start` on, in pieces, and the version to which they belong."""

    start: int
    version: Version
    pieces: Iterator[bytes]


class Remote(Protocol):
    """A remote file. host: the server, for limits on connections and request rate; "" for a store without limits."""

    host: str

    def version(self) -> Version:
        """Return the current version. Raises Unreachable, Throttled, DataError or DataMissing."""
        ...

    def part(self, start: int, version: Version | None) -> RemoteRange:
        """Return the bytes from `start` on if the file still has this version, else the bytes from 0 on.

        Raises the same errors as the method `version`; iterating over the pieces can raise them too.
        """
        ...


class Unreachable(Exception):
    """A request failed, but another attempt may succeed."""


class NoSuchHost(Unreachable):
    """The host name has no address. It is probably misspelled, so few attempts are made."""


class Throttled(Unreachable):
    """The server limits the rate of requests. retry_after: seconds to wait, 0 if the server does not send it."""

    def __init__(self, found: str, retry_after: float = 0):
        super().__init__(found)
        self.retry_after = retry_after


class Changed(Unreachable):
    """The file has another version than the bytes fetched so far, so the download starts again from the first byte."""


def missing_error(location: str, found: str, **facts: object) -> DataMissing:
    """Return the error for a remote file that does not exist."""
    location = without_secrets(location)
    return DataMissing(
        "E-REMOTE-MISSING",
        f"{location}: {found}",
        rule="an input must exist",
        fix="check the name",
        location=location,
        **facts,
    )


def forbidden_error(location: str, found: str, **facts: object) -> DataError:
    """Return the error for a remote file that the server does not allow ingot to read."""
    location = without_secrets(location)
    return DataError(
        "E-REMOTE-FORBIDDEN",
        f"{location}: {found}",
        rule="an input must be readable",
        fix="check the credentials and the name",
        location=location,
        **facts,
    )


# Addresses of downloads

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC_LABEL = re.compile(r"0x[0-9a-f]*|[0-9]+")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
# IANA special-purpose registries. Written out, because `is_global` of the standard library changes between versions.
_SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(net)
    for net in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    )
)  # fmt: skip
# In IPv6 only global unicast is allowed, without addresses that embed an IPv4 address (6to4, Teredo) and addresses for
# documentation. This excludes loopback, link-local, unique local, multicast, IPv4-mapped and -compatible, and NAT64.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)
_ONE_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_AFTER_SCHEME = re.compile(r"(?<=://)\S+")
_MAX_TEXT = 1000
Resolver = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ResolvedUrl:
    """A checked URL. host: name for the Host header and certificate. address: IP to connect to. path: with query."""

    scheme: str
    host: str
    port: int
    address: str
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


class RefusedAddress(DataError):
    """The URL, or an address of its host, is not allowed for downloads."""


def system_resolver(host: str, port: int) -> list[str]:
    """Return all IP addresses of `host`. Raises OSError if the name cannot be resolved."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def resolve_url(url: str, allow_hosts: Sequence[str] = (), resolver: Resolver = system_resolver) -> ResolvedUrl:
    """Check `url` and resolve its host. allow_hosts: "host" or "host:port" that may have any address.

    Raises RefusedAddress, and OSError if the name cannot be resolved.
    """
    scheme, host, port, path = split_url(url)
    allowed = host in allow_hosts or f"{host}:{port}" in allow_hosts
    literal = _literal(url, host)
    addresses = [literal] if literal else [_without_zone(a) for a in resolver(host, port)]
    if not addresses:
        raise OSError("the host has no address")
    if not allowed:
        for address in addresses:
            if not is_public(address):
                raise _refused("E-URL-PRIVATE", url, f"its host has the address {address}, which is not public")
    return ResolvedUrl(scheme, host, port, addresses[0], path)


def is_public(address: str) -> bool:
    """Return True if `address` is an IP address in its usual spelling that is public on the internet."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in net for net in _SPECIAL_V4)
    return ip in _GLOBAL_V6 and not any(ip in net for net in _SPECIAL_V6)


def split_url(url: str) -> tuple[str, str, int, str]:
    """Return (scheme, host in lower case, port, path with query). Raises RefusedAddress.

    The reasons do not quote the host and port: before a password with a "/", they are the user and half the password.
    """
    if _FORBIDDEN.search(url) or not url.isascii():
        raise _refused("E-URL-INVALID", url, "it has characters that are not allowed in a URL")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        raise _refused("E-URL-INVALID", url, "its host is not valid") from None
    try:
        port = parts.port
    except ValueError:
        raise _refused("E-URL-INVALID", url, "its port is not a number up to 65535") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise _refused("E-URL-INVALID", url, f"its scheme is {parts.scheme!r}")
    if "@" in parts.netloc:
        raise _refused("E-URL-INVALID", url, "it has a user name")
    if port == 0:
        raise _refused("E-URL-INVALID", url, "its port is 0")
    host = host.lower().removesuffix(".")
    if ":" not in host and not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise _refused("E-URL-INVALID", url, "its host is not a host name")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path


def _literal(url: str, host: str) -> str:
    """Return the IP address if `host` is one, "" if it is a name. Raises RefusedAddress for a non-standard form."""
    if ":" in host:
        try:
            if "%" in host:
                raise ValueError("a zone")
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise _refused("E-URL-INVALID", url, "its host is not an IPv6 address") from None
    if _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        # Resolvers read such a host as a number: 2130706433, 0x7f.1 and 0177.0.0.1 all mean 127.0.0.1.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _refused("E-URL-INVALID", url, "its host is an IP address in a non-standard form") from None
    return ""


def _without_zone(address: str) -> str:
    return address.partition("%")[0]


def _refused(code: str, url: str, found: str) -> RefusedAddress:
    return RefusedAddress(
        code,
        f"{without_secrets(url)!r} is not fetched: {found}",
        rule="downloads and their redirects go only to http(s) hosts with public addresses",
        fix="check the URL; allow a mirror inside your network with --set 'remote.allow_hosts=[...]'",
        url=without_secrets(url),
    )


def without_secrets(text: str) -> str:
    """Return a URL, or a text with URLs, as it may be shown and written: without user names, passwords and queries.

    A query may hold signatures and keys under any name, so nothing of it is kept. Documents do not lose their identity:
    lineage has the URLs of pages (url.py), and an input with a query has a hash of it in its name (input.py).

    A password may hold "/", "?" or "#", after which "@" no longer shows where it ends. So nothing before the last "@"
    is kept, nor anything after the first "?" or "#"; "..." stands for what is left out of the path. A text that begins
    with a URL is taken for one URL, so that spaces do not end it; a URL within a text ends at a space.
    """
    if _ONE_URL.match(text):
        before, mark, rest = text.partition("://")
        return (before + mark + _without_user_and_query(rest))[:_MAX_TEXT]
    return _AFTER_SCHEME.sub(lambda match: _without_user_and_query(match[0]), text)[:_MAX_TEXT]


def _without_user_and_query(rest: str) -> str:
    """Return what may be shown of `rest`, the part of a URL after "://"."""
    shown = re.split(r"[?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(shown) :]:
        return "..."
    authority, slash, path = shown.partition("/")
    if "@" in path:
        return ".../" + path.rpartition("@")[2]
    return authority.rpartition("@")[2] + slash + path
