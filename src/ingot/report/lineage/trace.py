"""Trace a training step back to its documents in the crawl, and a document to the steps that used it.

Both use lineage files. For folders of older versions, which lack lineage, a step is traced by reading the whole corpus.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.build.corpus import MANIFEST, read_documents
from ingot.data.lineage.purge.history import PURGED, TokenLayout, read_purges, redacted_hash
from ingot.data.lineage.records import DocumentLocation, find, lineage_connection, locate_documents, rows_of
from ingot.data.sources.url import canonical_url
from ingot.errors import DataError, UsageError
from ingot.report.lineage.exposure import Exposure, RunTokens, Use, exposure, uses
from ingot.schema.checkpoint import LedgerSegment
from ingot.schema.tokens import Shard, TokenManifest
from ingot.storage import sha256_file
from ingot.trainer.loader.ledger import is_untrained, of_step, read_ledger
from ingot.trainer.loader.order import Order


@dataclass(frozen=True)
class TracedDocument:
    """A document, or a part of it, in one sample of a step.

    sample: the position in the global batch. token_start: the offset of the part's first token in its shard.
    tokens_in_sample: the number of tokens of the part; a sample has seq_len inputs and the last target. file,
    record_id: the crawl file and the record in it.
    in_ledger: True if the ledger of a checkpoint confirms the sample; False if it is computed from the sample order.
    trained: False if the ledger says that the step changed no weights: its update was skipped or its data were passed.
    replaced: the sample is in the place of one that is in quarantine, because its tokens are damaged.
    """

    step: int
    sample: int
    shard: str
    token_start: int
    tokens_in_sample: int
    document_id: str
    url: str
    source: str
    file: str
    record_id: str
    in_ledger: bool
    trained: bool = True
    replaced: bool = False


def trace_step(run: Path, step: int) -> list[TracedDocument]:
    """Return the documents of optimizer step `step` (from 1) of the run folder `run`, in the order of the batch.

    If a checkpoint covers the step, the samples are compared with its ledger. Raises UsageError if the run has no such
    step, DataError if the ledger, the tokens or the corpus do not belong to the run.
    """
    reader = RunTokens(run)
    config = reader.config
    if not 1 <= step <= config.train.steps:
        raise UsageError(
            "E-STEP-RANGE",
            f"the run {config.name!r} has no step {step}",
            rule=f"steps go from 1 to {config.train.steps}",
            fix=f"use --step N with N from 1 to {config.train.steps}",
            step=step,
            steps=config.train.steps,
        )
    layout = reader.layout_at(step)
    if layout is None:
        raise DataError(
            "E-STEP-TOKENS-GONE",
            f"step {step} was trained on other tokens than those in data.tokens now",
            rule="a step is traced through the tokens on which it was trained; after a purge, through DIR/purges",
            fix="restore these tokens in the folder data.tokens, or trace a run that was trained on the present tokens",
            step=step,
        )
    order = reader.order(layout)
    ids = order.step(step, config.train.global_batch)
    in_ledger, trained = check_ledger(reader, step, ids)
    parts = list(parts_of(layout, order, ids))
    origin = origins_of(reader.tokens, layout, parts)
    replaced = order.replaced(step, config.train.global_batch)[1]
    return [
        TracedDocument(
            step=step,
            sample=part.sample,
            shard=part.shard.name,
            token_start=part.start,
            tokens_in_sample=part.tokens,
            document_id=part.document,
            url=origin[part.document]["url"],
            source=part.shard.source,
            file=origin[part.document]["file"],
            record_id=origin[part.document]["record_id"],
            in_ledger=in_ledger,
            trained=trained,
            replaced=bool(replaced[part.sample]),
        )
        for part in parts
    ]


@dataclass(frozen=True)
class DocumentPart:
    """The tokens [start, start + tokens) of a shard, which belong to one document and one sample."""

    sample: int
    shard: Shard
    start: int
    tokens: int
    document: str


def parts_of(layout: TokenLayout, order: Order, ids: np.ndarray) -> Iterator[DocumentPart]:
    """Yield the parts of documents in the samples `ids` (window ids), sample by sample, in the order of tokens."""
    indexes: dict[int, np.ndarray] = {}
    for sample, (number, start) in enumerate(zip(*map(np.ndarray.tolist, order.locate(ids)), strict=True)):
        shard = layout.manifest.shards[number]
        if number not in indexes:
            indexes[number] = layout.index(shard)
        index, stop = indexes[number], start + order.windows.seq_len + 1
        first = int(np.searchsorted(index["start"], start, side="right")) - 1
        last = int(np.searchsorted(index["start"], stop, side="left"))
        for row in index[first:last]:
            begin = max(int(row["start"]), start)
            end = min(int(row["start"]) + int(row["tokens"]), stop)
            yield DocumentPart(sample, shard, begin, end - begin, bytes(row["id"]).hex())


def check_ledger(reader: RunTokens, step: int, ids: np.ndarray) -> tuple[bool, bool]:
    """Check that the ledger has the samples `ids` for `step`. Returns whether a checkpoint covers the step, and whether
    the step was trained. Raises DataError if the samples differ."""
    segment = _segment_of(reader.ledger, step)
    if segment is None:
        return False, True
    trained = True
    for consumed_step, consumed in read_ledger(reader.folder.ledger, [segment]):
        if consumed_step != step:
            continue
        trained = not is_untrained(consumed)
        if not np.array_equal(of_step(consumed), ids):
            raise DataError(
                "E-LEDGER-ORDER",
                f"step {step}: the ledger has other samples than the order of run.toml",
                rule="seed, tokens, seq_len, global_batch and weights determine the samples of every step",
                fix="restore seed, seq_len, global_batch and weights in run.toml: they were changed after the run",
                step=step,
            )
    return True, trained


def _segment_of(segments: tuple[LedgerSegment, ...], step: int) -> LedgerSegment | None:
    return next((s for s in segments if s.first_step <= step <= s.last_step), None)


def origins_of(tokens: Path, layout: TokenLayout, parts: list[DocumentPart]) -> dict[str, dict]:
    """Return url, file and record_id for the id of each document, from the lineage files next to the shards."""
    wanted = {part.document for part in parts} - {PURGED}
    nothing = {PURGED: {"url": "(purged)", "file": "", "record_id": ""}}
    if not layout.current:
        rows = rows_of(tokens.parent.parent, wanted)
        return nothing | {row["id"]: row for row in rows}
    shards = {part.shard.name: part.shard for part in parts}
    files = {name: tokens / f"{name}.lineage.parquet" for name in shards}
    if not all(path.exists() for path in files.values()):
        return _find_documents(tokens.parent.parent / "corpus", layout.manifest, wanted)
    for name, path in files.items():
        if (sha256 := shards[name].lineage_sha256) and sha256_file(path) != sha256:
            raise DataError(
                "E-LINEAGE-HASH",
                f"the hash of {path} differs from the hash in its manifest",
                rule="a lineage file does not change after the build",
                fix=f"ingot data verify {tokens}",
                path=str(path),
            )
    with lineage_connection(files.values()) as connection:
        query = "select id, url, file, record_id from lineage where id in (select unnest(?::varchar[]))"
        rows = connection.execute(query, [sorted(wanted)]).fetchall()
    origin = {one: {"url": url, "file": file, "record_id": record} for one, url, file, record in rows}
    if missing := wanted - origin.keys():
        raise DataError(
            "E-LINEAGE-DOCUMENT",
            f"the lineage of {tokens} lacks document {min(missing)}",
            rule="lineage has a row for each document of the shards",
            fix=f"ingot data verify {tokens}",
            document=min(missing),
        )
    return origin


def _find_documents(corpus: Path, manifest: TokenManifest, wanted: set[str]) -> dict[str, dict]:
    """Return the corpus line of each document id in `wanted`, found in one pass over the corpus."""
    path = corpus / MANIFEST
    if not path.exists():
        raise DataError(
            "E-CORPUS-MISSING",
            f"the corpus of these tokens is not at {corpus}",
            rule="the corpus is in OUT/corpus, next to OUT/tokens, where `ingot data build` wrote both",
            fix="move the corpus folder back next to the tokens folder",
            corpus=str(corpus),
        )
    if (found := sha256_file(path)) != manifest.corpus_sha256:
        raise DataError(
            "E-CORPUS-OTHER",
            f"{path} has SHA-256 {found[:12]}.., the tokens were made from {manifest.corpus_sha256[:12]}..",
            rule="a step is traced through the corpus from which its tokens were made",
            fix="restore that corpus, or build the tokens again and train on them",
            path=str(path),
        )
    origin = {}
    for _, document in read_documents(corpus):
        if document["id"] in wanted:
            origin[document["id"]] = document
            if len(origin) == len(wanted):
                break
    if missing := wanted - origin.keys():
        raise DataError(
            "E-CORPUS-DOCUMENT",
            f"{corpus} lacks document {min(missing)}",
            rule="tokens are made from documents of the corpus",
            fix=f"ingot data verify {corpus}",
            document=min(missing),
        )
    return origin


@dataclass(frozen=True)
class RecordHistory:
    """The history of a record of the crawl.

    row: its lineage row. place: the location of its tokens, None if the record was dropped. uses: its samples in the
    given run. seen: the use of the document in this run, None if no run was given.
    """

    row: dict[str, Any]
    place: DocumentLocation | None
    uses: tuple[Use, ...] = ()
    seen: Exposure | None = None


def trace_documents(
    data: Path,
    *,
    doc: str = "",
    url: str = "",
    listed: Collection[str] = (),
    run: Path | None = None,
    limit: int = 20,
) -> list[RecordHistory]:
    """Return the histories of at most `limit` records: the record with the id `doc`, those of the page `url` and the
    pages below it, or those with the ids `listed`.

    data: a folder of `data build --out`. Raises UsageError for an invalid id or URL, DataError if there is no lineage.
    """
    rows = rows_of(data, listed)[:limit] if listed else find(data, doc=doc, url=url, under=bool(url), limit=limit)
    by_id = {place.id: place for place in locate_documents(data, {row["id"] for row in rows if not row["rule"]})}
    histories = []
    for row in rows:
        place = by_id.get(row["id"])
        used = uses(run, [row["id"]]) if run and place else ()
        histories.append(RecordHistory(row, place, tuple(used), exposure(run, [row["id"]]) if run and place else None))
    return histories


def purges_of(data: Path, *, doc: str = "", url: str = "", listed: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the records in purges.jsonl of the purges that removed the document `doc`, a document with the URL `url`,
    or one of those `listed`; oldest first."""
    wanted = redacted_hash(canonical_url(url)) if url else ""
    found = []
    for record in read_purges(data):
        for one in record["documents"]:
            if (doc and one["id"].startswith(doc)) or (wanted and one["url"] == wanted) or one["id"] in listed:
                found.append(record)
                break
    return found
