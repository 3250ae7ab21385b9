"""Lineage: where every record of a crawl came from, what was decided about it, and where its tokens are. No text.

    corpus/lineage-NNNNN.parquet        all records of one crawl file, kept and dropped, in crawl order
    tokens/SPLIT/NAME.lineage.parquet   the documents of shard NAME, in shard order

Both are plain Parquet for any tool; ingot asks them through DuckDB (find.py). Identities carry Bloom filters, so that
looking one up reads next to nothing however many files there are. Equal rows give equal bytes, with one version of
pyarrow: fixed row groups and compression, no time, no machine.
"""

import glob
import json
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, UsageError, require
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


# Asking lineage, by DuckDB in this process: which records came from a page or a site, and where their tokens are.


SPLITS = ("train", "heldout")
COPIES = ("duplicates", "near_duplicates")  # stages that drop a document for one that stays, whose id they tell
_MEMORY = "1GiB"
_ROWS = 4096  # that are Python's at once where not all are kept
_ID_DIGITS = 32
_IN_ORDER = "order by filename, file_row_number"  # crawl order
OF_DOMAIN = "(domain = ? or ends_with(domain, ?))"  # takes `host_of` a domain, and that after a dot


def lineage_files(data: Path) -> list[Path]:
    """The lineage files of what `data build --out` wrote, or of a corpus folder, by name; none if it is old."""
    corpus = data / "corpus" if (data / "corpus").is_dir() else data
    return sorted(corpus.glob("lineage-*.parquet"))


def require_lineage(data: Path) -> list[Path]:
    """`lineage_files`, of which there is at least one. Raises DataError."""
    if files := lineage_files(data):
        return files
    raise DataError(
        f"{data} holds no lineage",
        rule="a build writes corpus/lineage-NNNNN.parquet for every crawl file; older builds did not",
        fix="build it again with this version: ingot data build FILES... --out DIR",
    )


def part_of(row: dict) -> str:
    """The file of the corpus folder that holds the text (kept) or the excerpt (dropped) of a lineage row."""
    number = Path(row["filename"]).stem.removeprefix("lineage-")
    return row["part"] or f"dropped-{number}.jsonl.gz"


@contextmanager
def asking(files: Iterable[Path]) -> Iterator[Any]:
    """Yield a DuckDB connection on which `lineage` is a view over `files`, with `filename` and `file_row_number`."""
    duckdb = require("duckdb", "data")
    settings = {"memory_limit": _MEMORY, "autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with (
        tempfile.TemporaryDirectory() as spill,  # else it would be ".tmp" where the command was given
        duckdb.connect(":memory:", config=settings | {"temp_directory": spill}) as connection,
    ):
        names = [glob.escape(str(path)) for path in files]
        try:
            connection.read_parquet(names, filename=True, file_row_number=True).create_view("lineage")
            yield connection
        except duckdb.Error as error:
            raise DataError(
                f"the lineage cannot be read ({str(error).splitlines()[0]})",
                fix="ingot data verify DIR finds what is damaged",
            ) from None


def _rows(connection, query: str, parameters: Collection[Any] = ()) -> Iterator[dict]:
    found = connection.execute(query, list(parameters))
    names = [column[0] for column in found.description]
    while rows := found.fetchmany(_ROWS):
        yield from (dict(zip(names, row, strict=True)) for row in rows)


