"""The records of a WARC file, also of a damaged one: what cannot be read is reported, and reading goes on behind it.

fastwarc does the reading. Around it stand checks for what it lets pass (headers cut by the end of the file, lengths
that are no numbers, an empty gzip member that it takes for the end) and a search for the next record after damage
(members.py), so that one bad record costs one record.
"""

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecord

from ingot.data.sources.limits import Limits
from ingot.data.sources.members import Member, packing_of
from ingot.data.sources.unpack import foreign
from ingot.data.sources.window import Window
from ingot.errors import DataError

# What may be read in vain behind records whose length is a lie, before the rest of the file is given up. Without this
# a file of short records that each claim 30 MB would be read millions of times over.
_MAX_WASTED_BYTES = 16 << 30
_PIECE_BYTES = 1 << 20
_READ_AHEAD_BYTES = 64 << 10  # that fastwarc may have taken before
_JUNK_BYTES = 1 << 20  # of what stands between records, looked at to tell padding from damage


_NESTED = re.compile(rb"\nWARC/[01]\.")


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


def read_records(path: Path, limits: Limits) -> Iterator[Record]:
    """All records of the WARC file `path` (plain, gzip or zstd) in order, in constant memory.

    Raises DataError when the file cannot be opened or holds no WARC record at all.
    """
    try:
        with Window(path) as file:
            if not file.size:
                raise _no_warc(path, "is empty")
            yield from _Reader(path, file, limits).records()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}",
            rule="a crawl file is a readable WARC or WET file",
            fix="check the path and its permissions",
        ) from None


def _no_warc(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} {found}",
        rule="a crawl file holds WARC records, plain, gzip or zstd (.warc .warc.gz .warc.zst .wet.gz); "
        "the first starts at offset 0",
        fix="leave this file out, or fetch it again; unpack other formats (zip, bzip2, xz, lz4) first; "
        "ARC files become WARC by `warcio recompress x.arc.gz x.warc.gz`",
    )


class _From:
    """The file from `start` on behind `prefix`, as ArchiveIterator reads it. Its position 0 is `shift` in the file:
    a dictionary is one at position 0 only."""

    def __init__(self, file: Window, start: int, prefix: bytes):
        self._file, self._position, self._prefix = file, start, prefix
        self.taken = 0  # bytes
        self.shift = start - len(prefix)

    def read(self, count: int) -> bytes:
        data, self._prefix = self._prefix, b""
        if not data:
            data = self._file.at(self._position, count)
            self._position += len(data)
            self.taken += len(data)
        return data

    def tell(self) -> int:
        return 0


class _Reader:
    def __init__(self, path: Path, file: Window, limits: Limits):
        self.path, self.file, self.limits = path, file, limits
        self.packing = packing_of(file, limits)
        self.wasted_bytes = 0

    def records(self) -> Iterator[Record]:
        start = self.packing.next_start(0)
        if start is None:
            raise _no_warc(self.path, self._instead())
        before = len(self.packing.prefix)
        if start > before and self.file.at(before, min(start, 1 << 20)).strip():
            yield Record(offset=0, problem=f"{start} bytes before the first record")
        while start is not None:
            start = yield from self._run(start)
            if start is not None and self.wasted_bytes > _MAX_WASTED_BYTES:
                yield Record(offset=start, problem="too much damage: the rest of the file is not read", cut=True)
                return

    def _instead(self) -> str:
        head = self.file.at(0, 4096)
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head, 64) or head
        return f"holds no WARC record: it starts with {head[:16]!r}{foreign(head)} at offset 0"

    def _run(self, start: int):
        """Yield records from `start` on until the end or damage. Returns where to go on, or None."""
        last: Record | None = None
        reason = ""
        # One that starts in the middle of a zstd file has to see the dictionary at its start.
        source = _From(self.file, start, self.packing.prefix if start else b"")
        try:
            for found in ArchiveIterator(source, parse_http=False, max_header_len=self.limits.header_bytes):  # pyright: ignore[reportArgumentType]
                # The header behind `last` could be read, so the length of `last` was right.
                if last:
                    yield last
                last = self._record(found, source.shift)
                if last.problem:
                    return (yield from self._skip(last, last.offset + 1))
                if len(last.block) > self.limits.block_bytes:
                    # The rest of it may inflate to anything: around, unless the only way to the next leads through.
                    if self.packing.alone(last.offset, last.record_id, found.content_length):
                        return (yield from self._around(last, found.content_length))
                    if bad := self._through(found, last, source):
                        return (yield from self._skip(bad, last.offset + 1))
        except OSError as error:
            reason = str(error)
        if reason:
            return (yield from self._after_error(start, last, reason))
        if last:
            yield last
        return (yield from self._behind(last, start))

    def _around(self, large: Record, length: int):
        end = self.packing.record_end(large.offset, length)
        honest = end == self.file.size or (end is not None and self.packing.opens(end))
        if not honest and self.packing.member(large.offset) is None:  # not packed: the length is all that there is
            self.wasted_bytes += len(large.block)
            lie = replace(large, block=b"", problem=f"Content-Length {length} leads to no record")
            return (yield from self._skip(lie, large.offset + 1))
        yield large
        return self.packing.next_start(large.offset + 1) if end is None else (yield from self._onward(end))

    def _through(self, found: WarcRecord, large: Record, source: _From) -> Record | None:
        """Read the rest of a record that others follow in one packed stream. Returns the record as a bad one if that
        is too much for its packed size, or less than announced."""
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
            # Garbage follows a record that holds other records: its length was a lie.
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
        # If that looks like a record, a fresh reader says what is wrong with it.
        return (yield from self._onward(end, reason))

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
                block = found.reader.read(wanted)  # asking for more than there is takes twice as long
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

    def _behind(self, last: Record | None, start: int):
        """Account for everything behind `last`, where fastwarc saw the end. Returns where to go on, or None.

        fastwarc reads a gzip member without its end, and takes an empty member, or one cut inside the header, for the
        end of the file.
        """
        if last is None:
            member = self.packing.member(start)
            return (yield from self._skip(Record(offset=start, problem=_unread(member)), start + 1))
        first = self.packing.member(last.offset)
        if first is None:  # not packed, or one zstd frame over all records, which has no offsets in it
            position = self.packing.record_end(last.offset, len(last.block)) or self.file.size
        elif first.whole:
            position = first.end
        else:
            return (yield from self._skip(Record(offset=last.offset, problem=_unread(first)), last.offset + 1))
        return (yield from self._onward(position))

    def _onward(self, position: int, reason: str = ""):
        """Account for what stands at `position`, where a record should. Returns where the next one starts, or None.

        reason: what the reader said of it, if it said something.
        """
        while position < self.file.size:
            if self.packing.opens(position):
                return position
            member = self.packing.member(position)
            if member is None or not member.whole:
                return (yield from self._leftover(position, member, reason))
            if not member.blank:
                yield Record(offset=position, problem="packed bytes that are no record")
            position = member.end
        return None

    def _leftover(self, position: int, member: Member | None, reason: str):
        """What is no whole member: padding, junk, or the beginning of what was cut off."""
        following = self.packing.next_start(position + 1)
        end = self.file.size if following is None else following
        if member or reason or self.file.at(position, min(end - position, _JUNK_BYTES)).strip(b"\0\r\n "):
            problem = _unread(member) if member else reason or f"{end - position} bytes that are no record"
            yield Record(offset=position, problem=problem, cut=following is None)
        return following


def _unread(member: Member | None) -> str:
    if member is None or member.whole:
        return "no record"
    return f"inflates to more than {member.bomb} times its size" if member.bomb else "the packed stream is not whole"
