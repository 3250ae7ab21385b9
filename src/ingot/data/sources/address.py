"""Which addresses a download may go to: none that only this machine or its network can reach.

A crawl's path list, or a redirect, must not make ingot fetch http://169.254.169.254/ or a service behind the firewall
(server-side request forgery). So a URL is taken apart strictly, its host is resolved once, every address it has must
be public, and the connection goes to exactly that address: a second look-up could answer otherwise (DNS rebinding).
Redirects go through the same door.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ingot.errors import DataError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMERIC_LABEL = re.compile(r"0x[0-9a-f]*|[0-9]+")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")
# IANA special-purpose registries. Written out, because what the standard library calls global changes by version.
_SPECIAL_V4 = tuple(
    ipaddress.IPv4Network(net)
    for net in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    )
)  # fmt: skip
# Of IPv6 only global unicast, without what carries an IPv4 address in it (6to4, Teredo) or is for documents. Outside of
# it lie loopback, link-local, unique local, multicast, IPv4-mapped and -compatible addresses, and NAT64.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    ipaddress.IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
)
Resolver = Callable[[str, int], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect. host: for the Host header and the certificate; address: the pinned one; path: with query."""

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
    """The URL leads somewhere ingot does not go."""


def system_resolver(host: str, port: int) -> list[str]:
    """All addresses of `host`. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def target(url: str, allow_hosts: Sequence[str] = (), resolver: Resolver = system_resolver) -> Target:
    """Where `url` leads. allow_hosts: "host" or "host:port" that may have any address.

    Raises RefusedAddress; OSError when the name cannot be resolved.
    """
    scheme, host, port, path = _parts(url)
    allowed = host in allow_hosts or f"{host}:{port}" in allow_hosts
    literal = _literal(url, host)
    addresses = [literal] if literal else [_without_zone(a) for a in resolver(host, port)]
    if not addresses:
        raise OSError(f"{host} has no address")
    if not allowed:
        for address in addresses:
            if not is_public(address):
                raise _refused(url, f"{host} has the address {address}, which is not public")
    return Target(scheme, host, port, addresses[0], path)


def is_public(address: str) -> bool:
    """Whether the IP address `address`, in its usual spelling, is one of the internet's."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in net for net in _SPECIAL_V4)
    return ip in _GLOBAL_V6 and not any(ip in net for net in _SPECIAL_V6)


def _parts(url: str) -> tuple[str, str, int, str]:
    """(scheme, host in lower case, port, path with query). Raises RefusedAddress."""
    if _FORBIDDEN.search(url) or not url.isascii():
        raise _refused(url, "it holds characters that do not belong into a URL")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise _refused(url, str(error)) from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise _refused(url, f"its scheme is {parts.scheme!r}")
    if "@" in parts.netloc:
        raise _refused(url, "it names a user")
    if port == 0:
        raise _refused(url, "its port is 0")
    host = host.lower().removesuffix(".")
    if ":" not in host and not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise _refused(url, f"{host!r} is no host name")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path


def _literal(url: str, host: str) -> str:
    """The IP address that `host` spells, "" for a name. Raises RefusedAddress for all but the usual spelling."""
    if ":" in host:
        try:
            if "%" in host:
                raise ValueError("a zone")
            return str(ipaddress.IPv6Address(host))
        except ValueError:
            raise _refused(url, f"{host!r} is no IPv6 address") from None
    if _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        # Such a host is a number to resolvers too: 2130706433, 0x7f.1 and 0177.0.0.1 are all 127.0.0.1.
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _refused(url, f"{host!r} spells an address in an unusual way") from None
    return ""


def _without_zone(address: str) -> str:
    return address.partition("%")[0]


def _refused(url: str, found: str) -> RefusedAddress:
    return RefusedAddress(
        f"{without_query(url)!r} is not fetched: {found}",
        rule="downloads go to http(s) hosts with public addresses, in redirects too",
        fix="check the URL; a mirror inside of your network has to be named: --set 'remote.allow_hosts=[...]'",
    )


def without_query(url: str) -> str:
    """`url` for messages: queries carry signatures and keys."""
    return url.partition("?")[0][:300]
