"""What all remote files have in common: how politely and how persistently they are asked for, and what a version is."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from ingot import __version__
from ingot.errors import DataError, DataMissing


@dataclass(frozen=True, kw_only=True)
class RemoteRules:
    """How remote files are fetched.

    attempts: in a row that bring nothing new, before a file is given up. Between them lie `backoff_seconds`, doubled
    each time up to five minutes, with jitter; a server's Retry-After counts for more.
    connections, delay_seconds: at once to one HTTP host, over all workers, and between two requests on one of them.
    redirects: followed for one request. max_bytes: of one file.
    allow_hosts: "host" or "host:port" that may have private addresses: mirrors inside of your network.
    common_crawl: where cc: names are read, https:// or s3://.
    s3_endpoint: of an S3-compatible store; "" leaves it to AWS_ENDPOINT_URL, as credentials and region are left to the
    usual environment variables. s3_anonymous: ask without signing, for public buckets.
    """

    user_agent: str = f"ingot/{__version__}"
    attempts: int = 10
    backoff_seconds: float = 1.0
    timeout_seconds: float = 60.0
    connections: int = 1
    delay_seconds: float = 0.5
    redirects: int = 2
    max_bytes: int = 64 << 30
    allow_hosts: tuple[str, ...] = ()
    common_crawl: str = "https://data.commoncrawl.org"
    s3_endpoint: str = ""
    s3_anonymous: bool = False

    def problems(self) -> Iterator[tuple[str, str]]:
        leasts = {"attempts": 1, "backoff_seconds": 0, "timeout_seconds": 1, "connections": 1, "delay_seconds": 0}
        for name, least in (leasts | {"redirects": 0, "max_bytes": 1}).items():
            if getattr(self, name) < least:
                yield name, f"is {getattr(self, name)}, must be at least {least}"
        if not self.user_agent.isprintable() or not self.user_agent.isascii() or not self.user_agent:
            yield "user_agent", f"is {self.user_agent!r}, must be printable ASCII"
        if not self.common_crawl.startswith(("https://", "s3://")) and _host(self.common_crawl) not in self.allow_hosts:
            yield "common_crawl", f"is {self.common_crawl!r}, must begin with https:// or s3://"


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a remote file. bytes: -1 when the server does not say. etag, last_modified: "" when not given."""

    bytes: int = -1
    etag: str = ""
    last_modified: str = ""

    def to_dict(self) -> dict:
        return asdict(self)

    def same(self, other: "Version") -> bool:
        """Whether nothing says that these are two versions."""
        pairs = ((self.bytes, other.bytes, -1), (self.etag, other.etag, ""))
        if not (self.etag and other.etag):
            pairs += ((self.last_modified, other.last_modified, ""),)
        return all(one == two or unknown in (one, two) for one, two, unknown in pairs)


@dataclass(frozen=True)
class Part:
    """The bytes of `version` from `start` on."""

    start: int
    version: Version
    pieces: Iterator[bytes]


class Remote(Protocol):
    """A file somewhere else. host: the server that is to be treated politely, "" for one that needs no care."""

    host: str

    def version(self) -> Version:
        """Raises Unreachable, Throttled, DataError, DataMissing."""
        ...

    def part(self, start: int, version: Version | None) -> Part:
        """The file from `start` on if it still is `version`, else from 0. Raises the same, while reading too."""
        ...


class Unreachable(Exception):
    """Something between here and the server went wrong; another attempt may do better."""


class NoSuchHost(Unreachable):
    """The name has no address: it is probably misspelt, and seldom mended by patience."""


class Throttled(Unreachable):
    """The server asks for patience. retry_after: seconds, 0 when it does not say."""

    def __init__(self, found: str, retry_after: float = 0):
        super().__init__(found)
        self.retry_after = retry_after


class Changed(Unreachable):
    """The file is not the one that the first bytes came from: begin anew."""


def gone(location: str, found: str) -> DataMissing:
    return DataMissing(f"{location}: {found}", rule="what is named as an input can be read", fix="check the name")


def forbidden(location: str, found: str) -> DataError:
    return DataError(
        f"{location}: {found}", rule="what is named as an input can be read", fix="check credentials and name"
    )
