"""Read compressed files and tar archives as streams, in constant memory. Nothing is written to disk.

`Unpacked` decompresses gzip or zstd, recognized by the first bytes of the file. `read_tar` replaces the standard
library's tarfile, which keeps every member in memory, reads extended headers of any size, and stops at the first bad
header. `read_tar` supports ustar, GNU's long names, and the paths and sizes of pax (POSIX.1-2001); it verifies
checksums, and after a bad header it searches for the next good one.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.data.sources.bounded import Limits
from ingot.data.sources.members import GZIP_MAGIC, ZSTD_MAGIC

_PACKED_BYTES = 64 << 10
PIECE_BYTES = 256 << 10
# Rows are read one by one, so a high ratio costs time, not memory; repetitive tables stay far below this limit.
_RATIO_FLOOR_BYTES = 1 << 30


class BadStream(Exception):
    """The stream cannot be read further. rule: the drop rule without its prefix "read."; value: what was found."""

    def __init__(self, rule: str, value: str):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


class Unpacked:
    """A context manager that reads a file and decompresses it (gzip, zstd, or no compression).

    `read` raises BadStream (truncated_file, bad_stream, too_large) and the OSErrors of the file.
    """

    def __init__(self, path: Path, limits: Limits):
        self._file = path.open("rb")
        self._ratio = limits.ratio
        self._packed_bytes = 0  # read from the file so far
        self._bytes = 0  # unpacked so far
        head = self._file.read(4)
        self._file.seek(0)
        self._pieces = self._inflated(head)
        self._piece, self._at = b"", 0

    def __enter__(self) -> "Unpacked":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        """Return between 1 and `count` bytes; b"" only at the end."""
        if self._at >= len(self._piece):
            self._piece, self._at = next(self._pieces, b""), 0
            self._bytes += len(self._piece)
            if self._bytes > max(_RATIO_FLOOR_BYTES, self._ratio * self._packed_bytes):
                raise BadStream("too_large", f"inflates to more than {self._ratio} times its size")
        taken = self._piece[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def exactly(self, count: int) -> bytes:
        """Return exactly `count` bytes, or fewer at the end."""
        parts, missing = [], count
        while missing and (piece := self.read(missing)):
            parts.append(piece)
            missing -= len(piece)
        return b"".join(parts)

    def skip(self, count: int) -> int:
        """Read and discard up to `count` bytes. Return the number of bytes discarded."""
        missing = count
        while missing and (piece := self.read(min(missing, PIECE_BYTES))):
            missing -= len(piece)
        return count - missing

    def _raw(self, count: int = _PACKED_BYTES) -> bytes:
        data = self._file.read(count)
        self._packed_bytes += len(data)
        return data

    def _inflated(self, head: bytes) -> Iterator[bytes]:
        if head[:3] == GZIP_MAGIC:
            return self._gunzipped()
        if head == ZSTD_MAGIC:
            return self._unzstd()
        return iter(lambda: self._raw(PIECE_BYTES), b"")

    def _gunzipped(self) -> Iterator[bytes]:
        packed = self._raw()
        while packed:
            stream = zlib.decompressobj(31)
            try:
                while not stream.eof:
                    if not packed and not (packed := self._raw()):
                        raise BadStream("truncated_file", "the gzip stream is not whole")
                    if data := stream.decompress(packed, PIECE_BYTES):
                        yield data
                    packed = stream.unconsumed_tail
            except zlib.error as error:
                raise BadStream("bad_stream", str(error)[:80]) from None
            packed = (stream.unused_data or self._raw()).lstrip(b"\0")
            while packed and len(packed) < len(GZIP_MAGIC) and (more := self._raw()):
                packed += more
            if packed and not packed.startswith(GZIP_MAGIC):
                raise BadStream("bad_stream", "other bytes behind the gzip stream")  # recorded in corpora. words: ok

    def _unzstd(self) -> Iterator[bytes]:
        from fastwarc.stream_io import ZstdReader

        stream = ZstdReader(_Counted(self._raw))  # pyright: ignore[reportArgumentType]
        try:
            while data := stream.read(PIECE_BYTES):
                yield data
        except OSError as error:
            rule = "truncated_file" if "incomplete" in str(error) else "bad_stream"
            raise BadStream(rule, f"zstd: {error}"[:80]) from None


class _Counted:
    """The file interface that ZstdReader reads from."""

    def __init__(self, read):
        self.read = read

    def tell(self) -> int:  # a name of the file interface. words: ok
        return 0


def lines(stream: Unpacked, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield (line without its end, size in bytes) for every line; (b"", size) for a line longer than `max_bytes`.

    If the stream is truncated, raises BadStream after the last complete line; the partial line is discarded.
    """
    parts: list[bytes] = []
    size = 0
    while piece := stream.read(PIECE_BYTES):
        first, *others = piece.split(b"\n")
        size += len(first)
        if size <= max_bytes:
            parts.append(first)
        else:
            parts.clear()
        if not others:
            continue
        yield (b"".join(parts), size)
        *whole, rest = others
        for line in whole:
            yield (line, len(line)) if len(line) <= max_bytes else (b"", len(line))
        size, parts = len(rest), [rest]
        if size > max_bytes:
            parts.clear()
    if size:
        yield (b"".join(parts), size)


