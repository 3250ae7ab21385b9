"""Asking lineage, by DuckDB in this process: which records came from a page or a site, and where their tokens are."""

import glob
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ingot.data.lineage.table import domain_of, url_hash
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, UsageError, require

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
