"""The task that writes one token shard: the documents of a range of hashes, from all tokenized files of a source."""

import json
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.build.tokenize import BUCKET_BITS, BUCKETS, TokenizedFolder, TokenizedPart, TokenizedWriter, heldout
from ingot.data.lineage.records import write_shard_lineage
from ingot.data.lineage.verify import block_digests
from ingot.data.tasks.task import Attempt, TaskGroup, task_function
from ingot.schema.tokens import DOCUMENT_DTYPE, Shard
from ingot.storage import sha256_bytes, sha256_file


@dataclass(frozen=True, kw_only=True)
class WriteShard:
    """Settings of `write_shard`.

    parts: the tokenized files of the source. buckets: the shard's range of hash buckets, [first, second). heldout: True
    for a shard of the held-out split. moved: id of the one document that is moved to the other split, or "".
    """

    name: str
    source: str
    heldout: bool
    moved: str
    buckets: tuple[int, int]
    dtype: str
    block_bytes: int
    heldout_fraction: float
    parts: TaskGroup[TokenizedPart]


@task_function("write_shard")
def write_shard(specification: WriteShard, attempt: Attempt) -> Shard | None:
    """Write the shard of a range of hash buckets from all tokenized files of a source. Return None if it is empty.

    The documents of each file are first copied into scratch files, file after file, and then sorted. So one tokenized
    file is open at a time, and memory is 16 bytes per document.
    """
    dtype = np.dtype(specification.dtype).newbyteorder("<")
    path = attempt.out / f"{specification.name}.tokens"
    scratch = attempt.out / "scratch"
    scratch.mkdir()
    if not (documents := _collect(specification, attempt, dtype, scratch)):
        shutil.rmtree(scratch)
        return None
    collected = TokenizedFolder(scratch, dtype)
    order = np.argsort(collected.index["order"], kind="stable")
    start = text_bytes = 0
    with path.open("wb") as file, path.with_suffix(".documents").open("wb") as index_file:
        for rows, tokens, _ in collected.taken(order):
            attempt.at(-1)
            index = np.zeros(len(rows), DOCUMENT_DTYPE)
            index["tokens"], index["id"] = rows["tokens"], rows["id"]
            index["start"] = start + np.cumsum(rows["tokens"], dtype=np.uint64) - rows["tokens"]
            index_file.write(index.tobytes())
            file.write(tokens.tobytes())
            start, text_bytes = start + len(tokens), text_bytes + int(rows["text_bytes"].sum())
    blocks = block_digests(path, specification.block_bytes)
    path.with_suffix(".blocks").write_bytes(blocks)
    lineage = write_shard_lineage(path.with_suffix(".lineage.parquet"), _lineage(attempt, collected, order))
    shutil.rmtree(scratch)
    return Shard(
        name=specification.name,
        source=specification.source,
        tokens=start,
        documents=documents,
        text_bytes=text_bytes,
        blocks_sha256=sha256_bytes(blocks),
        documents_sha256=sha256_file(path.with_suffix(".documents")),
        lineage_sha256=lineage,
    )


def _collect(specification: WriteShard, attempt: Attempt, dtype: np.dtype, scratch: Path) -> int:
    """Write the shard's documents into `scratch` as the files of a tokenized file. Return the number of documents."""
    with TokenizedWriter(scratch) as writer:
        for folder in specification.parts.folders:
            attempt.at(-1)
            part = TokenizedFolder(folder, dtype)
            for rows, tokens, lines in part.taken(_chosen(part, specification)):
                writer.append(rows, tokens, lines)
    return writer.documents


def _chosen(part: TokenizedFolder, specification: WriteShard) -> np.ndarray:
    """Return the rows of a tokenized file that belong to the shard, ascending."""
    low, high = specification.buckets
    order, shift = part.index["order"], 64 - BUCKET_BITS
    # bisect reads a few rows; numpy's searchsorted would read and copy the whole column.
    first = bisect_left(order, np.uint64(low << shift))
    last = bisect_left(order, np.uint64(high << shift)) if high < BUCKETS else len(order)
    entries = part.index[first:last]
    out = heldout(entries["place"], specification.heldout_fraction)
    if specification.moved:
        out ^= entries["id"] == np.void(bytes.fromhex(specification.moved))
    return first + np.flatnonzero(out == specification.heldout)


def _lineage(attempt: Attempt, part: TokenizedFolder, order: np.ndarray) -> Iterator[dict]:
    """Yield the origin of every document of a shard, and the range of its tokens in the shard."""
    start = 0
    for rows, _, lines in part.taken(order):
        attempt.at(-1)
        for line, tokens in zip(lines.tobytes().splitlines(), rows["tokens"].tolist(), strict=True):
            yield {"start": start, "tokens": tokens} | json.loads(line)
            start += tokens
