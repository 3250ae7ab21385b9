"""The facts of a data card: the composition of an output folder of `data build`, from its manifests and lineage."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.build.corpus import cut_files, load_corpus, read_jsonl
from ingot.data.lineage.inspect import corpus_folder
from ingot.data.lineage.purge.history import PURGED, read_purges
from ingot.data.lineage.records import SPLITS, lineage_connection, part_of, require_lineage
from ingot.schema.corpus import CorpusManifest
from ingot.schema.tokens import MANIFEST, TokenManifest, read_token_manifest
from ingot.storage import sha256_file

KEPT_CHARACTERS = 700  # characters shown of a sample's text; a dropped document has only an excerpt
_TOP = 15
_SAMPLE_FILES = 8  # crawl files to take samples from, so that the card of a large corpus reads few parts
_LIKE = "regexp_extract(value, '[0-9a-f]{32}')"

Counts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SourceFacts:
    """The counts of a source. documents, text_bytes: of kept records only. tokens: the number of tokens in each split,
    end-of-text tokens included."""

    name: str
    records: int
    documents: int
    text_bytes: int
    tokens: dict[str, int]


@dataclass(frozen=True)
class SampleText:
    """A sample document. rule, value: the rule that dropped it and the recorded value; "" for a kept document.

    text: the beginning of the text; longer than KEPT_CHARACTERS by one character if the text continues.
    """

    url: str
    source: str
    rule: str
    value: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """The facts of a data card.

    name: the name of the folder. lengths: a histogram of kept documents, (least UTF-8 bytes, documents), in powers of
    two. languages, encodings, domains: (name, kept documents), largest first. edits: (note, documents, sum) for every
    note in which a stage counts its changes. clusters: (size, number of near-duplicate clusters of this size); the
    size includes the kept document.
    """

    name: str
    corpus: CorpusManifest
    corpus_sha256: str
    tokens: dict[str, TokenManifest]
    records: int
    kept: int
    sources: tuple[SourceFacts, ...]
    lengths: tuple[tuple[int, int], ...]
    languages: Counts
    encodings: Counts
    domains: Counts
    domain_count: int
    edits: tuple[tuple[str, int, float], ...]
    clusters: tuple[tuple[int, int], ...]
    samples: tuple[SampleText, ...]
    warnings: tuple[str, ...]
    purges: tuple[dict[str, Any], ...] = field(default=())


def gather_card(data: Path, samples: int = 10) -> CardFacts:
    """Read the facts of a data card from the folder `data`.

    samples: number of sample texts per source (kept documents) and per rule (dropped documents). Raises DataError if
    there is no corpus or no lineage.
    """
    corpus = corpus_folder(data)
    root = corpus.parent if corpus != data else data
    manifest = load_corpus(corpus)
    tokens = {s: read_token_manifest(root / "tokens" / s) for s in SPLITS if (root / "tokens" / s / MANIFEST).exists()}
    files = require_lineage(data)
    with lineage_connection(files) as connection:

        def query(text: str) -> list[tuple]:
            return connection.execute(text).fetchall()

        records, kept, domains = query(
            "select count(*), count(*) filter (rule = ''), count(distinct domain) filter (rule = '') from lineage"
        )[0]
        facts = {
            "records": records,
            "kept": kept,
            "domain_count": domains,
            "sources": _sources(query, tokens),
            "lengths": _lengths(query),
            "languages": _top(query, "language"),
            "encodings": _top(query, "json_extract_string(notes, '$.encoding')"),
            "domains": _top(query, "domain"),
            "edits": _edits(query),
            "clusters": _clusters(query),
        }
    return CardFacts(
        name=root.resolve().name,
        corpus=manifest,
        corpus_sha256=sha256_file(corpus / CORPUS_MANIFEST),
        tokens=tokens,
        samples=tuple(_samples(corpus, files, samples)),
        warnings=cut_files(corpus),
        purges=tuple(read_purges(root)),
        **facts,
    )


Query = Callable[[str], list[tuple]]


def _sources(query: Query, tokens: dict[str, TokenManifest]) -> tuple[SourceFacts, ...]:
    rows = query(
        "select source, count(*), count(*) filter (rule = ''), sum(case when rule = '' then after_bytes else 0 end)"
        "::bigint from lineage group by 1 order by 1"
    )
    by_split = {
        split: {name: sum(s.tokens for s in manifest.shards if s.source == name) for name in manifest.sources}
        for split, manifest in tokens.items()
    }
    return tuple(
        SourceFacts(name, records, documents, size, {split: n.get(name, 0) for split, n in by_split.items()})
        for name, records, documents, size in rows
    )


def _lengths(query: Query) -> tuple[tuple[int, int], ...]:
    """Return (least bytes, documents) for every power of two from the shortest to the longest kept document."""
    power = "floor(log2(greatest(after_bytes, 1)))::int"
    rows = dict(query(f"select {power}, count(*) from lineage where rule = '' group by 1"))
    return tuple((2**power, rows.get(power, 0)) for power in range(min(rows), max(rows) + 1)) if rows else ()


def _top(query: Query, column: str) -> Counts:
    return tuple(
        query(
            f"select coalesce(nullif({column}, ''), '(none)') as name, count(*) as n from lineage where rule = '' "
            f"group by 1 order by n desc, 1 limit {_TOP}"
        )
    )


def _edits(query: Query) -> tuple[tuple[str, int, float], ...]:
    """Return (note, documents, sum) for every note whose values are whole numbers: these count a stage's changes to a
    text."""
    noted = "select notes, unnest(json_keys(notes)) as name from lineage where rule = ''"
    counted = f"select name, try_cast(json_extract_string(notes, '$.\"' || name || '\"') as double) as n from ({noted})"
    whole = f"select name, count(*), sum(n) from ({counted}) where n > 0 group by 1 having bool_and(n = floor(n))"
    return tuple((name, documents, total) for name, documents, total in query(f"{whole} order by 1"))


def _clusters(query: Query) -> tuple[tuple[int, int], ...]:
    copies = f"select {_LIKE} as id, count(*) + 1 as n from lineage where stage = 'near_duplicates' group by 1"
    return tuple(query(f"select n, count(*) from ({copies}) where id not in ('', '{PURGED}') group by 1 order by 1"))


def _samples(corpus: Path, files: list[Path], count: int) -> list[SampleText]:
    """Return up to `count` documents of every source and every rule, from a few crawl files spread over the corpus."""
    step = max(len(files) // _SAMPLE_FILES, 1)
    with lineage_connection(files[::step][:_SAMPLE_FILES]) as connection:
        # An id is a hash, so the order of ids is a random order that is the same every time.
        rows = connection.execute(
            "select id, filename, part, rule, value, source, url from (select *, row_number() over "
            "(partition by rule, case when rule = '' then source end order by id) as place from lineage) "
            f"where place <= {count} order by rule, source, id"
        ).fetchall()
    names = ("id", "filename", "part", "rule", "value", "source", "url")
    chosen = [dict(zip(names, row, strict=True)) for row in rows]
    texts: dict[str, str] = {}
    for part in sorted({part_of(row) for row in chosen}):
        wanted = {row["id"] for row in chosen if part_of(row) == part}
        texts |= {
            row["id"]: row["text"][: KEPT_CHARACTERS + 1] for row in read_jsonl(corpus / part) if row["id"] in wanted
        }
    return [
        SampleText(row["url"], row["source"], row["rule"], row["value"], texts.get(row["id"], "")) for row in chosen
    ]
