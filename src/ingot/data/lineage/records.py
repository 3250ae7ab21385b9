"""Lineage records: the origin of every crawl record, the decision about it, and the location of its tokens. No text.

    corpus/lineage-NNNNN.parquet        all records of one crawl file, kept and dropped, in crawl order
    tokens/SPLIT/NAME.lineage.parquet   the documents of shard NAME, in shard order

Both are plain Parquet, readable by any tool; ingot queries them with DuckDB, in its own process. Identifying columns
have Bloom filters, so that a look-up reads little data even if there are many files. Equal rows give equal bytes with
the same version of pyarrow: row groups and compression are fixed, and no time or machine name is stored.
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

GROUP_ROWS = 65_536  # rows of a row group; a whole group is in memory and has its own Bloom filters

# Column -> Parquet type. url_hash: hash of the canonical URL. before, after: XXH3-128 of the extracted and of
# the kept text. notes: JSON. part, row: the corpus part and the line in it, "" and -1 for a dropped record.
RECORD_COLUMNS = {
    "id": "string", "source": "string", "file": "string", "record_id": "string", "url": "string",
    "url_hash": "uint64", "domain": "string", "language": "string", "before": "string", "before_bytes": "int64",
    "after": "string", "after_bytes": "int64", "stage": "string", "rule": "string", "value": "string",
    "notes": "string", "part": "string", "row": "int64",
}  # fmt: skip
# start, tokens: offset of the first token in the shard, and number of tokens including the end-of-text token.
SHARD_COLUMNS = {
    "id": "string", "start": "int64", "tokens": "int64", "url": "string", "domain": "string", "source": "string",
    "file": "string", "record_id": "string", "before": "string", "after": "string",
}  # fmt: skip
_LOOKED_UP = ("id", "url_hash", "domain", "before", "after")  # columns with a Bloom filter
_REPETITIVE = ("source", "file", "domain", "language", "stage", "rule", "part")  # dictionary-encoded columns
_DEFAULTS = {"string": "", "int64": 0, "uint64": 0}
SPLITS = ("train", "heldout")
COPIES = ("duplicates", "near_duplicates")  # stages that drop a copy and record the id of the document that is kept
_MEMORY = "1GiB"
_ROWS = 4096  # rows fetched from DuckDB at once
_ID_DIGITS = 32
_IN_ORDER = "order by filename, file_row_number"  # crawl order
OF_DOMAIN = "(domain = ? or ends_with(domain, ?))"  # parameters: the host from `host_of`, and "." + this host


def text_hash(text: str) -> str:
    """Return the XXH3-128 hash of the UTF-8 text in hex digits, as in the columns `before` and `after`; "" for ""."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")) if text else ""


def url_hash(canonical: str) -> int:
    """Return the 64-bit hash of a canonical URL (`sources.url.canonical_url`), 0 for ""."""
    return xxhash.xxh3_64_intdigest(canonical.encode("utf-8", "surrogatepass")) if canonical else 0


def domain_of(canonical: str) -> str:
    """Return the host of a canonical URL, without port; "" if there is none."""
    try:
        return (urlsplit(canonical).hostname or "").lower()
    except ValueError:
        return ""


def write_lineage(path: Path, rows: Iterable[dict]) -> LineagePart:
    """Write corpus/lineage-NNNNN.parquet from the rows of one crawl file, kept and dropped, in crawl order.

    A row has the keys of RECORD_COLUMNS except url_hash and domain, which are derived from its URL; `notes` is a dict.
    Missing keys become "" or 0, a missing `row` becomes -1. At most GROUP_ROWS rows are in memory.
    """
    records = write_rows(path, map(_record, rows), RECORD_COLUMNS)
    return LineagePart(name=path.name, records=records, sha256=sha256_file(path))


def write_shard_lineage(path: Path, rows: Iterable[dict]) -> str:
    """Write tokens/SPLIT/NAME.lineage.parquet; return the SHA-256 of the file.

    rows: the documents in shard order, with the keys of SHARD_COLUMNS except domain.
    """
    write_rows(path, (_only(SHARD_COLUMNS, row | {"domain": _domain(row)}) for row in rows), SHARD_COLUMNS)
    return sha256_file(path)


def _domain(row: dict) -> str:
    return domain_of(canonical_url(row.get("url", "")))


