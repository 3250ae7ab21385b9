"""Read documents from Parquet files: this module checks the metadata, then pyarrow reads the rows.

pyarrow allocates the size that a page header states, and a page of a few kilobytes may state two gigabytes. Some
contradictions in a footer even end the process, because pyarrow's accessor of column metadata does not translate C++
exceptions. So the footer and the headers of all pages are first parsed here. A row group with a page beyond the limits
becomes one dropped document, and the number of rows in a batch is chosen so that the batch fits into memory.

Footer and page headers are Thrift structs in the compact protocol; field numbers are those of parquet.thrift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.data.sources.bounded import Limits, Window
from ingot.data.sources.text import Fields, dropped, row_document
from ingot.errors import DataError, require
from ingot.schema.corpus import Document, Drop

_MAX_FOOTER_BYTES = 32 << 20
_MAX_CHUNKS = 300_000
_MAX_PAGE_BYTES = 256 << 20
_MAX_PAGES = 1_000_000
_HEADER_STEPS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # sizes to try: statistics in a header can have any length
_MAX_DEPTH = 16
# The fields to keep; all others are skipped. int, bytes, [element] for a list, {field number: kind} for a struct.
_COLUMN_META = {3: [bytes], 7: int, 9: int, 11: int}  # path_in_schema, total_compressed_size, data and dictionary page
_FOOTER = {4: [{1: [{3: _COLUMN_META}], 3: int}]}  # row_groups: columns: meta_data; num_rows
_PAGE = {1: int, 2: int, 3: int, 5: {1: int}, 7: {1: int}, 8: {1: int}}  # type, sizes; num_values of three page kinds
_VALUE_HEADERS = (5, 7, 8)
_DICTIONARY_PAGE = 2


class BadParquet(Exception):
    """A part of the file cannot be read. rule: the drop rule without its prefix "read."; value: what was found."""

    def __init__(self, rule: str, value: str):
        super().__init__(rule, value)
        self.rule, self.value = rule, value


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """The column `path` of one row group, at the bytes [start, end) of the file."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: int
    chunks: tuple[ColumnChunk, ...]


@dataclass(frozen=True, slots=True)
class PageHeader:
    """A page as its header describes it.

    size: decoded bytes. values: number of values. dictionary: True for the page with the dictionary of other pages.
    """

    size: int
    values: int
    dictionary: bool


def read_footer(file: Window) -> list[RowGroup]:
    """Return the row groups that the footer lists. Raises BadParquet (truncated_file, too_large)."""
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


def _group(group: dict) -> RowGroup:
    chunks = []
    for column in group.get(1, []):
        meta = column.get(3, {})
        start, first = meta.get(9, 0), meta.get(11, 0)
        start = first if 0 < first < start else start
        path = b".".join(meta.get(3, [])).decode("utf-8", "replace")
        chunks.append(ColumnChunk(path, start, start + meta.get(7, 0)))
    return RowGroup(max(group.get(3, 0), 0), tuple(chunks))


def read_pages(file: Window, chunk: ColumnChunk, limits: Limits) -> list[PageHeader]:
    """Return the page headers of a column chunk. Raises BadParquet (too_large, bad_row_group)."""
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
        pages.append(PageHeader(size, values, fields.get(1) == _DICTIONARY_PAGE))
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
            continue  # the header is longer than this step
        except BadParquet as bad:
            raise BadParquet("bad_row_group", f"the page header at byte {position}: {bad.value}") from None
        return thrift.position, fields
    raise BadParquet("bad_row_group", f"no page header at byte {position}")


class _Thrift:
    """A parser of Thrift's compact protocol. Raises IndexError if the data ends early, BadParquet for invalid data."""

    def __init__(self, data: bytes):
        self.data, self.position = data, 0

    def struct(self, wanted: dict, depth: int = 0) -> dict:
        """Return field number -> value for the `wanted` fields that are present and have the wanted kind."""
        self._check(depth)
        fields, number = {}, 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            value = self._value(head & 15, wanted.get(number), depth)
            if value is not None:
                fields[number] = value
        return fields

    def _value(self, kind: int, wanted: Any, depth: int) -> Any:
        if kind in (1, 2):  # the type of a boolean is its value
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
        if count > len(self.data) - self.position:  # every element has at least one byte
            raise IndexError
        element = wanted[0] if isinstance(wanted, list) else None
        if kind in (1, 2):
            self._skip(count)
            return None
        values = [value for _ in range(count) if (value := self._value(kind, element, depth)) is not None]
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


_MAX_ROWS = 1024  # most rows in a batch
_BATCH_BYTES = 192 << 20  # most decoded bytes in a batch
_MAGIC = b"PAR1"


