"""A format of inputs: SQLite files, one document per row of a table."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ingot.plugins.source import FORMATS, InputFormat, ReadLimits
from ingot.schema.corpus import Document, Drop, document_id


@dataclass(frozen=True, kw_only=True)
class SqliteSettings:
    """table: the table to read. text, url: its columns with the text and the URL; url = "": rows have none."""

    table: str
    text: str = "text"
    url: str = "url"


def read_sqlite(
    path: Path, name: str, source: str, limits: ReadLimits, settings: SqliteSettings
) -> Iterator[tuple[Document, Drop | None]]:
    # Read-only, and without files beside the database. The cursor holds one row, so memory is constant.
    place = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    text, url, table = (column_name(one) for one in (settings.text, settings.url, settings.table))
    with closing(sqlite3.connect(place, uri=True)) as database:
        query = f"SELECT rowid, {text}, {url if settings.url else 'NULL'} FROM {table} ORDER BY rowid"
        for row, body, address in database.execute(query):
            record = f"row-{row}"
            address = address if isinstance(address, str) and address else f"file:{name}!{record}"
            document = Document(
                id=document_id(name, record, address),
                url=address,
                source=source,
                file=name,
                record_id=record,
                content_type="text/plain",
                charset="utf-8",
            )
            if isinstance(body, str) and body.strip():
                document.raw = body.encode("utf-8", "replace")
                yield document, None
            else:
                yield document, Drop("read", "read.empty_body", f"row {row}: no text")


def column_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


FORMATS.register(
    InputFormat(name="sqlite", read=read_sqlite, settings=SqliteSettings, endings=("sqlite", "sqlite3", "db"))
)
