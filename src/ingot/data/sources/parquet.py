"""Parquet files row by row, by pyarrow, with only the columns that are needed.

pyarrow believes the sizes that a file states, and a page of a few kilobytes may state two gigabytes. So the headers of
all pages are read first (thrift.py); a row group with a page beyond the limits is left out by name, and only so many
rows are read at once as surely fit into memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.data.sources.limits import Limits
from ingot.data.sources.rows import Fields, dropped, row_document
from ingot.data.sources.thrift import BadParquet, Group, Page, read_footer, read_pages
from ingot.data.sources.window import Window
from ingot.errors import DataError, require
from ingot.schema.document import Document, Drop

_MAX_ROWS = 1024  # read at once
_BATCH_BYTES = 192 << 20  # of them, decoded
_MAGIC = b"PAR1"


def read_parquet(
    path: Path, name: str, source: str, fields: Fields, limits: Limits
) -> Iterator[tuple[Document, Drop | None]]:
    """One pair per row. Rules: read.bad_row (no text in it), empty_body, too_large (a row, or a whole row group, which
    gives one pair), bad_row_group (damage; the next group is read), truncated_file (no footer).

    Raises DataError for what is no Parquet file, and for one without the column that `fields.text` names.
    """
    with Window(path) as file:
        if file.at(0, 4) != _MAGIC:
            raise _no_parquet(path, f"starts with {file.at(0, 4)!r}")
        try:
            groups = read_footer(file)
        except BadParquet as bad:
            yield dropped(name, source, bad.rule, bad.value, "file")
            return
        yield from _Reader(path, name, source, fields, limits, file).pairs(groups)


class _Reader:
    def __init__(self, path: Path, name: str, source: str, fields: Fields, limits: Limits, file: Window):
        self.path, self.name, self.source, self.fields, self.limits = path, name, source, fields, limits
        self.file = file
        self.row = 0

    def pairs(self, groups: list[Group]) -> Iterator[tuple[Document, Drop | None]]:
        parquet = require("pyarrow.parquet", "data")
        try:
            # A small buffer makes pyarrow read pages one by one instead of whole column chunks.
            opened = parquet.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False)
            schema = opened.schema_arrow
        except Exception as error:  # whatever pyarrow cannot take is one drop, by name
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
        self, opened: Any, index: int, group: Group, columns: list[str]
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
        """The paths of the columns to read. Raises DataError without the one of the text."""
        present = [name for name in self.fields.names if _in_schema(schema, name)]
        if self.fields.text not in present:
            raise DataError(
                f"{self.path} has no column {self.fields.text!r}, but {', '.join(schema.names[:20])}",
                rule="the text of a document is one column of strings",
                fix="say which one: --source NAME FILE text=COLUMN (dots lead into structs: meta.text)",
            )
        return present

    def _rows_at_once(self, group: Group, columns: list[str]) -> int:
        """How many rows of `group` surely fit into _BATCH_BYTES. Raises BadParquet."""
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


def _most_bytes(pages: list[Page], count: int) -> int:
    """At most how many bytes `count` neighbouring rows of a column take."""
    dictionary = max((page.size for page in pages if page.dictionary), default=0)
    pages = [page for page in pages if not page.dictionary]
    most = total = values = first = 0
    for page in pages:
        total, values = total + page.size, values + page.values
        # What lies between has to fit, and one value of either end.
        while pages[first] is not page and values - pages[first].values - page.values + 2 > count:
            total, values = total - pages[first].size, values - pages[first].values
            first += 1
        most = max(most, total)
    return most + count * dictionary


def _in_schema(schema: Any, name: str) -> bool:
    """Whether `name` is a column, or leads through structs to one."""
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


def _no_parquet(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} is no Parquet file: it {found}",
        rule="a Parquet file begins and ends with PAR1",
        fix="leave it out, fetch it again, or name its format",
    )
