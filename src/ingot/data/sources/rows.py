"""Rows of a table to documents: which column means what, and what a row needs to be one."""

from dataclasses import dataclass
from typing import Any

from ingot.data.sources.limits import Limits
from ingot.schema.document import Document, Drop, document_id

STAGE = "read"
_MAX_NAME = 2048  # of the characters of an id, URL or language: longer ones are no names


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which keys of JSON lines, or columns of Parquet, mean what. "meta.url" is the key "url" of the object "meta".

    A row without url, id or language is a document all the same: its id is then the number of the row.
    """

    text: str = "text"
    url: str = "url"
    id: str = "id"
    language: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.text, self.url, self.id, self.language) if name)


def pick(row: Any, name: str) -> Any:
    """The value that `name` stands for in `row`, None if there is none."""
    if not name or not isinstance(row, dict):
        return None
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    return pick(row.get(first), rest) if dot else None


def dropped(file: str, source: str, rule: str, value: str, record_id: str = "", url: str = ""):
    """A pair (document without text, drop) for what could not be read."""
    record_id = record_id or value
    document = Document(document_id(file, record_id, url), url, source, file, record_id)
    return document, Drop(STAGE, f"{STAGE}.{rule}", value[:200])


def row_document(
    row: Any, number: int, file: str, source: str, fields: Fields, limits: Limits
) -> tuple[Document, Drop | None]:
    """The document of row `number` (from 0). Rules: read.bad_row, empty_body, too_large."""
    text, record_id, url = pick(row, fields.text), pick(row, fields.id), pick(row, fields.url)
    record_id = str(record_id)[:_MAX_NAME] if isinstance(record_id, str | int) and record_id != "" else f"row-{number}"
    url = _unicode(url) if isinstance(url, str) and 0 < len(url) <= _MAX_NAME else f"file:{file}!row-{number}"
    record_id = _unicode(record_id)

    def drop(rule: str, value: str):
        return dropped(file, source, rule, f"row {number}: {value}", record_id, url)

    if not isinstance(row, dict):
        return drop("bad_row", f"a {_json_name(row)}, not an object")
    if not isinstance(text, str):
        return drop("bad_row", f"{fields.text!r} is {'missing' if text is None else f'a {_json_name(text)}'}")
    if not text.strip():
        return drop("empty_body", "no text")
    raw = _unicode(text).encode()
    if len(raw) > limits.body_bytes:
        return drop("too_large", f"{len(raw)} bytes of text")
    document = Document(
        id=document_id(file, record_id, url),
        url=url,
        source=source,
        file=file,
        record_id=record_id,
        raw=raw,
        content_type="text/plain",
        charset="utf-8",
    )
    language = pick(row, fields.language)
    if isinstance(language, str) and len(language) <= _MAX_NAME:
        document.language = language.strip().lower()
    return document, None


def _unicode(text: str) -> str:
    """Escaped surrogate pairs joined, and single ones, which UTF-8 cannot spell, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _json_name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