def find(
    data: Path, *, doc: str = "", url: str = "", domain: str = "", source: str = "", under: bool = False, limit: int = 0
) -> list[dict]:
    """Rows of the lineage of `data` that fit all of what is given, in crawl order.

    Their keys are RECORD_COLUMNS, filename and file_row_number.
    doc: an id, or its first 6 or more digits. url: any spelling of it; with `under` every page below it as well.
    domain: a host with its subdomains. limit: at most so many rows; 0: all.
    Raises UsageError when nothing is asked for, DataError without lineage.
    """
    conditions, parameters = [], []
    if doc:
        if len(doc) < 6 or len(doc) > _ID_DIGITS or not set(doc) <= set("0123456789abcdef"):
            raise UsageError(f"{doc!r} is no document id", rule="32 hex digits, or the first 6 or more of them")
        conditions.append("id = ?" if len(doc) == _ID_DIGITS else "starts_with(id, ?)")
        parameters.append(doc)
    canonical = canonical_url(url)
    if url and under and domain_of(canonical):
        conditions.append("domain = ?")
        parameters.append(domain_of(canonical))
    elif url:
        conditions.append("url_hash = ?")
        parameters.append(url_hash(canonical))
    if domain:
        host = host_of(domain)
        conditions.append(OF_DOMAIN)
        parameters += [host, f".{host}"]
    if source:
        conditions.append("source = ?")
        parameters.append(source)
    if not conditions:
        raise UsageError("nothing is asked for", rule="give a document, a URL, a domain or a source")
    query = f"select * from lineage where {' and '.join(conditions)} {_IN_ORDER}"
    with asking(require_lineage(data)) as connection:
        rows = _rows(connection, query + (f" limit {limit}" if limit and not url else ""), parameters)
        if url:  # hashes can collide, and what is below a page is told by its text
            rows = (row for row in rows if _is_page(canonical_url(row["url"]), canonical, under))
        return list(islice(rows, limit or None))


def host_of(domain: str) -> str:
    """A domain that somebody wrote, as lineage has it. Raises UsageError when it names no host, or a page of one."""
    given = domain.strip()
    canonical = canonical_url(given if "://" in given else f"http://{given.strip('.')}")
    host = domain_of(canonical)
    if not host:
        raise UsageError(f"{domain!r} names no host", rule="a domain is like example.org")
    parts = urlsplit(canonical)
    if parts.path.strip("/") or parts.query:  # a whole site for one page would be a costly misunderstanding
        raise UsageError(f"{domain!r} names a page", rule="a domain is like example.org", fix="ask for it with --url")
    return host


def _is_page(url: str, wanted: str, under: bool) -> bool:
    return url == wanted or (under and url.startswith(wanted.rstrip("/") + "/"))


def rows_of(data: Path, ids: Collection[str]) -> list[dict]:
    """The lineage rows of these ids, in crawl order."""
    with asking(require_lineage(data)) as connection:
        _wanted(connection, ids)
        return list(_rows(connection, f"select l.* from lineage l join wanted using (id) {_IN_ORDER}"))


def copies_of(data: Path, ids: Collection[str], url_hashes: Collection[int]) -> list[dict]:
    """Records that were dropped as a copy of one of `ids`, or for a page with one of these URLs that came before."""
    with asking(require_lineage(data)) as connection:
        _wanted(connection, ids)
        connection.execute("create temp table hashes as select unnest(?::ubigint[]) as url_hash", [list(url_hashes)])
        rows = _rows(
            connection,
            "select l.* from lineage l where l.id not in (select id from wanted) and ("
            f" (l.stage in {COPIES} and"
            " regexp_extract(l.value, '[0-9a-f]{32}') in (select id from wanted))"
            " or (l.stage = 'url' and l.rule = 'url.duplicate' and l.url_hash in (select url_hash from hashes)))"
            f" {_IN_ORDER}",
        )
        return list(rows)


def _wanted(connection, ids: Collection[str]) -> None:
    connection.execute("create temp table wanted as select unnest(?::varchar[]) as id", [sorted(ids)])


@dataclass(frozen=True)
class Place:
    """Where a document's tokens are: `tokens` of them, the end of text included, from `start` in shard `shard`."""

    id: str
    split: str
    shard: str
    start: int
    tokens: int


def places(data: Path, ids: Collection[str]) -> list[Place]:
    """The places of these documents in the token folders of `data`, by split, shard and start.

    From the document indexes, which every token folder has.
    """
    import numpy as np

    from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, read_token_manifest

    wanted = np.sort(np.array([bytes.fromhex(one) for one in ids], "V16").view("S16"))
    found = []
    for split in SPLITS:
        folder = data / "tokens" / split
        if not len(wanted) or not (folder / MANIFEST).exists():
            continue
        for shard in read_token_manifest(folder).shards:
            index = np.fromfile(folder / f"{shard.name}.documents", DOCUMENT_DTYPE)
            for row in index[np.isin(index["id"].view("S16"), wanted)]:
                start, tokens = int(row["start"]), int(row["tokens"])
                found.append(Place(bytes(row["id"]).hex(), split, shard.name, start, tokens))
    return found
