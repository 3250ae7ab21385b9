"""The packing of a crawl file: one gzip member or zstd frame per record, or no compression.

The reader of records (records.py) uses this module to find the next record after damage that fastwarc cannot read, and
after the last record to check that nothing was left unread. Stated sizes are not trusted: gzip members are inflated in
pieces that are discarded, and zstd frames are walked block by block (RFC 8878) without being decoded.

A zstd file may begin with a skippable frame that holds the dictionary of all other frames (WARC-zstd 1.0 of the IIPC).
"""

import io
import re
import zlib
from dataclasses import dataclass
from typing import Protocol

from fastwarc.stream_io import ZstdReader

from ingot.data.sources.bounded import Limits, Window

GZIP_MAGIC = b"\x1f\x8b\x08"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_DICTIONARY = b"\x5d\x2a\x4d\x18"
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_GZIP_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]")
_ZSTD_FRAME = re.compile(re.escape(ZSTD_MAGIC))
_PLAIN_RECORD = re.compile(rb"(?<![^\n])WARC/[01]\.\d\d?\r?\n")
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_BLANK = b"\0\t\r\n "
_STEP_BYTES = 1 << 20
_HEAD_BYTES, _ZSTD_HEAD_BYTES = 4096, 160 << 10
_MAX_DICTIONARY_BYTES = 16 << 20
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Member:
    """A gzip member or zstd frame.

    end: the offset after the member. whole: the member is complete. blank: it holds only white space. bomb: the ratio
    limit that the member exceeds, or 0; if it does, inflating stopped, so `end` is inside the member. size: inflated
    bytes, 0 if not known.
    """

    end: int
    whole: bool
    blank: bool = False
    bomb: int = 0
    size: int = 0


class Packing(Protocol):
    """A way to pack records into a file. prefix: bytes that must be read before starting in the middle of the file."""

    prefix: bytes

    def next_start(self, offset: int) -> int | None:
        """Return the offset of the first record at or after `offset`, None if there is none."""
        ...

    def starts_record(self, offset: int) -> bool:
        """Return True if a record starts at `offset`."""
        ...

    def record_end(self, offset: int, block_bytes: int) -> int | None:
        """Return the offset after the record at `offset`. block_bytes: the size of the record's block.

        Return None if the packing does not show where a single record ends, or the file ends before that.
        """
        ...

    def is_only_record(self, offset: int, record_id: str, block_bytes: int) -> bool:
        """Return True if the record that a reader reported at `offset` is the only one in its member.

        For the second and later records of a member, the reader reports a wrong offset.
        """
        ...

    def member(self, offset: int) -> Member | None:
        """Return the member that starts at `offset`, None if there is none."""
        ...


def packing_of(file: Window, limits: Limits) -> Packing:
    head = file.at(0, 4)
    if head[:3] == GZIP_MAGIC:
        return Gzip(file, limits)
    if head == ZSTD_MAGIC or _SKIPPABLE.match(head):
        return Zstd(file)
    return Plain(file, limits)


class Plain:
    prefix = b""

    def __init__(self, file: Window, limits: Limits):
        self.file, self.header_bytes = file, limits.header_bytes

    def next_start(self, offset: int) -> int | None:
        return next(self.file.search(_PLAIN_RECORD, offset), None)

    def starts_record(self, offset: int) -> bool:
        return next(self.file.search(_PLAIN_RECORD, offset, offset + 1), None) == offset

    def record_end(self, offset: int, block_bytes: int) -> int | None:
        head = _HEADER_END.search(self.file.at(offset, self.header_bytes + 4))
        end = offset + (head.end() if head else 0) + block_bytes
        after = self.file.at(end, 16)
        return end + len(after) - len(after.lstrip(b"\r\n")) if end <= self.file.size else None

    def is_only_record(self, offset: int, record_id: str, block_bytes: int) -> bool:
        return True

    def member(self, offset: int) -> Member | None:
        return None


