"""From a training step back to the crawl, and from a document to the steps that used it.

Both go through lineage. Folders that were built before there was any are traced by reading the whole corpus.
"""

from collections.abc import Iterator
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
from ingot.trainer.loader.ledger import read_ledger
from ingot.trainer.loader.order import Order


@dataclass(frozen=True)
class TracedDocument:
    """A document, or the part of it, that stood in one sample of a step.

    sample: position in the global batch. token_start: first token of the part in its shard, tokens_in_sample: how many
    (inputs and the last target). file, record_id: the crawl file and the record in it.
    in_ledger: a checkpoint's ledger says that the step was trained on this sample; else it is what the order will give.
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


def trace_step(run: Path, step: int) -> list[TracedDocument]:
    """The documents of optimizer step `step` (from 1) of the run in folder `run`, in the order of the batch.

    What the run's ledger says was consumed is held against the order wherever a checkpoint covers the step. Raises
    UsageError when the run has no such step, DataError when ledger, tokens or corpus are not those of the run.
    """
    reader = RunTokens(run)
    config = reader.config
    if not 1 <= step <= config.train.steps:
        raise UsageError(f"the run {config.name!r} has no step {step}", rule=f"steps go from 1 to {config.train.steps}")
    layout = reader.layout_at(step)
    if layout is None:
        raise DataError(
            f"step {step} was trained on other tokens than those that data.tokens names now",
            rule="a step is traced through the tokens it was trained on; after a purge, through what DIR/purges keeps",
            fix="restore them, or trace the run that used these",
        )
    order = reader.order(layout)
    ids = order.step(step, config.train.global_batch)
    in_ledger = _check_ledger(reader, step, ids)
    parts = list(_parts(layout, order, ids))
    origin = _origins(reader.tokens, layout, parts)
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
        )
        for part in parts
    ]


@dataclass(frozen=True)
class _Part:
    """Tokens start..start+tokens of a shard, all of one document, in one sample."""

    sample: int
    shard: Shard
    start: int
    tokens: int
    document: str


def _parts(layout: TokenLayout, order: Order, ids: np.ndarray) -> Iterator[_Part]:
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
            yield _Part(sample, shard, begin, end - begin, bytes(row["id"]).hex())


def _check_ledger(reader: RunTokens, step: int, ids: np.ndarray) -> bool:
    """Hold the order against what the checkpoints' ledger says about `step`. False if none covers it (yet)."""
    segment = _segment_of(reader.ledger, step)
    if segment is None:
        return False
    for consumed_step, consumed in read_ledger(reader.folder.ledger, [segment]):
        if consumed_step == step and not np.array_equal(consumed, ids):
            raise DataError(
                f"step {step}: the ledger has other samples than the order gives",
                rule="samples are a function of seed, tokens and step alone",
                fix="run.toml was changed after the run; restore its seed, seq_len, global_batch and weights",
            )
    return True


def _segment_of(segments: tuple[LedgerSegment, ...], step: int) -> LedgerSegment | None:
    return next((s for s in segments if s.first_step <= step <= s.last_step), None)


def _origins(tokens: Path, layout: TokenLayout, parts: list[_Part]) -> dict[str, dict]:
    """Document id -> where it came from: url, file and record_id, from the lineage beside the shards."""
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
            raise DataError(f"{path} does not have the hash in the manifest", fix=f"ingot data verify {tokens}")
    with lineage_connection(files.values()) as connection:
        query = "select id, url, file, record_id from lineage where id in (select unnest(?::varchar[]))"
        rows = connection.execute(query, [sorted(wanted)]).fetchall()
    origin = {one: {"url": url, "file": file, "record_id": record} for one, url, file, record in rows}
    if missing := wanted - origin.keys():
        raise DataError(f"the lineage of {tokens} lacks document {min(missing)}", fix=f"ingot data verify {tokens}")
    return origin


def _find_documents(corpus: Path, manifest: TokenManifest, wanted: set[str]) -> dict[str, dict]:
    """Document id -> its line of the corpus, found in one pass over the corpus."""
    path = corpus / MANIFEST
    if not path.exists():
        raise DataError(
            f"the corpus of these tokens is not at {corpus}",
            rule="data build writes OUT/corpus and OUT/tokens; trace goes from one to the other",
            fix="put the corpus folder back beside the tokens folder",
        )
    if (found := sha256_file(path)) != manifest.corpus_sha256:
        raise DataError(
            f"{path} has SHA-256 {found[:12]}.., the tokens were made from {manifest.corpus_sha256[:12]}..",
            rule="a step is traced through the corpus that its tokens were made from",
            fix="restore that corpus, or build the tokens again and train on them",
        )
    origin = {}
    for _, document in read_documents(corpus):
        if document["id"] in wanted:
            origin[document["id"]] = document
            if len(origin) == len(wanted):
                break
    if missing := wanted - origin.keys():
        raise DataError(f"{corpus} lacks document {min(missing)}", rule="tokens are made from documents of the corpus")
    return origin


@dataclass(frozen=True)
class Life:
    """All that is known of a record. row: of its lineage. place: of its tokens, None if it was dropped.

    uses: the samples of the run that was asked about; seen: what that run saw, None without a run.
    """

    row: dict[str, Any]
    place: DocumentLocation | None
    uses: tuple[Use, ...] = ()
    seen: Exposure | None = None


def trace_documents(
    data: Path, *, doc: str = "", url: str = "", run: Path | None = None, limit: int = 20
) -> list[Life]:
    """The lives of the records with this id, or of this page and the pages below it, at most `limit` of them.

    data: a folder of `data build --out`. Raises UsageError for what is no id or URL, DataError without lineage.
    """
    rows = find(data, doc=doc, url=url, under=bool(url), limit=limit)
    by_id = {place.id: place for place in locate_documents(data, {row["id"] for row in rows if not row["rule"]})}
    lives = []
    for row in rows:
        place = by_id.get(row["id"])
        used = uses(run, [row["id"]]) if run and place else ()
        lives.append(Life(row, place, tuple(used), exposure(run, [row["id"]]) if run and place else None))
    return lives


def purges_of(data: Path, *, doc: str = "", url: str = "") -> list[dict[str, Any]]:
    """The purges that removed this document, or a document of this page: lines of purges.jsonl, oldest first."""
    wanted = redacted_hash(canonical_url(url)) if url else ""
    found = []
    for record in read_purges(data):
        if any((doc and one["id"].startswith(doc)) or (wanted and one["url"] == wanted) for one in record["documents"]):
            found.append(record)
    return found