def read_lineage(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a lineage file (`notes` as JSON text), with one row group in memory at a time."""
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
    """Return `row` reduced to `columns`, without its text: a whole row group of rows is held in memory."""
    return {name: row[name] for name in columns if name in row}


def write_rows(path: Path, rows: Iterable[dict], columns: dict[str, str]) -> int:
    """Write `rows`, whose values have the types of `columns`, and return the number of rows."""
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
    """Return `text` with lone surrogates (from broken URLs) as \\uXXXX, because Parquet stores UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


# Look-ups


def lineage_files(data: Path) -> list[Path]:
    """Return the lineage files of an output folder of `data build`, or of a corpus folder, sorted by name.

    The list is empty for a folder from an older version, which did not write lineage.
    """
    corpus = data / "corpus" if (data / "corpus").is_dir() else data
    return sorted(corpus.glob("lineage-*.parquet"))


def require_lineage(data: Path) -> list[Path]:
    """Return the lineage files of `data`. Raises DataError if there are none."""
    if files := lineage_files(data):
        return files
    raise DataError(
        "E-LINEAGE-MISSING",
        f"{data} has no lineage",
        rule="a build writes corpus/lineage-NNNNN.parquet for every crawl file; older versions did not",
        fix="build the folder again with this version: ingot data build FILES... --out DIR",
        folder=str(data),
    )


def part_of(row: dict) -> str:
    """Return the name of the corpus file that contains a lineage row's text (if kept) or excerpt (if dropped)."""
    number = Path(row["filename"]).stem.removeprefix("lineage-")
    return row["part"] or f"dropped-{number}.jsonl.gz"


@contextmanager
def lineage_connection(files: Iterable[Path]) -> Iterator[Any]:
    """Yield a DuckDB connection with a view `lineage` over `files`, which has the additional columns `filename` and
    `file_row_number`."""
    duckdb = require("duckdb", "data")
    settings = {"memory_limit": _MEMORY, "autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    with (
        tempfile.TemporaryDirectory() as spill,  # the default is ".tmp" in the current folder
        duckdb.connect(":memory:", config=settings | {"temp_directory": spill}) as connection,
    ):
        names = [glob.escape(str(path)) for path in files]
        try:
            connection.read_parquet(names, filename=True, file_row_number=True).create_view("lineage")
            yield connection
        except duckdb.Error as error:
            raise DataError(
                "E-LINEAGE-UNREADABLE",
                f"the lineage cannot be read ({str(error).splitlines()[0]})",
                rule="lineage files are the Parquet files that the build wrote",
                fix="list the damaged files with `ingot data verify DIR`, and restore them",
            ) from None


def _rows(connection, query: str, parameters: Collection[Any] = ()) -> Iterator[dict]:
    found = connection.execute(query, list(parameters))
    names = [column[0] for column in found.description]
    while rows := found.fetchmany(_ROWS):
        yield from (dict(zip(names, row, strict=True)) for row in rows)


def find(
    data: Path, *, doc: str = "", url: str = "", domain: str = "", source: str = "", under: bool = False, limit: int = 0
) -> list[dict]:
    """Return the lineage rows of `data` that match all given conditions, in crawl order.

    The keys of a row are RECORD_COLUMNS, filename and file_row_number.
    doc: an id, or at least its first 6 digits. url: any spelling of a URL. under: also find all pages below `url`.
    domain: a host with its subdomains. source: the name of a source. limit: the largest number of rows; 0: all.
    Raises UsageError if no condition is given, DataError if there is no lineage.
    """
    conditions, parameters = [], []
    if doc:
        if len(doc) < 6 or len(doc) > _ID_DIGITS or not set(doc) <= set("0123456789abcdef"):
            raise UsageError(
                "E-DOCUMENT-ID",
                f"{doc!r} is not a document id",
                rule="a document id is 32 hex digits, or the first 6 or more of them",
                fix="copy the id from the output of ingot data trace or ingot data inspect",
                id=doc,
            )
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
        raise UsageError(
            "E-LOOKUP-EMPTY",
            "the look-up has no condition",
            rule="a look-up needs a document, a URL, a domain or a source",
        )
    query = f"select * from lineage where {' and '.join(conditions)} {_IN_ORDER}"
    with lineage_connection(require_lineage(data)) as connection:
        rows = _rows(connection, query + (f" limit {limit}" if limit and not url else ""), parameters)
        if url:  # hashes can collide, and pages below a URL can only be found by comparing URLs
            rows = (row for row in rows if _is_page(canonical_url(row["url"]), canonical, under))
        return list(islice(rows, limit or None))


def host_of(domain: str) -> str:
    """Return the host in `domain`, text from a user, in the form that lineage stores.

    Raises UsageError for text that is not a host, and for the URL of a page.
    """
    given = domain.strip()
    canonical = canonical_url(given if "://" in given else f"http://{given.strip('.')}")
    host = domain_of(canonical)
    if not host:
        raise UsageError(
            "E-DOMAIN-NAME", f"{domain!r} is not a host", rule="a domain is written like example.org", domain=domain
        )
    parts = urlsplit(canonical)
    if parts.path.strip("/") or parts.query:  # a user who wants one page must not get the whole site
        raise UsageError(
            "E-DOMAIN-PAGE",
            f"{domain!r} is a page, not a domain",
            rule="a domain is written like example.org",
            fix="name the page with --url",
            domain=domain,
        )
    return host


def _is_page(url: str, wanted: str, under: bool) -> bool:
    return url == wanted or (under and url.startswith(wanted.rstrip("/") + "/"))


def rows_of(data: Path, ids: Collection[str]) -> list[dict]:
    """Return the lineage rows of the documents `ids`, in crawl order."""
    with lineage_connection(require_lineage(data)) as connection:
        _wanted(connection, ids)
        return list(_rows(connection, f"select l.* from lineage l join wanted using (id) {_IN_ORDER}"))


def copies_of(data: Path, ids: Collection[str], url_hashes: Collection[int]) -> list[dict]:
    """Return the lineage rows of records that were dropped as copies of one of `ids`, or because their URL, with a
    hash in `url_hashes`, occurred before."""
    with lineage_connection(require_lineage(data)) as connection:
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
class DocumentLocation:
    """The location of a document's tokens in a shard: `tokens` tokens from offset `start`, including the end-of-text
    token."""

    id: str
    split: str
    shard: str
    start: int
    tokens: int


def locate_documents(data: Path, ids: Collection[str]) -> list[DocumentLocation]:
    """Return the locations of the documents `ids` in the token folders of `data`, ordered by split, shard and start.

    The locations are read from the document indexes, which every token folder has.
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
                found.append(DocumentLocation(bytes(row["id"]).hex(), split, shard.name, start, tokens))
    return found
