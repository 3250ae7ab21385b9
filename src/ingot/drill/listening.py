"""Sockets at which processes of this machine listen, as the kernel lists them (proc(5)). No torch."""

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"  # the state in /proc/net/tcp
_ACCEPTS = 1 << 16  # the flag in /proc/net/unix of a socket that listens
_FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}


def listening(pid: int) -> list[str]:
    """Return the addresses at which a process listens, in its own network: "127.0.0.1:29500", "[::]:80", or the name of
    a UNIX socket, "@..." for one without a file. None of a process that has ended, or of another user."""
    own = set(open_files(pid))
    return sorted(address for inode, address in (*_of_tcp(pid), *_of_unix(pid)) if f"socket:[{inode}]" in own)


def open_files(pid: int) -> list[str]:
    """Return what the open files of a process are, as their links name them; none of a process that has ended."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                found.append(str(link.readlink()))
    return found


def _of_tcp(pid: int) -> Iterator[tuple[str, str]]:
    """Return (inode, address) of the TCP sockets that listen in the network of a process."""
    for table, family in _FAMILIES.items():
        for fields in _lines(f"/proc/{pid}/net/{table}"):
            if fields[3] == _LISTENS:
                host, _, port = fields[1].partition(":")
                words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                name = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                yield fields[9], f"[{name}]:{int(port, 16)}" if ":" in name else f"{name}:{int(port, 16)}"


def _of_unix(pid: int) -> Iterator[tuple[str, str]]:
    """Return (inode, name) of the UNIX sockets that listen in the network of a process."""
    for fields in _lines(f"/proc/{pid}/net/unix"):
        if int(fields[3], 16) & _ACCEPTS:
            yield fields[6], fields[7] if len(fields) > 7 else "a socket without a name"


def _lines(table: str) -> list[list[str]]:
    with suppress(OSError):
        return [line.split() for line in Path(table).read_text(errors="replace").splitlines()[1:]]
    return []