class Gzip:
    prefix = b""

    def __init__(self, file: Window, limits: Limits):
        self.file, self.limits = file, limits

    def next_start(self, offset: int) -> int | None:
        return next((start for start in self.file.search(_GZIP_MEMBER, offset) if self.starts_record(start)), None)

    def starts_record(self, offset: int) -> bool:
        try:
            head = zlib.decompressobj(31).decompress(self.file.at(offset, _HEAD_BYTES), 64)
        except zlib.error:
            return False  # other data that happens to hold the magic bytes
        return head.lstrip().startswith(b"WARC/")

    def record_end(self, offset: int, block_bytes: int) -> int | None:
        member = self.member(offset)
        return member.end if member and member.whole else None

    def is_only_record(self, offset: int, record_id: str, block_bytes: int) -> bool:
        try:
            head = zlib.decompressobj(31).decompress(self.file.at(offset, _HEAD_BYTES), self.limits.header_bytes)
        except zlib.error:
            return False
        member = self.member(offset) if record_id.encode("utf-8", "replace") in head else None
        end = _HEADER_END.search(head)
        header_bytes = end.end() if end else len(head)
        return member is not None and member.size <= header_bytes + block_bytes + len(b"\r\n\r\n")

    def member(self, offset: int) -> Member | None:
        if self.file.at(offset, 3) != GZIP_MAGIC:
            return None
        stream, position, step = zlib.decompressobj(31), offset, 4096
        size, blank = 0, True
        try:
            while not stream.eof and (piece := self.file.at(position, step)):
                position += len(piece)
                step = min(step * 4, _STEP_BYTES)
                while piece and not stream.eof:
                    data = stream.decompress(piece, _STEP_BYTES)
                    size, blank = size + len(data), blank and not data.strip(_BLANK)
                    if size > self.limits.ratio_floor_bytes and size > self.limits.ratio * (position - offset):
                        return Member(position, whole=False, bomb=self.limits.ratio)
                    piece = stream.unconsumed_tail
        except zlib.error:
            return Member(position, whole=False)
        return Member(position - len(stream.unused_data), stream.eof, blank and stream.eof, size=size)


class Zstd:
    def __init__(self, file: Window):
        self.file = file
        self.prefix = self._dictionary_frame()

    def _dictionary_frame(self) -> bytes:
        frame = self.member(0) if self.file.at(0, 4) == _ZSTD_DICTIONARY else None
        if frame is None or not frame.whole or frame.end > _MAX_DICTIONARY_BYTES:
            return b""
        return self.file.at(0, frame.end)

    def next_start(self, offset: int) -> int | None:
        return next((start for start in self.file.search(_ZSTD_FRAME, offset) if self.starts_record(start)), None)

    def starts_record(self, offset: int) -> bool:
        # The opening of the record is in the first block, which has at most 128 KiB.
        opening = self.prefix + self.file.at(offset, _ZSTD_HEAD_BYTES)
        try:
            head = ZstdReader(io.BytesIO(opening)).read(64)
        except OSError:
            return False
        return head.lstrip().startswith(b"WARC/")

    def record_end(self, offset: int, block_bytes: int) -> int | None:
        member = self.member(offset)
        return member.end if member and member.whole else None

    def is_only_record(self, offset: int, record_id: str, block_bytes: int) -> bool:
        # Frames are not decoded here: a frame that another frame follows is assumed to hold one record.
        return self.next_start(offset + 1) is not None

    def member(self, offset: int) -> Member | None:
        head = self.file.at(offset, 18)
        if _SKIPPABLE.match(head):
            end = offset + 8 + int.from_bytes(head[4:8], "little")
            return Member(min(end, self.file.size), len(head) >= 8 and end <= self.file.size, blank=True)
        if head[:4] != ZSTD_MAGIC:
            return None
        if len(head) < 6:
            return Member(self.file.size, whole=False)
        flags = head[4]
        single_segment = flags >> 5 & 1
        size_bytes = _CONTENT_SIZE_BYTES[flags >> 6] or single_segment
        position = offset + 5 + (not single_segment) + _DICTIONARY_ID_BYTES[flags & 3] + size_bytes
        empty = True
        while len(block := self.file.at(position, 3)) == 3:
            header = int.from_bytes(block, "little")
            last, kind, size = header & 1, header >> 1 & 3, header >> 3
            if kind == 3:
                return Member(position, whole=False)
            position += 3 + (1 if kind == 1 else size)
            empty = empty and not size
            if last:
                end = position + (4 if flags >> 2 & 1 else 0)
                return Member(min(end, self.file.size), end <= self.file.size, blank=empty)
        return Member(self.file.size, whole=False)
