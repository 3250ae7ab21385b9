"""The scan after a purge: prove that no purged document is left, and list the documents that share text with one.

Every file of the folder is read. No file may contain a purged id, and no row, URL or decoded document may match the
request. Hashes of some stretches of PROBE_TOKENS tokens of every purged document are used as probes: a document with
such a stretch contains a copy or a quotation, which is reported, but is not an error.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.data.build.corpus import MANIFEST as CORPUS_MANIFEST
from ingot.data.lineage.purge.history import LIST, PURGES, ids_in_layouts, is_redacted
from ingot.data.lineage.purge.request import PurgeRequest, matching
from ingot.data.lineage.purge.rewrite import names_one_of
from ingot.data.lineage.records import SPLITS, DocumentLocation, lineage_connection, locate_documents, rows_of
from ingot.errors import DataError
from ingot.schema.tokens import DOCUMENT_DTYPE, MANIFEST, Shard, TokenManifest, read_token_manifest
from ingot.tokenizer.encoder import Encoder, load_encoder

PROBE_TOKENS = 16
_PROBES = 8  # maximum number of probes per document, evenly spread over it
_CHUNK_TOKENS = 1 << 22
_CHUNK_BYTES = 1 << 24
_KNOWN = (".jsonl.gz", ".parquet", ".tokens", ".blocks", ".documents")  # files that have their own checks
_HEX_ID = re.compile(rb"[0-9a-f]{32}")

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class PurgeProof:
    """The result of the scan: how many corpus rows, token shards and tokens were read, and how many probes there were.

    shared: for each remaining document that shares text, its id and the number of its stretches that equal a probe.
    vocabulary: number of the tokenizer's tokens that match the pattern; the tokenizer was trained on the purged texts
    too.
    """

    rows: int
    shards: int
    tokens: int
    probes: int
    shared: dict[str, int] = field(default_factory=dict)
    vocabulary: int = 0


def hashes_of_stretches(tokens: np.ndarray) -> np.ndarray:
    """Return a uint64 hash of every PROBE_TOKENS consecutive tokens: [n] -> [n - PROBE_TOKENS + 1]."""
    count = max(len(tokens) - PROBE_TOKENS + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset in range(PROBE_TOKENS):
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes += tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)
    hashes ^= hashes >> np.uint64(29)  # the low bits of a product depend only on the low bits of its factors
    return hashes * np.uint64(0xBF58476D1CE4E5B9)


def probes_of(data: Path, found: Collection[DocumentLocation]) -> np.ndarray:
    """Return the hashes (uint64, sorted, unique) of up to eight stretches of each document in `found`, read from their
    shards."""
    probes = [np.empty(0, np.uint64)]
    for split in SPLITS:
        folder = data / "tokens" / split
        dtype = _dtype(read_token_manifest(folder)) if any(p.split == split for p in found) else None
        for place in (p for p in found if p.split == split):
            offset = place.start * np.dtype(dtype).itemsize
            path = folder / f"{place.shard}.tokens"
            hashes = hashes_of_stretches(np.fromfile(path, dtype, place.tokens - 1, offset=offset))
            probes.append(hashes[np.linspace(0, len(hashes) - 1, _PROBES).astype(int)] if len(hashes) else hashes)
    return np.unique(np.concatenate(probes))


def _dtype(manifest: TokenManifest) -> np.dtype:
    return np.dtype(manifest.dtype).newbyteorder("<")


def prove(data: Path, ids: frozenset[str], probes: np.ndarray, request: PurgeRequest, progress: Progress) -> PurgeProof:
    """Read the whole folder, and return the counts. Raises DataError that lists all purged documents that are left.

    ids: the ids of the purged records. probes: from `probes_of`. request: no remaining record may match this request.
    """
    remains: list[str] = []
    matches, rows = request.matcher(), Counter()

    def is_left(row: dict) -> bool:
        rows["seen"] += 1
        return not is_redacted(row) and (row["id"] in ids or matches(row) or names_one_of(row, ids))

    for row in matching(data / "corpus", is_left, lambda done, text: progress(0.4 * done, f"scanning {text}")):
        remains.append(f"document {row['id']} in the corpus")
    remains += [f"document {row['id']} in {row['filename']}" for row in rows_of(data, ids) if not is_redacted(row)]
    remains += [f"document {one}" for one in _in_shard_lineage(data, ids)]
    remains += [f"document {p.id} in the index of {p.split}/{p.shard}" for p in locate_documents(data, ids)]
    remains += [f"a document in {path}" for path in ids_in_layouts(data, ids)]
    remains += _in_other_files(data, ids)
    shards = list(_shards(data))
    encoder = _encoder(data) if request.pattern and shards else None
    shared: Counter[str] = Counter()
    for number, (split, manifest, shard) in enumerate(shards):
        progress(0.4 + 0.6 * number / len(shards), f"scanning {split}/{shard.name}")
        folder = data / "tokens" / split
        shared.update(_documents_with_probes(folder, manifest, shard, probes))
        if encoder:
            remains += _matching_documents(folder, manifest, shard, encoder, re.compile(request.pattern))
    if remains:
        raise DataError(
            "E-PURGE-REMAINS",
            "the purge left:\n  " + "\n  ".join(remains[:20]),
            rule="after a purge, nothing of the purged documents is left in the folder",
            fix="run the same command again; if the error remains, please report it with this message",
            remains=remains,
        )
    vocabulary = _vocabulary_matches(encoder, request.pattern) if encoder else 0
    tokens = sum(shard.tokens for _, _, shard in shards)
    return PurgeProof(rows["seen"], len(shards), tokens, len(probes), dict(shared.most_common()), vocabulary)


def _shards(data: Path) -> Iterator[tuple[str, TokenManifest, Shard]]:
    for split in SPLITS:
        if (data / "tokens" / split / MANIFEST).exists():
            manifest = read_token_manifest(data / "tokens" / split)
            yield from ((split, manifest, shard) for shard in manifest.shards)


def _in_shard_lineage(data: Path, ids: frozenset[str]) -> list[str]:
    files = sorted((data / "tokens").glob("*/*.lineage.parquet"))
    if not files:
        return []
    with lineage_connection(files) as connection:
        query = "select id, filename from lineage where id in (select unnest(?::varchar[]))"
        return [f"{one} in {name}" for one, name in connection.execute(query, [sorted(ids)]).fetchall()]


def _in_other_files(data: Path, ids: frozenset[str]) -> Iterator[str]:
    """Yield a line for each file that contains a purged id. Kinds of files that other checks read are skipped."""
    wanted = {one.encode() for one in ids}
    for path in sorted(p for p in data.rglob("*") if p.is_file()):
        if path.name.endswith(_KNOWN) or path.name in (PURGES, LIST, CORPUS_MANIFEST):
            continue
        with path.open("rb") as file:
            tail = b""
            while chunk := file.read(_CHUNK_BYTES):
                if found := wanted.intersection(_HEX_ID.findall(tail + chunk)):
                    yield f"document {min(found).decode()} in {path}"
                    break
                tail = chunk[-31:]


def _documents_with_probes(folder: Path, manifest: TokenManifest, shard: Shard, probes: np.ndarray) -> Iterator[str]:
    """Search a shard for `probes` (sorted hashes of stretches of PROBE_TOKENS tokens).

    Yield, for each match, the id of the document in which it starts.
    """
    if not len(probes):
        return
    index = np.fromfile(folder / f"{shard.name}.documents", DOCUMENT_DTYPE)
    tokens = np.memmap(folder / f"{shard.name}.tokens", _dtype(manifest), "r")
    for at in range(0, len(tokens), _CHUNK_TOKENS):
        hashes = hashes_of_stretches(tokens[at : at + _CHUNK_TOKENS + PROBE_TOKENS - 1])
        near = np.searchsorted(probes, hashes)  # np.isin would sort all hashes
        near[near == len(probes)] = 0
        for hit in np.flatnonzero(probes[near] == hashes):
            row = index[np.searchsorted(index["start"], at + int(hit), side="right") - 1]
            yield bytes(row["id"]).hex()


def _encoder(data: Path) -> Encoder:
    manifest = next(manifest for _, manifest, _ in _shards(data))
    return load_encoder(data / "tokens" / "tokenizer.json", eot=manifest.eot_id)


def _matching_documents(
    folder: Path, manifest: TokenManifest, shard: Shard, encoder: Encoder, pattern: re.Pattern
) -> Iterator[str]:
    index = np.fromfile(folder / f"{shard.name}.documents", DOCUMENT_DTYPE)
    tokens = np.memmap(folder / f"{shard.name}.tokens", _dtype(manifest), "r")
    for row in index:
        start = int(row["start"])
        if pattern.search(encoder.decode(tokens[start : start + int(row["tokens"]) - 1])):
            yield f"text that matches, in the tokens of document {bytes(row['id']).hex()} in {folder / shard.name}"


def _vocabulary_matches(encoder: Encoder, pattern: str) -> int:
    search = re.compile(pattern).search
    return sum(bool(search(encoder.decode([token]))) for token in range(encoder.vocab_size))
