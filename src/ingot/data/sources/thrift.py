"""What a Parquet file says of itself, read before pyarrow decodes anything: row groups, columns, sizes of pages.

pyarrow reserves what a page header states, and ends the whole process over some contradictions in a footer (its
accessor for a column's metadata does not translate C++ exceptions). So both are read here first. They are Thrift
structs in the compact protocol; field numbers are those of parquet.thrift.
"""

from dataclasses import dataclass
from typing import Any

from ingot.data.sources.limits import Limits
from ingot.data.sources.window import Window

_MAX_FOOTER_BYTES = 32 << 20
_MAX_CHUNKS = 300_000
_MAX_PAGE_BYTES = 256 << 20
_MAX_PAGES = 1_000_000
_HEADER_STEPS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # statistics in a header hold values of any length
_MAX_DEPTH = 16
# Which fields are kept, everything else is skipped: int, bytes, [of what] for a list, {number: what} for a struct.
_COLUMN_META = {3: [bytes], 7: int, 9: int, 11: int}  # path_in_schema, total_compressed_size, data and dictionary page
_FOOTER = {4: [{1: [{3: _COLUMN_META}], 3: int}]}  # row_groups: columns: meta_data; num_rows
_PAGE = {1: int, 2: int, 3: int, 5: {1: int}, 7: {1: int}, 8: {1: int}}  # type, sizes; num_values of three page kinds
_VALUE_HEADERS = (5, 7, 8)
_DICTIONARY_PAGE = 2


class BadParquet(Exception):
    """A part of the file cannot be read. rule: the part of the drop's name after "read."."""

    def __init__(self, rule: str, value: str):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of a row group: bytes `start` to `end` of the file."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    rows: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """size: decoded, as it says. values: how many it holds. dictionary: it holds the values that others point to."""

    size: int
    values: int
    dictionary: bool


def read_footer(file: Window) -> list[Group]:
    """The row groups. Raises BadParquet (truncated_file, too_large)."""
    end = file.at(max(file.size - 8, 0), 8)
    size = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or size + 12 > file.size:
        raise BadParquet("truncated_file", f"no footer at byte {file.size}")
    if size > _MAX_FOOTER_BYTES:
        raise BadParquet("too_large", f"a footer of {size} bytes")
    try:
        footer = _Thrift(file.at(file.size - 8 - size, size)).struct(_FOOTER)
    except (IndexError, BadParquet):
        raise BadParquet("truncated_file", "the footer is damaged") from None
    groups = footer.get(4, [])
    if sum(len(group.get(1, [])) for group in groups) > _MAX_CHUNKS:
        raise BadParquet("too_large", f"more than {_MAX_CHUNKS} column chunks")
    return [_group(group) for group in groups]


def _group(group: dict) -> Group:
    chunks = []
    for column in group.get(1, []):
        meta = column.get(3, {})
        start, first = meta.get(9, 0), meta.get(11, 0)
        start = first if 0 < first < start else start
        path = b".".join(meta.get(3, [])).decode("utf-8", "replace")
        chunks.append(Chunk(path, start, start + meta.get(7, 0)))
    return Group(max(group.get(3, 0), 0), tuple(chunks))


def read_pages(file: Window, chunk: Chunk, limits: Limits) -> list[Page]:
    """The pages of a column. Raises BadParquet (too_large, bad_row_group)."""
    if not 0 < chunk.start <= chunk.end <= file.size:
        raise BadParquet("bad_row_group", f"a column from byte {chunk.start} to {chunk.end} of {file.size}")
    pages, position = [], chunk.start
    while position < chunk.end:
        header_bytes, fields = _page_header(file, position)
        size, packed = fields.get(2, -1), fields.get(3, -1)
        values = next((fields[key].get(1, -1) for key in _VALUE_HEADERS if key in fields), 0)
        if size < 0 or packed < 0 or values < 0 or position + header_bytes + packed > chunk.end:
            raise BadParquet("bad_row_group", f"a page at byte {position} of {packed} bytes")
        large = size > limits.ratio_floor_bytes and size > limits.ratio * max(packed, 1)
        if size > _MAX_PAGE_BYTES or large:
            raise BadParquet("too_large", f"a page at byte {position} of {packed} bytes, {size} decoded")
        pages.append(Page(size, values, fields.get(1) == _DICTIONARY_PAGE))
        if len(pages) > _MAX_PAGES:
            raise BadParquet("too_large", f"over {_MAX_PAGES} pages in one column")
        position += header_bytes + packed
    return pages


def _page_header(file: Window, position: int) -> tuple[int, dict]:
    for step in _HEADER_STEPS:
        thrift = _Thrift(file.at(position, step))
        try:
            fields = thrift.struct(_PAGE)
        except IndexError:
            continue  # it goes on behind what was read
        except BadParquet as bad:
            raise BadParquet("bad_row_group", f"the page header at byte {position}: {bad.value}") from None
        return thrift.position, fields
    raise BadParquet("bad_row_group", f"no page header at byte {position}")


class _Thrift:
    """Structs of the compact protocol. IndexError where the data ends, BadParquet for what it cannot be."""

    def __init__(self, data: bytes):
        self.data, self.position = data, 0

    def struct(self, wanted: dict, depth: int = 0) -> dict:
        """Field number -> value, of the `wanted` fields that are there and of the wanted kind."""
        self._check(depth)
        fields, number = {}, 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            value = self._value(head & 15, wanted.get(number), depth)
            if value is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, wanted: Any, depth: int) -> Any:
        if kind in (1, 2):  # a boolean stands in the type itself
            return None
        if kind in (4, 5, 6):
            value = self._integer()
            return value if wanted is int else None
        if kind == 12:
            value = self.struct(wanted if isinstance(wanted, dict) else {}, depth + 1)
            return value if isinstance(wanted, dict) else None
        if kind in (9, 10):
            return self._list(wanted, depth + 1)
        if kind == 8:
            size = self._varint()
            start = self.position
            self._skip(size)
            return self.data[start : start + size] if wanted is bytes else None
        if kind not in (3, 7):
            raise BadParquet("bad_row_group", f"type {kind} in metadata, which it has not")
        self._skip(1 if kind == 3 else 8)
        return None

    def _list(self, wanted: Any, depth: int) -> list | None:
        self._check(depth)
        head = self._byte()
        count, kind = head >> 4 if head >> 4 < 15 else self._varint(), head & 15
        if count > len(self.data) - self.position:  # every element has a byte at least
            raise IndexError
        of = wanted[0] if isinstance(wanted, list) else None
        if kind in (1, 2):
            self._skip(count)
            return None
        values = [value for _ in range(count) if (value := self._value(kind, of, depth)) is not None]
        return values if isinstance(wanted, list) else None

    def _check(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise BadParquet("bad_row_group", "metadata nested too deep")

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
                raise BadParquet("bad_row_group", "a number of more than 64 bits in metadata")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self.data):
            raise IndexError
