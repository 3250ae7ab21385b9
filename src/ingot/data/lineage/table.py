"""Lineage: where every record of a crawl came from, what was decided about it, and where its tokens are. No text.

    corpus/lineage-NNNNN.parquet        all records of one crawl file, kept and dropped, in crawl order
    tokens/SPLIT/NAME.lineage.parquet   the documents of shard NAME, in shard order

Both are plain Parquet for any tool; ingot asks them through DuckDB (find.py). Identities carry Bloom filters, so that
looking one up reads next to nothing however many files there are. Equal rows give equal bytes, with one version of
pyarrow: fixed row groups and compression, no time, no machine.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from ingot.data.sources.url import canonical_url
from ingot.errors import require
from ingot.schema.corpus import LineagePart
from ingot.storage import atomic_file, sha256_file

GROUP_ROWS = 65_536  # of a row group: what is in memory at once, and what a Bloom filter is about

# Column -> Parquet type. url_hash: of the canonical URL, see `url_hash`. before, after: XXH3-128 of the text as it was
# extracted and as it was kept. notes: JSON. part, row: the line in the corpus part, "" and -1 for a dropped record.
RECORD_COLUMNS = {
    "id": "string", "source": "string", "file": "string", "record_id": "string", "url": "string",
    "url_hash": "uint64", "domain": "string", "language": "string", "before": "string", "before_bytes": "int64",
    "after": "string", "after_bytes": "int64", "stage": "string", "rule": "string", "value": "string",
    "notes": "string", "part": "string", "row": "int64",
}  # fmt: skip
# start, tokens: first token in the shard and how many, with the end of text.
SHARD_COLUMNS = {
    "id": "string", "start": "int64", "tokens": "int64", "url": "string", "domain": "string", "source": "string",
    "file": "string", "record_id": "string", "before": "string", "after": "string",
}  # fmt: skip
_LOOKED_UP = ("id", "url_hash", "domain", "before", "after")  # with a Bloom filter
_REPETITIVE = ("source", "file", "domain", "language", "stage", "rule", "part")  # stored as dictionaries
_DEFAULTS = {"string": "", "int64": 0, "uint64": 0}


def text_hash(text: str) -> str:
    """What stands in `before` and `after`: XXH3-128 of the UTF-8 text, as 32 hex digits; "" for no text."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")) if text else ""


def url_hash(canonical: str) -> int:
    """64 bits of a canonical URL (`data.url.canonical_url`); 0 without one."""
    return xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass")) if canonical else 0


def domain_of(canonical: str) -> str:
    """The host of a canonical URL, without port; "" when there is none."""
    try:
        return urlsplit(canonical).hostname or ""
    except ValueError:
        return ""


def write_lineage(path: Path, rows: Iterable[dict]) -> LineagePart:
    """Write corpus/lineage-NNNNN.parquet from the rows of one crawl file, kept and dropped, in crawl order.

    A row has the keys of RECORD_COLUMNS but url_hash and domain, which follow from its URL; `notes` is a dict. Missing
    keys are "" or 0, `row` is -1. Memory is that of GROUP_ROWS rows.
    """
    records = write_rows(path, map(_record, rows), RECORD_COLUMNS)
    return LineagePart(name=path.name, records=records, sha256=sha256_file(path))


def write_shard_lineage(path: Path, rows: Iterable[dict]) -> str:
    """Write tokens/SPLIT/NAME.lineage.parquet from rows in shard order (keys of SHARD_COLUMNS but domain).

    Returns the file's SHA-256.
    """
    write_rows(path, (_only(SHARD_COLUMNS, row | {"domain": _domain(row)}) for row in rows), SHARD_COLUMNS)
    return sha256_file(path)


def _domain(row: dict) -> str:
    return domain_of(canonical_url(row.get("url", "")))


def read_lineage(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a lineage file as they stand in it (`notes` as JSON), a row group in memory at a time."""
    parquet = require("pyarrow.parquet", "data")
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=GROUP_ROWS):
            yield from batch.to_pylist()


def _record(row: dict) -> dict:
    notes = json.dumps(row.get("notes") or {}, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    url = canonical_url(row.get("url", ""))
    derived = {"notes": notes, "url_hash": url_hash(url), "domain": domain_of(url), "row": row.get("row", -1)}
    return _only(RECORD_COLUMNS, row | derived)


def _only(columns: dict[str, str], row: dict) -> dict:
    """Without the text and what else a caller's row holds: a whole row group waits in memory."""
    return {name: row[name] for name in columns if name in row}


def write_rows(path: Path, rows: Iterable[dict], columns: dict[str, str]) -> int:
    """Write `rows`, which have what `columns` name as it is to stand there; returns how many they were."""
    arrow, parquet = require("pyarrow", "data"), require("pyarrow.parquet", "data")
    schema = arrow.schema([arrow.field(name, getattr(arrow, kind)(), nullable=False) for name, kind in columns.items()])
    rows = iter(rows)
    first = list(islice(rows, GROUP_ROWS))
    blooms = {name: {"ndv": max(len(first), 1), "fpp": 0.01} for name in _LOOKED_UP if name in columns}
    count = 0
    with (
        atomic_file(path) as file,
        parquet.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=[name for name in _REPETITIVE if name in columns],
            bloom_filter_options=blooms,
            store_schema=False,
        ) as writer,
    ):
        group = first
        while group:
            writer.write_table(_table(arrow, schema, group, columns), row_group_size=GROUP_ROWS)
            count += len(group)
            group = list(islice(rows, GROUP_ROWS))
    return count


def _table(arrow, schema, rows: Sequence[dict], columns: dict[str, str]):
    arrays = []
    for name, kind in columns.items():
        default = _DEFAULTS[kind]
        values = [row.get(name, default) for row in rows]
        if kind == "string":
            values = [text if text.isascii() else _well_formed(text) for text in values]
        arrays.append(arrow.array(values, getattr(arrow, kind)()))
    return arrow.Table.from_arrays(arrays, schema=schema)


def _well_formed(text: str) -> str:
    """Parquet holds UTF-8: lone surrogates of broken URLs are written as \\uXXXX."""
    return text.encode("utf-8", "backslashreplace").decode()