def read_parquet(
    path: Path, name: str, source: str, limits: Limits, fields: Fields
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield one pair (document, drop or None) per row.

    Drop rules: read.bad_row (a row without text), empty_body, too_large (a row; or a whole row group, which gives one
    pair), bad_row_group (damage; reading continues with the next group), truncated_file (no footer).
    Raises DataError for a file that is not Parquet, and for a file without the column that `fields.text` names.
    """
    with Window(path) as file:
        if file.at(0, 4) != _MAGIC:
            raise DataError(
                "E-PARQUET-MAGIC",
                f"{path} is not a Parquet file: it starts with {file.at(0, 4)!r}",
                rule="a Parquet file begins and ends with PAR1",
                fix="leave the file out, fetch it again, or name its format",
                path=str(path),
            )
        try:
            groups = read_footer(file)
        except BadParquet as bad:
            yield dropped(name, source, bad.rule, bad.value, "file")
            return
        yield from _RowReader(path, name, source, fields, limits, file).pairs(groups)


class _RowReader:
    def __init__(self, path: Path, name: str, source: str, fields: Fields, limits: Limits, file: Window):
        self.path, self.name, self.source, self.fields, self.limits = path, name, source, fields, limits
        self.file = file
        self.row = 0

    def pairs(self, groups: list[RowGroup]) -> Iterator[tuple[Document, Drop | None]]:
        parquet = require("pyarrow.parquet", "data")
        try:
            # A small buffer makes pyarrow read pages one by one instead of whole column chunks.
            opened = parquet.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False)
            schema = opened.schema_arrow
        except Exception as error:  # pyarrow raises exceptions of many types; the file becomes one dropped document
            yield self._drop("truncated_file", f"the footer cannot be read: {_short(error)}", "file")
            return
        with opened:
            columns = self._columns(schema)
            for index, group in enumerate(groups):
                first = self.row
                yield from self._group(opened, index, group, columns)
                self.row = first + group.rows
            if not self.row:
                yield self._drop("empty_body", "no rows", "file")

    def _group(
        self, opened: Any, index: int, group: RowGroup, columns: list[str]
    ) -> Iterator[tuple[Document, Drop | None]]:
        if not group.rows:
            return
        first, rule, reason = self.row, "", ""
        try:
            count = self._rows_at_once(group, columns)
            for batch in opened.iter_batches(count, row_groups=[index], columns=columns, use_threads=False):
                yield from self._batch(batch)
        except BadParquet as bad:
            rule, reason = bad.rule, bad.value
        except Exception as error:
            rule, reason = "bad_row_group", _short(error)
        read = self.row - first
        if rule or read != group.rows:
            value = f"row group {index}, {read} of {group.rows} rows read: {reason or 'there are no more, or too many'}"
            yield self._drop(rule or "bad_row_group", value, f"group-{index}")

    def _columns(self, schema: Any) -> list[str]:
        """Return the names of the columns to read. Raises DataError if the text column is missing."""
        present = [name for name in self.fields.names if _in_schema(schema, name)]
        if self.fields.text not in present:
            raise DataError(
                "E-PARQUET-COLUMN",
                f"{self.path} has no column {self.fields.text!r}; its columns are {', '.join(schema.names[:20])}",
                rule="the text of a document is one column of strings",
                fix="name the column: --source NAME FILE text=COLUMN (a dot selects a field of a struct: meta.text)",
                path=str(self.path),
                column=self.fields.text,
                columns=list(schema.names[:20]),
            )
        return present

    def _rows_at_once(self, group: RowGroup, columns: list[str]) -> int:
        """Return a number of rows of `group` that are certain to fit into _BATCH_BYTES. Raises BadParquet."""
        wanted = [c for c in group.chunks if any(c.path == name or c.path.startswith(name + ".") for name in columns)]
        pages = [read_pages(self.file, chunk, self.limits) for chunk in wanted]
        count = _MAX_ROWS
        while count > 1 and sum(_most_bytes(column, count) for column in pages) > _BATCH_BYTES:
            count //= 2
        return count

    def _batch(self, batch: Any) -> Iterator[tuple[Document, Drop | None]]:
        columns = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
        for index in range(batch.num_rows):
            number, self.row = self.row, self.row + 1
            try:
                row = {name: _text(column[index].as_py()) for name, column in columns.items()}
            except (UnicodeDecodeError, ValueError) as error:
                yield self._drop("bad_row", f"row {number}: {_short(error)}", f"row-{number}")
                continue
            yield row_document(row, number, self.name, self.source, self.fields, self.limits)

    def _drop(self, rule: str, value: str, record_id: str):
        return dropped(self.name, self.source, rule, value, record_id)


def _most_bytes(pages: list[PageHeader], count: int) -> int:
    """Return an upper bound of the decoded bytes of `count` consecutive rows of a column."""
    dictionary = max((page.size for page in pages if page.dictionary), default=0)
    pages = [page for page in pages if not page.dictionary]
    most = total = values = first = 0
    for page in pages:
        total, values = total + page.size, values + page.values
        # `count` rows can span these pages only if all inner pages and one value of each outer page fit into them.
        while pages[first] is not page and values - pages[first].values - page.values + 2 > count:
            total, values = total - pages[first].size, values - pages[first].values
            first += 1
        most = max(most, total)
    return most + count * dictionary


def _in_schema(schema: Any, name: str) -> bool:
    """Return True if `name` is a column, or a dotted path through structs to a field."""
    if name in schema.names:
        return True
    first, *rest = name.split(".")
    if first not in schema.names:
        return False
    kind = schema.field(first).type
    for part in rest:
        if not hasattr(kind, "get_field_index") or kind.get_field_index(part) < 0:
            return False
        kind = kind.field(part).type
    return True


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:120]