BLOCK_BYTES = 512  # the block size of a tar archive
_FILES = b"0\x007"
_FOLDER = b"5"
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"
_LINKS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of a tar archive, or damage at `offset`.

    name: the name in the archive, used as a label, never as a path to write to. content: the content of a regular file,
    at most one byte longer than the requested limit. size: bytes of the complete content. other: the kind of a member
    that is not a file, or a description of the damage.
    """

    offset: int
    name: str
    content: bytes = b""
    size: int = 0
    other: str = ""
    damage: bool = False


def read_tar(stream: Unpacked, max_bytes: int, limits: Limits) -> Iterator[TarMember]:
    """Yield every member except folders, and one TarMember per damaged place.

    max_bytes: the content of a member is cut to this size plus one byte. Raises BadStream (truncated_file) if the
    archive is truncated.
    """
    offset, lost = 0, -1
    name, size = "", None  # from an extended header, for the next member
    while block := stream.exactly(BLOCK_BYTES):
        start, offset = offset, offset + len(block)
        if not block.strip(b"\0"):
            continue  # the end of an archive; another one may follow
        header = _header(block)
        if header is None:
            if lost < 0:
                lost = start
                yield TarMember(start, "", other="no tar header", damage=True)
            continue
        lost = -1
        kind, own_name, own_size = header
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
            text = stream.exactly(own_size) if own_size <= limits.header_bytes else b""
            missing = own_size - len(text) - stream.skip(own_size - len(text))
            offset += _padded(own_size)
            stream.skip(_padded(own_size) - own_size)
            if missing:
                raise BadStream("truncated_file", f"offset {start}: the archive is cut in a header")
            if own_size > limits.header_bytes:
                yield TarMember(start, "", other=f"an extended header of {own_size} bytes", damage=True)
            elif kind == _LONG_NAME:
                name = text.rstrip(b"\0").decode("utf-8", "replace")
            elif kind == _PAX:
                values = _pax(text)
                name = values.get("path", name)
                size = int(values["size"]) if values.get("size", "").isdigit() else size
            continue
        label, count = name or own_name, own_size if size is None else size
        name, size = "", None
        if kind in _FILES and not label.endswith("/"):  # in old archives, a name that ends in "/" means a folder
            content = stream.exactly(min(count, max_bytes + 1))
            if len(content) + stream.skip(count - len(content)) < count:
                raise BadStream("truncated_file", f"offset {start}: the archive is cut inside of {label[:80]}")
            yield TarMember(start, label, content, count)
        elif kind != _FOLDER and kind not in _FILES:
            count = 0 if kind in _LINKS else count
            stream.skip(count)
            yield TarMember(start, label, other=_LINKS.get(kind, f"a member of type {kind!r}"))
        else:
            count = 0
        offset += _padded(count)
        stream.skip(_padded(count) - count)


def _padded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _header(block: bytes) -> tuple[bytes, str, int] | None:
    """Return (type, name, size of the content); None for a block that is not a header."""
    if len(block) < BLOCK_BYTES:
        return None
    checksum = _number(block[148:156])
    if checksum != sum(block[:148]) + 8 * ord(" ") + sum(block[156:]):
        return None
    size = _number(block[124:136])
    if size is None:
        return None
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return block[156:157], (prefix + b"/" + name if prefix else name).decode("utf-8", "replace"), size


def _number(field: bytes) -> int | None:
    """Parse octal digits, or GNU's binary form of large numbers. Return None for invalid or negative numbers."""
    if field[0] == 0x80:
        value = int.from_bytes(field[1:], "big")
        return value if value < 1 << 62 else None
    digits = field.strip(b"\0 ")
    return int(digits or b"0", 8) if all(digit in b"01234567" for digit in digits) else None


def _pax(text: bytes) -> dict[str, str]:
    """Return the records "LENGTH key=value" of an extended header, up to the first malformed one."""
    values = {}
    while text:
        digits, space, _ = text.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 6 or not 0 < int(digits) <= len(text):
            break
        key, equals, value = text[len(digits) + 1 : int(digits)].rstrip(b"\n").partition(b"=")
        if equals:
            values[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        text = text[int(digits) :]
    return values
