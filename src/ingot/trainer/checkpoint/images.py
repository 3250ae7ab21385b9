"""Images of checkpoint files in memory, and their way over a socket (keeper.py, replicas.py). No torch."""

import hashlib
import json
import mmap
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ingot.errors import ResourceError
from ingot.machine.facts import host_memory
from ingot.trainer.checkpoint.message import pack_json, read_message, unpack_json

_CHUNK = 4 << 20
SECONDS = 60.0  # a node that sends or takes nothing for so long is gone
_LENGTH = struct.Struct("<Q")
_MOST_FRAME_BYTES = 1 << 30
_SPARE_BYTES = 1 << 30  # memory that a copy leaves to others


@dataclass(frozen=True, kw_only=True)
class KeptImage:
    """A snapshot of one rank in the memory of a node. snapshot: a text that all ranks' images of one save have.

    epoch: of the attempt that saved it, or that continued from it. world: the number of ranks that saved.
    """

    rank: int
    snapshot: str
    step: int
    epoch: int
    world: int
    bytes: int
    sha256: str = ""


class Connection:
    """A socket that carries frames: a length, then bytes. Raises OSError if the other side is gone or too slow."""

    def __init__(self, connected: socket.socket):
        connected.settimeout(SECONDS)
        self.socket = connected

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            self.socket.sendall(_LENGTH.pack(len(frame)))
            self.socket.sendall(frame)

    def receive(self, most: int = _MOST_FRAME_BYTES) -> bytes:
        size = _LENGTH.unpack(self._exactly(_LENGTH.size))[0]
        if size > most:
            raise OSError(f"a message of {size:,} bytes arrives, more than {most:,}")
        return self._exactly(size)

    def fill(self, place: memoryview) -> None:
        """Receive bytes until `place` is full."""
        filled = 0
        while filled < len(place):
            with place[filled : filled + _CHUNK] as rest:  # after an error, none is left on memory that is closed then
                count = self.socket.recv_into(rest)
            if not count:
                raise OSError("the other side has closed the connection")
            filled += count

    def _exactly(self, size: int) -> bytes:
        found = bytearray(size)
        self.fill(memoryview(found))
        return bytes(found)

    def ask(self, request: dict[str, Any], *more: bytes) -> Any:
        """Send a request and return its answer. Raises the error that the keeper answers, OSError if it gives none."""
        self.send(pack_json(request | {"more": len(more)}), *more)
        return read_message(self.receive(), unpack_json)

    def close(self) -> None:
        self.socket.close()


def memory_of(size: int) -> int:
    """Return the descriptor of `size` bytes of memory. Raises ResourceError if the machine has not that much left."""
    _, available = host_memory()
    if size + _SPARE_BYTES > available:
        raise ResourceError(
            "E-REPLICA-MEMORY",
            f"a copy of a snapshot needs {size:,} bytes of memory, and {available:,} are available",
            rule=f"a copy leaves {_SPARE_BYTES:,} bytes to other programs",
            fix="lower checkpoint.replicas, or use nodes with more memory",
            bytes=size,
            available=available,
        )
    fd = os.memfd_create("ingot-image")
    os.ftruncate(fd, size)
    return fd


def receive_image(connection: Connection, size: int) -> tuple[int, str]:
    """Receive the bytes of an image into new memory. Returns its descriptor and the SHA-256 of what arrived."""
    fd, sha256 = memory_of(size), hashlib.sha256()
    try:
        with mmap.mmap(fd, size) as whole, memoryview(whole) as view:
            for start in range(0, size, _CHUNK):
                with view[start : start + _CHUNK] as chunk:
                    connection.fill(chunk)
                    sha256.update(chunk)
    except BaseException:
        os.close(fd)
        raise
    return fd, sha256.hexdigest()


def chunks_of(fd: int, begin: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes from `begin` to `end` of the memory `fd`, in order."""
    if begin == end:
        return
    with mmap.mmap(fd, end, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
        for start in range(begin, end, _CHUNK):
            with view[start : min(start + _CHUNK, end)] as chunk:
                yield chunk


def sha256_of(fd: int, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of the memory `fd`."""
    sha256 = hashlib.sha256()
    for chunk in chunks_of(fd, 0, size):
        sha256.update(chunk)
    return sha256.hexdigest()


def part_of_image(fd: int, keys: Collection[str]) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the header of a safetensors file of those `keys` that the image `fd` has, and the spans of bytes of their
    tensors in the image, in order."""
    size = int.from_bytes(os.pread(fd, 8, 0), "little")
    entries = json.loads(os.pread(fd, size, 8))
    wanted = set(keys)
    chosen = [(key, one) for key, one in entries.items() if key in wanted]  # in the order of their data
    header, spans, position = {}, list[tuple[int, int]](), 0
    for key, entry in chosen:
        begin, end = entry["data_offsets"]
        spans.append((8 + size + begin, 8 + size + end))
        header[key] = entry | {"data_offsets": [position, position + end - begin]}
        position += end - begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans
