"""Read the records of a WARC file. Damage is reported, and reading continues after it, so only that record is lost.

fastwarc does the reading. This module adds checks for the damage that fastwarc accepts (headers truncated by the end of
the file, lengths that are not numbers, an empty gzip member, which fastwarc takes for the end of the file) and a search
for the next record after damage (members.py).
"""

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecord

from ingot.data.sources.bounded import Limits, Window
from ingot.data.sources.members import Member, packing_of
from ingot.data.sources.sniff import foreign
from ingot.errors import DataError

# The total of bytes that may be read because of wrong record lengths; after that, the rest of the file is not read.
# Without this limit, a file of short records that each claim 30 MB would be read millions of times.
_MAX_WASTED_BYTES = 16 << 30
_PIECE_BYTES = 1 << 20
_READ_AHEAD_BYTES = 64 << 10  # packed bytes that fastwarc may have read in advance
_JUNK_BYTES = 1 << 20  # bytes between two records that are examined, to distinguish padding from damage
_NESTED = re.compile(rb"\nWARC/[01]\.")


@dataclass(frozen=True, slots=True)
class Record:
    """One record, or damage at `offset`.

    block: the content, at most one byte longer than the limit. problem: why the record or the bytes at `offset` cannot
    be used; "" for a good record. cut: True if nothing readable follows, so that the file is probably truncated there.
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


def read_records(path: Path, limits: Limits) -> Iterator[Record]:
    """Yield all records of the WARC file `path` (plain, gzip or zstd) in order, in constant memory.

    Raises DataError if the file cannot be read or does not hold any WARC record.
    """
    try:
        with Window(path) as file:
            if not file.size:
                raise _no_warc(path, "is empty")
            yield from _RecordReader(path, file, limits).records()
    except OSError as error:
        raise DataError(
            "E-INPUT-READ-FAILED",
            f"cannot read {path}: {error.strerror or error}",
            rule="a crawl file is a readable WARC or WET file",
            fix="check the path and its permissions",
            path=str(path),
        ) from None


def _no_warc(path: Path, found: str, archive: str = "") -> DataError:
    return DataError(
        "E-WARC-NONE",
        f"{path} {found}",
        rule="a crawl file holds WARC records, plain, gzip or zstd (.warc .warc.gz .warc.zst .wet.gz); "
        "the first starts at offset 0",
        fix="leave this file out, or fetch it again; unpack other formats (zip, bzip2, xz, lz4) first; "
        "convert ARC files: `warcio recompress x.arc.gz x.warc.gz`",
        path=str(path),
        archive=archive,
    )


class _Stream:
    """A stream for ArchiveIterator: the bytes `prefix`, then the file from offset `start` on.

    shift: the file offset of the stream's position 0. prefix: a zstd dictionary, which is valid only at position 0.
    """

    def __init__(self, file: Window, start: int, prefix: bytes):
        self._file, self._position, self._prefix = file, start, prefix
        self.taken = 0  # bytes of the file
        self.shift = start - len(prefix)

    def read(self, count: int) -> bytes:
        data, self._prefix = self._prefix, b""
        if not data:
            data = self._file.at(self._position, count)
            self._position += len(data)
            self.taken += len(data)
        return data

    def tell(self) -> int:  # a name of the file interface. words: ok
        return 0


class _RecordReader:
    def __init__(self, path: Path, file: Window, limits: Limits):
        self.path, self.file, self.limits = path, file, limits
        self.packing = packing_of(file, limits)
        self.wasted_bytes = 0

    def records(self) -> Iterator[Record]:
        start = self.packing.next_start(0)
        if start is None:
            raise self._no_records()
        before = len(self.packing.prefix)
        if start > before and self.file.at(before, min(start, 1 << 20)).strip():
            yield Record(offset=0, problem=f"{start} bytes before the first record")
        while start is not None:
            start = yield from self._run(start)
            if start is not None and self.wasted_bytes > _MAX_WASTED_BYTES:
                yield Record(offset=start, problem="too much damage: the rest of the file is not read", cut=True)
                return

    def _no_records(self) -> DataError:
        head = self.file.at(0, 4096)
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head, 64) or head
        kind = foreign(head)
        found = f"holds no WARC record: it starts with {head[:16]!r}{kind} at offset 0"
        return _no_warc(self.path, found, kind.strip(" ()"))

    def _run(self, start: int):
        """Yield records from `start` on until the end or damage. Return the offset of the record at which to continue,
        or None."""
        last: Record | None = None
        reason = ""
        # A reader that starts in the middle of a zstd file needs the dictionary from the start of the file.
        source = _Stream(self.file, start, self.packing.prefix if start else b"")
        try:
            for found in ArchiveIterator(source, parse_http=False, max_header_len=self.limits.header_bytes):  # pyright: ignore[reportArgumentType]
                # The header after `last` could be read, so the length of `last` was right.
                if last:
                    yield last
                last = self._record(found, source.shift)
                if last.problem:
                    return (yield from self._skip(last, last.offset + 1))
                if len(last.block) > self.limits.block_bytes:
                    # The rest may inflate to any size: skip it, unless the next record can be reached only through it.
                    if self.packing.is_only_record(last.offset, last.record_id, found.content_length):
                        return (yield from self._skip_large(last, found.content_length))
                    if bad := self._read_large(found, last, source):
                        return (yield from self._skip(bad, last.offset + 1))
        except OSError as error:
            reason = str(error)
        if reason:
            return (yield from self._after_error(start, last, reason))
        if last:
            yield last
        return (yield from self._after_last(last, start))

    def _skip_large(self, large: Record, length: int):
        end = self.packing.record_end(large.offset, length)
        length_is_right = end == self.file.size or (end is not None and self.packing.starts_record(end))
        if (
            not length_is_right and self.packing.member(large.offset) is None
        ):  # not compressed: only the length shows the end
            self.wasted_bytes += len(large.block)
            bad = replace(large, block=b"", problem=f"Content-Length {length} leads to no record")
            return (yield from self._skip(bad, large.offset + 1))
        yield large
        return self.packing.next_start(large.offset + 1) if end is None else (yield from self._account_from(end))

    def _read_large(self, found: WarcRecord, large: Record, source: _Stream) -> Record | None:
        """Read the rest of a large record, because other records follow in the same compressed stream.

        If the rest is too large for its packed size, or shorter than announced, return the record with this problem.
        """
        size, packed_before = len(large.block), source.taken
        while size < found.content_length and (piece := found.reader.read(_PIECE_BYTES)):
            size += len(piece)
            packed = source.taken - packed_before + _READ_AHEAD_BYTES
            if size > max(self.limits.ratio_floor_bytes + len(large.block), self.limits.ratio * packed):
                return replace(large, block=b"", problem=f"inflates to more than {self.limits.ratio} times its size")
        if size == found.content_length:
            return None
        self.wasted_bytes += size
        return replace(large, block=b"", problem=f"{size} of {found.content_length} bytes")

    def _after_error(self, start: int, last: Record | None, reason: str):
        if last is None:
            return (yield from self._skip(Record(offset=start, problem=reason), start + 1))
        if _NESTED.search(last.block):
            # Garbage follows a record that holds other records, so its length is wrong.
            self.wasted_bytes += len(last.block)
            return (yield from self._skip(replace(last, block=b"", problem="bad length"), last.offset + 1))
        yield last
        end = self.packing.record_end(last.offset, len(last.block))
        if end is None:
            following = self.packing.next_start(last.offset + 1)  # None: one stream over all records, no second way in
            yield Record(offset=last.offset, problem=reason, cut=following is None)
            return following
        if end >= self.file.size:
            yield Record(offset=end, problem=reason, cut=True)
        # If a record seems to start there, a new reader reports what is wrong with it.
        return (yield from self._account_from(end, reason))

    def _skip(self, bad: Record, search_from: int):
        following = self.packing.next_start(search_from)
        yield replace(bad, cut=following is None)
        return following

    def _record(self, found: WarcRecord, shift: int) -> Record:
        headers = found.headers
        problem, block = "", b""
        length = (headers.get("Content-Length") or "").strip()
        if not (length.isascii() and length.isdigit()):
            problem = f"Content-Length is {length[:40]!r}" if length else "no Content-Length"
        elif int(length[:20]) != found.content_length:
            problem = f"Content-Length {length[:40]} is out of range"
        else:
            wanted = min(found.content_length, self.limits.block_bytes + 1)
            try:
                block = found.reader.read(wanted)  # a request for more bytes than exist takes twice as long
            except OSError as error:
                problem = str(error)
            if not problem and len(block) < wanted:
                problem = f"{len(block)} of {length} bytes"
                self.wasted_bytes += len(block)
        return Record(
            offset=found.stream_pos + shift,
            kind=(headers.get("WARC-Type") or "").strip().lower(),
            record_id=(headers.get("WARC-Record-ID") or "").strip(),
            url=(headers.get("WARC-Target-URI") or "").strip().removeprefix("<").removesuffix(">"),
            content_type=headers.get("Content-Type") or "",
            identified_type=headers.get("WARC-Identified-Payload-Type") or "",
            truncated=headers.get("WARC-Truncated") or "",
            block=b"" if problem else block,
            problem=problem,
        )

    def _after_last(self, last: Record | None, start: int):
        """Check the bytes after `last`, the record at which fastwarc reported the end of the file.

        Yield a Record with a problem for each stretch that cannot be read.
        Return the offset of the next record, None if there is none. fastwarc reads a truncated gzip member without an
        error, and takes a member that is empty, or truncated in its header, for the end of the file.
        """
        if last is None:
            member = self.packing.member(start)
            return (yield from self._skip(Record(offset=start, problem=_unread(member)), start + 1))
        first = self.packing.member(last.offset)
        if first is None:  # not compressed, or one zstd frame over all records, in which records have no offsets
            position = self.packing.record_end(last.offset, len(last.block)) or self.file.size
        elif first.whole:
            position = first.end
        else:
            return (yield from self._skip(Record(offset=last.offset, problem=_unread(first)), last.offset + 1))
        return (yield from self._account_from(position))

    def _account_from(self, position: int, reason: str = ""):
        """Find the next record at or after `position`. Yield a Record with a problem for each stretch that is skipped,
        unless it is blank padding.

        Return the record's offset, or None at the end of the file. reason: fastwarc's error at `position`, or "".
        """
        while position < self.file.size:
            if self.packing.starts_record(position):
                return position
            member = self.packing.member(position)
            if member is None or not member.whole:
                return (yield from self._leftover(position, member, reason))
            if not member.blank:
                yield Record(offset=position, problem="packed bytes that are not a record")
            position = member.end
        return None

    def _leftover(self, position: int, member: Member | None, reason: str):
        """Handle bytes at `position` that are not a complete member: padding, junk, or the start of a truncated record.

        Yield a Record with a problem unless they are padding. Return the offset of the next record, or None.
        """
        following = self.packing.next_start(position + 1)
        end = self.file.size if following is None else following
        if member or reason or self.file.at(position, min(end - position, _JUNK_BYTES)).strip(b"\0\r\n "):
            problem = _unread(member) if member else reason or f"{end - position} bytes that are not a record"
            yield Record(offset=position, problem=problem, cut=following is None)
        return following


def _unread(member: Member | None) -> str:
    if member is None or member.whole:
        return "no record"
    return f"inflates to more than {member.bomb} times its size" if member.bomb else "the packed stream is not whole"
