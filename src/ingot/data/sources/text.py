"""Plain text, one document per file, and JSON lines, one document per line; both plain, gzip or zstd."""

import json
from collections.abc import Iterator
from pathlib import Path

from ingot.data.sources.limits import Limits
from ingot.data.sources.rows import Fields, dropped, row_document
from ingot.data.sources.sniff import page_type
from ingot.data.sources.unpack import BadStream, Unpacked, lines
from ingot.errors import DataError
from ingot.schema.document import Document, Drop, document_id


def read_text(path: Path, name: str, source: str, limits: Limits) -> Iterator[tuple[Document, Drop | None]]:
    """The one document of a text file. Rules: read.too_large, not_text, empty_body, truncated_file, bad_stream."""
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
    path: Path, name: str, source: str, fields: Fields, limits: Limits
) -> Iterator[tuple[Document, Drop | None]]:
    """One pair per line that is not blank. Rules: read.bad_row (no JSON object, no text in it), empty_body, too_large;
    truncated_file and bad_stream where the file cannot be read further.

    Raises DataError for a file that is one JSON array: it can only be read whole.
    """
    rows = 0
    try:
        with Unpacked(path, limits) as stream:
            for number, (line, size) in enumerate(lines(stream, limits.block_bytes)):
                if size > limits.block_bytes:
                    yield dropped(name, source, "too_large", f"row {number}: a line of {size} bytes", f"row-{number}")
                elif line.strip():
                    if not rows and _opens_array(line):
                        raise _array(path)
                    yield _line(line, number, name, source, fields, limits)
                else:
                    continue
                rows += 1
    except BadStream as bad:
        yield dropped(name, source, bad.rule, f"behind row {rows}: {bad.value}", f"row-{rows}-end")
        return
    if not rows:
        yield dropped(name, source, "empty_body", "no rows", "file")


def _line(line: bytes, number: int, name: str, source: str, fields: Fields, limits: Limits):
    try:
        # Bytes that are no UTF-8 become U+FFFD, as in pages.
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace"))
    except (ValueError, RecursionError, MemoryError) as error:
        value = f"row {number}: {type(error).__name__}: {error}"
        return dropped(name, source, "bad_row", value, f"row-{number}")
    return row_document(row, number, name, source, fields, limits)


def _opens_array(line: bytes) -> bool:
    """Whether the first line of a file begins a JSON array of objects, rather than being one bad row."""
    if not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        return False
    try:
        value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError, MemoryError):
        return True
    return bool(value) and isinstance(value[0], dict)


def _array(path: Path) -> DataError:
    return DataError(
        f"{path} is one JSON array, or JSON spread over several lines",
        rule="JSON lines have one object per line",
        fix=f"jq -c '.[]' {path.name} > {path.name.split('.')[0]}.jsonl",
    )
