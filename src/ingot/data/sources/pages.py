"""The headers of the pages of a Parquet column: how large each says it will be, before anything is decoded.

A page header is a Thrift struct in the compact protocol; of parquet.thrift, these fields are read: PageHeader 1 type,
2 uncompressed_page_size, 3 compressed_page_size, 5 data_page_header, 7 dictionary_page_header, 8 data_page_header_v2,
and in each of those three field 1, num_values.
"""

from dataclasses import dataclass
from typing import Any

from ingot.data.sources.limits import Limits
from ingot.data.sources.window import Window

_MAX_PAGE_BYTES = 256 << 20
_HEADER_STEPS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # statistics in a header hold values of any length
_MAX_PAGES = 1_000_000
_DICTIONARY_PAGE = 2
_VALUE_HEADERS = (5, 7, 8)
_MAX_DEPTH = 16


class BadPages(Exception):
    """The column cannot be read. rule: the part of the drop's name after "read."."""

    def __init__(self, rule: str, value: str):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


@dataclass(frozen=True, slots=True)
class Page:
    """size: decoded, as it says. values: how many it holds. dictionary: it holds the values that others point to."""

    size: int
    values: int
    dictionary: bool


def read_pages(file: Window, chunk: Any, limits: Limits) -> list[Page]:
    """The pages of a column chunk (pyarrow's ColumnChunkMetaData). Raises BadPages (too_large, bad_row_group)."""
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset and chunk.dictionary_page_offset < position:
        position = chunk.dictionary_page_offset
    end = position + chunk.total_compressed_size
    if not 0 < position <= end <= file.size:
        raise BadPages("bad_row_group", f"a column from byte {position} to {end} of {file.size}")
    pages = []
    while position < end:
        header_bytes, fields = _page_header(file, position)
        size, packed = fields.get(2, -1), fields.get(3, -1)
        values = next((fields[key].get(1, -1) for key in _VALUE_HEADERS if isinstance(fields.get(key), dict)), 0)
        if size < 0 or packed < 0 or values < 0 or position + header_bytes + packed > end:
            raise BadPages("bad_row_group", f"a page at byte {position} of {packed} bytes")
        large = size > limits.ratio_floor_bytes and size > limits.ratio * max(packed, 1)
        if size > _MAX_PAGE_BYTES or large:
            raise BadPages("too_large", f"a page at byte {position} of {packed} bytes, {size} decoded")
        pages.append(Page(size, values, fields.get(1) == _DICTIONARY_PAGE))
        if len(pages) > _MAX_PAGES:
            raise BadPages("too_large", f"over {_MAX_PAGES} pages in one column")
        position += header_bytes + packed
    return pages


def _page_header(file: Window, position: int) -> tuple[int, dict]:
    for step in _HEADER_STEPS:
        thrift = _Thrift(file.at(position, step))
        try:
            fields = thrift.struct(0)
        except IndexError:
            continue  # it goes on behind what was read
        return thrift.position, fields
    raise BadPages("bad_row_group", f"no page header at byte {position}")


class _Thrift:
    """Structs of the compact protocol; values that are no integers and structs are skipped. IndexError at the end."""

    def __init__(self, data: bytes):
        self.data, self.position = data, 0

    def struct(self, depth: int) -> dict:
        """Field number -> integer or dict."""
        self._check(depth)
        fields, number = {}, 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            value = self._value(head & 15, depth)
            if value is not None:
                fields[number] = value
        return fields

    def _byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise BadPages("bad_row_group", "a number of more than 64 bits in a page header")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self.data):
            raise IndexError

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # a boolean in the type itself
            return None
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 12:
            return self.struct(depth + 1)
        if kind == 3:
            self._skip(1)
        elif kind == 7:
            self._skip(8)
        elif kind == 8:
            self._skip(self._varint())
        elif kind in (9, 10):
            self._list(depth)
        else:  # maps do not occur in a page header
            raise BadPages("bad_row_group", f"type {kind} in a page header")
        return None

    def _check(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise BadPages("bad_row_group", "a page header nested too deep")

    def _list(self, depth: int) -> None:
        self._check(depth)
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        if count > len(self.data):
            raise IndexError
        for _ in range(count):
            if head & 15 in (1, 2):
                self._skip(1)
            else:
                self._value(head & 15, depth + 1)
