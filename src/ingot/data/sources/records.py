"""The records of a WARC file, also of a damaged one: what cannot be read is reported, and reading goes on behind it.

fastwarc does the reading. Around it stand checks for what it lets pass (headers cut by the end of the file, lengths
that are no numbers) and a search for the next record after damage, so that one bad record costs one record.
"""

import mmap
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecord

from ingot.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]")
_PLAIN_RECORD = re.compile(rb"(?<![^\n])WARC/[01]\.\d\d?\r?\n")
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One record. block: its content, at most one byte more than the limit that was asked for.

    problem: why the record, or what stands at `offset`, cannot be used; "" for a good one. `cut` says that nothing
    readable follows, so the file was probably cut off there.
    """

    offset: int
    kind: str = ""
    record_id: str = ""
    url: str = ""
    content_type: str = ""
    identified_type: str = ""
    truncated: str = ""
    block: bytes = b""
    problem: str = ""
    cut: bool = False


def read_records(path: Path, *, block_bytes: int, header_bytes: int) -> Iterator[Record]:
    """All records of the plain or gzip WARC file `path` in order, in constant memory.

    Raises DataError when the file cannot be opened or holds no WARC record at all.
    """
    try:
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise _no_warc(path, "is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from _Reader(path, data, block_bytes, header_bytes).records()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}",
            rule="a crawl file is a readable WARC or WET file",
            fix="check the path and its permissions",
        ) from None


def _no_warc(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} {found}",
        rule="a crawl file holds WARC records, plain or gzip (.warc .warc.gz .wet.gz); the first starts at offset 0",
        fix="leave this file out, or fetch it again; unpack other formats (zstd, tar, zip) first",
    )


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, block_bytes: int, header_bytes: int):
        self.path, self.data = path, data
        self.block_bytes, self.header_bytes = block_bytes, header_bytes

    def records(self) -> Iterator[Record]:
        start = self._next_start(0)
        if start is None:
            raise _no_warc(self.path, f"holds no WARC record: it starts with {bytes(self.data[:16])!r} at offset 0")
        if bytes(self.data[:start]).strip():
            yield Record(offset=0, problem=f"{start} bytes before the first record")
        while start is not None:
            start = yield from self._run(start)

    def _run(self, start: int):
        """Yield records from `start` on until the end or damage. Returns where to go on, or None."""
        last: Record | None = None
        with self.path.open("rb") as file:
            file.seek(start)
            reason = ""
            try:
                for found in ArchiveIterator(file, parse_http=False, max_header_len=self.header_bytes):
                    # The header behind `last` could be read, so the length of `last` was right.
                    if last:
                        yield last
                    last = self._record(found)
                    if last.problem:
                        return (yield from self._skip(last, last.offset + 1))
            except OSError as error:
                reason = str(error)
        if reason:
            return (yield from self._after_error(start, last, reason))
        if last:
            yield last
        end = self._clean_end(last.offset if last else start, start)
        if end is not None:
            yield Record(offset=end, problem="the gzip stream is not whole", cut=True)
        return None

    def _after_error(self, start: int, last: Record | None, reason: str):
        if last is None:
            return (yield from self._skip(Record(offset=start, problem=reason), start + 1))
        if b"\nWARC/1." in last.block:
            # Garbage follows a record that holds other records: its length was a lie.
            lie = Record(
                offset=last.offset, kind=last.kind, record_id=last.record_id, url=last.url, problem="bad length"
            )
            return (yield from self._skip(lie, last.offset + 1))
        yield last
        end = self._record_end(last)
        if end is None:  # one gzip stream over all records: no second way in
            yield Record(offset=last.offset, problem=reason, cut=True)
            return None
        following = self._next_start(end)
        if following == end:  # it looks like a record: a fresh reader says what is wrong with it
            return end
        return (yield from self._skip(Record(offset=end, problem=reason), end))

    def _skip(self, bad: Record, search_from: int):
        following = self._next_start(search_from)
        yield Record(
            offset=bad.offset,
            kind=bad.kind,
            record_id=bad.record_id,
            url=bad.url,
            problem=bad.problem,
            cut=following is None,
        )
        return following

    def _record(self, found: WarcRecord) -> Record:
        headers = found.headers
        problem, block = "", b""
        length = (headers.get("Content-Length") or "").strip()
        if not (length.isascii() and length.isdigit()):
            problem = f"Content-Length is {length[:40]!r}" if length else "no Content-Length"
        elif int(length) != found.content_length:
            problem = f"Content-Length {length[:40]} is out of range"
        else:
            try:
                block = found.reader.read(self.block_bytes + 1)
            except OSError as error:
                problem = str(error)
            if not problem and len(block) < min(found.content_length, self.block_bytes + 1):
                problem = f"{len(block)} of {length} bytes"
        return Record(
            offset=found.stream_pos,
            kind=(headers.get("WARC-Type") or "").strip().lower(),
            record_id=(headers.get("WARC-Record-ID") or "").strip(),
            url=(headers.get("WARC-Target-URI") or "").strip().removeprefix("<").removesuffix(">"),
            content_type=headers.get("Content-Type") or "",
            identified_type=headers.get("WARC-Identified-Payload-Type") or "",
            truncated=headers.get("WARC-Truncated") or "",
            block=b"" if problem else block,
            problem=problem,
        )

    def _next_start(self, position: int) -> int | None:
        """Offset of the first record at or behind `position`: a gzip member that opens as WARC, or a version line."""
        if self.data[:3] != _GZIP_MAGIC:
            match = _PLAIN_RECORD.search(self.data, position)
            return match.start() if match else None
        for match in _GZIP_MEMBER.finditer(self.data, position):
            try:
                head = zlib.decompressobj(31).decompress(self.data[match.start() : match.start() + 4096], 64)
            except zlib.error:
                continue  # the magic bytes by chance
            if head.lstrip().startswith(b"WARC/"):
                return match.start()
        return None

    def _record_end(self, record: Record) -> int | None:
        """Offset right behind `record` and its closing line ends. None if a gzip file is not compressed by record."""
        if self.data[:3] == _GZIP_MAGIC:
            whole, end = self._member_end(record.offset)
            return end if whole else None
        head = _HEADER_END.search(self.data, record.offset)
        end = (head.end() if head else record.offset) + len(record.block)
        while end < len(self.data) and self.data[end] in b"\r\n":
            end += 1
        return end

    def _member_end(self, offset: int) -> tuple[bool, int]:
        """(whether the gzip member at `offset` is whole, offset behind its last byte). Constant memory."""
        stream = zlib.decompressobj(31)
        position = offset
        try:
            while not stream.eof and position < len(self.data):
                piece = self.data[position : position + _STEP_BYTES]
                position += len(piece)
                while piece and not stream.eof:
                    stream.decompress(piece, _STEP_BYTES)
                    piece = stream.unconsumed_tail
        except zlib.error:
            return False, position
        return stream.eof, position - len(stream.unused_data)

    def _clean_end(self, last: int, start: int) -> int | None:
        """None if the gzip file ends with a whole member, else where the cut one starts.

        fastwarc reads a member without its end, and takes one cut inside the header for the end of the file.
        """
        if self.data[:3] != _GZIP_MAGIC:
            return None
        position = last if self.data[last : last + 3] == _GZIP_MAGIC else start
        while position < len(self.data):
            if not self.data[position : position + 64].strip(b"\0\r\n "):
                return None  # padding
            whole, end = self._member_end(position)
            if not whole:
                return position
            position = end
        return None
