"""Read an input by a format of a plug-in, and check every record that its reader yields."""

import re
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any

from ingot.data.guard import broken_contract, failure, is_broken_contract, wrong_notes
from ingot.data.parts import Table, in_words, settings_of
from ingot.data.sources.bounded import Limits
from ingot.data.sources.text import STAGE, dropped
from ingot.errors import DataError, IngotError
from ingot.plugins.registry import resolve
from ingot.plugins.source import FORMATS
from ingot.schema.corpus import Document, Drop

_ID = re.compile("[0-9a-f]{32}")
_END = object()
_RULE = (
    "a reader yields (Document, None) or (Document, Drop); the document has the file, the source and an id from "
    f'document_id, its text in `raw`, and strings in its other fields; a Drop is Drop("{STAGE}", "{STAGE}.RULE", value)'
)


def read_checked(
    kind: str, path: Path, name: str, source: str, limits: Limits, table: Table | None
) -> Iterator[tuple[Document, Drop | None]]:
    """Yield the pairs (document, drop or None) of a format of a plug-in. Documents over the limit are dropped.

    Raises ConfigError for a record of the wrong type, DataError for a file that the reader cannot read; an OSError of
    the reader ends the build, so that the same command tries the input again.
    """
    part, number = in_words("format", kind), 0
    records = iter(_opened(part, kind, path, name, source, limits, table))
    while (pair := _next(part, records, name)) is not _END:
        if wrong := _wrong(pair, name, source):
            raise broken_contract(part, f"yields {wrong} for record {number} of {name}", _RULE)
        document, drop = pair
        if drop is None and len(document.raw) > limits.body_bytes:
            value = f"{len(document.raw)} bytes"
            yield dropped(name, source, "too_large", value, document.record_id, document.url)
        else:
            yield document, drop
        number += 1


def _opened(part: str, kind: str, path: Path, name: str, source: str, limits: Limits, table: Table | None) -> Any:
    try:
        found = resolve(FORMATS[kind].read)(path, name, source, limits, settings_of("format", kind, table))
    except Exception as error:
        raise _unreadable(part, name, error) from error
    if not hasattr(found, "__iter__"):
        raise broken_contract(part, f"returns {type(found).__name__} for {name}, not an iterator", _RULE)
    return found


def _next(part: str, records: Iterator[Any], name: str) -> Any:
    try:
        return next(records, _END)
    except Exception as error:
        raise _unreadable(part, name, error) from error


def _unreadable(part: str, name: str, error: Exception) -> Exception:
    """Return the error to raise for what a reader raised."""
    if isinstance(error, MemoryError) or is_broken_contract(error):
        return error
    if isinstance(error, OSError) and not isinstance(error, BadGzipFile):
        return error  # ends the build, as for a format of ingot: the same command may find the disk or network working
    fix = error.fix if isinstance(error, IngotError) else "correct the plug-in, or leave this input out"
    found = f"{part} cannot read {name}: {failure(error)}"
    rule = "the records before the error are kept; the rest of the input is left out"
    return DataError("E-DATA-PLUGIN-SOURCE", found, rule=rule, fix=fix, part=part, name=name)


def failed(kind: str, path: str, error: OSError) -> DataError:
    """Return the error that ends a build if the reader of a format of a plug-in met an error of the disk or network.

    path: the input. The reader may have opened another file: the message has the reader's own error and its place.
    """
    part = in_words("format", kind)
    return DataError(
        "E-INPUT-READ-FAILED",
        f"{part} cannot read {path}: {failure(error)}",
        rule="an input must be readable",
        fix="check the path, its permissions and the disk, or correct the plug-in; the same command reads it again",
        path=path,
        part=part,
    )


def _wrong(pair: Any, name: str, source: str) -> str:
    """Return what is wrong with a record, "" if nothing is."""
    if not (isinstance(pair, tuple) and len(pair) == 2):
        return f"{type(pair).__name__}, not a pair"
    document, drop = pair
    if not isinstance(document, Document):
        return f"{type(document).__name__} instead of a Document"
    for field in ("id", "url", "source", "file", "record_id", "text", "content_type", "charset", "language"):
        if not isinstance(value := getattr(document, field), str):
            return f"{field} = {value!r}"[:200]
    if not isinstance(document.raw, bytes):
        return f"{type(document.raw).__name__} as `raw` instead of bytes"
    if wrong := wrong_notes(document):
        return wrong
    if not _ID.fullmatch(document.id):
        return f"id = {document.id!r}"[:200]
    if (document.file, document.source) != (name, source):
        return f"file = {document.file!r}, source = {document.source!r}"[:200]
    if drop is None:
        return ""
    if not isinstance(drop, Drop):
        return f"{type(drop).__name__} instead of a Drop or None"
    right = drop.stage == STAGE and isinstance(drop.rule, str) and drop.rule.startswith(f"{STAGE}.")
    return "" if right and isinstance(drop.value, str) else f"{drop!r}"[:200]
