"""A file as the stream of its bytes with gzip or zstd undone, told by its first bytes, in constant memory."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from ingot.data.sources.limits import Limits
from ingot.data.sources.members import GZIP_MAGIC, ZSTD_MAGIC

_PACKED_BYTES = 64 << 10
PIECE_BYTES = 256 << 10
# Rows are taken one by one, so the ratio of a stream costs time, not memory: honest repetitive tables stay far below.
_RATIO_FLOOR_BYTES = 1 << 30

_FOREIGN = {
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"Rar!": "rar",
    b"7z\xbc\xaf": "7z",
    b"%PDF-": "PDF",
    b"SQLite": "SQLite",
    b"filedesc:": "ARC",
    b"WARC/0.9 ": "WARC 0.9",
}


def foreign(head: bytes) -> str:
    """ " (zip)" and the like for the first bytes of what ingot does not unpack, "" for all else."""
    return next((f" ({kind})" for magic, kind in _FOREIGN.items() if head.startswith(magic)), "")


class BadStream(Exception):
    """The stream ends here. rule: the part of the drop's name after "read."."""

    def __init__(self, rule: str, value: str):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


class Unpacked:
    """Context manager. `read` raises BadStream (truncated_file, bad_stream, too_large), and OSError of the file."""

    def __init__(self, path: Path, limits: Limits):
        self._file = path.open("rb")
        self._ratio = limits.ratio
        self._packed_bytes = 0  # read so far
        self._bytes = 0  # given so far
        head = self._file.read(4)
        self._file.seek(0)
        self._pieces = self._inflated(head)
        self._piece, self._at = b"", 0

    def __enter__(self) -> "Unpacked":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end, and only there."""
        if self._at >= len(self._piece):
            self._piece, self._at = next(self._pieces, b""), 0
            self._bytes += len(self._piece)
            if self._bytes > max(_RATIO_FLOOR_BYTES, self._ratio * self._packed_bytes):
                raise BadStream("too_large", f"inflates to more than {self._ratio} times its size")
        taken = self._piece[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def exactly(self, count: int) -> bytes:
        """`count` bytes, or what is left."""
        parts, missing = [], count
        while missing and (piece := self.read(missing)):
            parts.append(piece)
            missing -= len(piece)
        return b"".join(parts)

    def skip(self, count: int) -> int:
        """Read `count` bytes and forget them. Returns how many there were."""
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
                raise BadStream("bad_stream", "other bytes behind the gzip stream")

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
    """What ZstdReader wants to read from."""

    def __init__(self, read):
        self.read = read

    def tell(self) -> int:
        return 0


def lines(stream: Unpacked, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """(line without its end, its bytes) of `stream`; (b"", bytes) for a line over `max_bytes`, which is not kept.

    Raises BadStream where the stream ends, behind all whole lines; what stands of the last one is given up.
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
