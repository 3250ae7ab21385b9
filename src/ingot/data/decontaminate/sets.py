"""Evaluation sets as they are published: JSONL, JSON, Parquet, text."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.errors import DataError, require

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")


def read_items(path: Path, fields: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The texts of each item of an evaluation set, in order. Raises DataError where the file is damaged."""
    try:
        # A bare string, as in text files, has no key to ask for.
        yield from ([item] if isinstance(item, str) else list(_texts(item, fields)) for item in _items(path))
    # pyarrow's errors are ValueErrors and OSErrors
    except (ValueError, OSError, EOFError, RecursionError, zlib.error) as error:
        rule = "evaluation sets are JSONL, JSON, Parquet or text"
        raise DataError(f"{path} cannot be read: {error}", rule=rule) from error


def _items(path: Path) -> Iterator[Any]:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".parquet":
        with require("pyarrow.parquet", "data").ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()
        return
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        if kind == ".txt":
            yield from (item for item in re.split(r"\n\s*\n", file.read()) if item.strip())
        elif kind == ".json":
            items = json.load(file)
            yield from items if isinstance(items, list) else [items]
        else:
            yield from (json.loads(line) for line in file if line.strip())


def _texts(value: Any, fields: tuple[str, ...]) -> Iterator[str]:
    """All strings in a JSON value; with `fields` only those under one of these keys."""
    if isinstance(value, str):
        if not fields:
            yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, () if key in fields else fields)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, fields)
