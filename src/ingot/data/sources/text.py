"""Read plain text (one document per file) and JSON lines (one document per line); files may be gzip or zstd.

The readers of other formats also use `row_document` and `dropped`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.data.sources.bounded import Limits
from ingot.data.sources.sniff import page_type
from ingot.data.sources.unpack import BadStream, Unpacked, lines
from ingot.errors import DataError
from ingot.schema.corpus import Document, Drop, document_id

STAGE = "read"
_FIRST_ROWS = 100  # without a text, from which the names of the columns are taken for the message
_MAX_NAME = 2048  # characters of an id, URL or language; longer values are ignored


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The keys of JSON lines, or columns of Parquet, that hold each part of a document.

    "meta.url" means the key "url" of the object "meta". Only the text is required: a row without an id is identified by
    its number.
    """

    text: str = "text"
    url: str = "url"
    id: str = "id"
    language: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.text, self.url, self.id, self.language) if name)


def pick(row: Any, name: str) -> Any:
    """Return the value at the dotted path `name` of `row`; None if there is none."""
    if not name or not isinstance(row, dict):
        return None
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    return pick(row.get(first), rest) if dot else None


def has_field(row: dict, name: str) -> bool:
    """Return whether `row` has the dotted path `name`, with any value."""
    first, dot, rest = name.partition(".")
    return name in row or (bool(dot) and isinstance(row.get(first), dict) and has_field(row[first], rest))


def dropped(file: str, source: str, rule: str, value: str, record_id: str = "", url: str = ""):
    """Return (document without text, Drop) for a record that cannot be read. rule: the rule's name after "read."."""
    record_id = record_id or value
    document = Document(document_id(file, record_id, url), url, source, file, record_id)
    return document, Drop(STAGE, f"{STAGE}.{rule}", value[:200])


def row_document(
    row: Any, number: int, file: str, source: str, fields: Fields, limits: Limits
) -> tuple[Document, Drop | None]:
    """Return the pair (document, drop or None) of row `number` (from 0).

    Drop rules: read.bad_row, empty_body, too_large.
    """
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
    """Return `text` with surrogate pairs joined, and lone surrogates, which UTF-8 cannot encode, replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _json_name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def read_text(
    path: Path, name: str, source: str, limits: Limits, settings: None = None
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield a single pair (document, drop or None) for a text file.

    Drop rules: read.too_large, not_text, empty_body, truncated_file, bad_stream.
    """
    url = f"file:{name}"
    try:
        with Unpacked(path, limits) as stream:
            raw = stream.exactly(limits.body_bytes + 1)
    except BadStream as bad:
        yield dropped(name, source, bad.rule, bad.value, "file", url)
        return
    if len(raw) > limits.body_bytes:
        yield dropped(name, source, "too_large", f"over {limits.body_bytes} bytes", "file", url)
        return
    if not page_type(raw, "text/plain", "")[0]:
        yield dropped(name, source, "not_text", page_type(raw, "text/plain", "")[1], "file", url)
        return
    if not raw.strip():
        yield dropped(name, source, "empty_body", "no text", "file", url)
        return
    document = Document(document_id(name, "file", url), url, source, name, "file", raw=raw, content_type="text/plain")
    yield document, None


def read_jsonl(
    path: Path, name: str, source: str, limits: Limits, fields: Fields
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield one pair (document, drop or None) per line that is not blank.

    Drop rules: read.bad_row (not a JSON object, or an object without text), empty_body, too_large; truncated_file and
    bad_stream if the file cannot be read further. Raises DataError for a file that is one JSON array, which could only
    be parsed as a whole, and, at its end, for a file with objects of which none has a key for the text. Until then its
    rows are yielded like any others: held back, they would need memory without limit, and one row would seem to take
    as long as the file (Attempt.at).
    """
    rows, missing, has_text, keys = 0, 0, False, dict[str, None]()
    ending = None
    try:
        with Unpacked(path, limits) as stream:
            for number, (line, size) in enumerate(lines(stream, limits.block_bytes)):
                if size > limits.block_bytes:
                    yield dropped(name, source, "too_large", f"row {number}: a line of {size} bytes", f"row-{number}")
                elif line.strip():
                    if not rows and _opens_array(line):
                        raise DataError(
                            "E-JSONL-ARRAY",
                            f"{path} is one JSON array, or JSON spread over several lines",
                            rule="JSON Lines files have one object per line",
                            fix=f"convert it: jq -c '.[]' {path.name} > {path.name.split('.')[0]}.jsonl",
                            path=str(path),
                        )
                    pair, row = _line(line, number, name, source, fields, limits)
                    if not has_text and isinstance(row, dict):
                        has_text = has_field(row, fields.text)
                        missing += not has_text
                        if missing <= _FIRST_ROWS and not has_text:
                            keys |= dict.fromkeys(row)
                    yield pair
                else:
                    continue
                rows += 1
    except BadStream as bad:
        value = f"behind row {rows}: {bad.value}"  # recorded in corpora. words: ok
        ending = dropped(name, source, bad.rule, value, f"row-{rows}-end")
    if missing and not has_text:
        raise _no_text(path, fields, list(keys))
    if ending:
        yield ending
    elif not rows:
        yield dropped(name, source, "empty_body", "no rows", "file")


def _no_text(path: Path, fields: Fields, keys: list[str]) -> DataError:
    shown = [key[:100] for key in keys[:20]]
    likely = next((key for key in ("content", "body", "raw_content", "document") if key in keys), "COLUMN")
    return DataError(
        "E-JSONL-COLUMN",
        f"{path} has no column {fields.text!r}; its columns are {', '.join(shown) or 'none'}",
        rule="the text of a document is one column of strings",
        fix=f"name the column: --source NAME {path} text={likely} (a dot selects an inner key: meta.text)",
        path=str(path),
        column=fields.text,
        columns=shown,
    )


def _line(line: bytes, number: int, name: str, source: str, fields: Fields, limits: Limits):
    """Return ((document, drop or None), the parsed row; None if the line is not JSON)."""
    try:
        # Bytes that are not UTF-8 become U+FFFD, as in web pages.
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"))
    except (ValueError, RecursionError, MemoryError) as error:
        value = f"row {number}: {type(error).__name__}: {error}"
        return dropped(name, source, "bad_row", value, f"row-{number}"), None
    return row_document(row, number, name, source, fields, limits), row


def _opens_array(line: bytes) -> bool:
    """Return True if the first line of a file begins a JSON array of objects; False if it is only one bad row."""
    if not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        return False
    try:
        value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError, MemoryError):
        return True
    return bool(value) and isinstance(value[0], dict)
