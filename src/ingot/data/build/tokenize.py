"""Tokenize one file of a corpus, and sort its documents into the order in which shards hold them.

Two hashes of a document's id decide its place among the documents of its source, and whether it is held out. So every
file is tokenized and sorted alone, and a shard is a range of hashes: its documents are contiguous in every file.

The folder of a tokenized file:
    tokens.bin       token ids of the documents, each followed by the end of text, in the order of `order`
    documents.jsonl  the origin of each document, in the same order
    index.bin        one INDEX_DTYPE row per document, in the same order
    histogram.npy    HISTOGRAM_DTYPE: tokens of training and held-out documents by the leading bits of `order`
"""

import functools
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ingot.data.build.corpus import json_line, read_part
from ingot.data.dedup.arrays import starts
from ingot.data.tasks.task import PLACE, Attempt, task_function
from ingot.rng import derive
from ingot.tokenizer.byte_bpe import well_formed
from ingot.tokenizer.encoder import Encoder, reopen

BUCKET_BITS = 16
BUCKETS = 1 << BUCKET_BITS
# order: hash that decides the document's position in its source; place: hash that decides its split; start: position
# of its first token in tokens.bin; line, line_bytes: position and length of its row in documents.jsonl; text_bytes:
# length of its text
INDEX_DTYPE = [
    ("order", "<u8"),
    ("place", "<u8"),
    ("start", "<u8"),
    ("line", "<u8"),
    ("line_bytes", "<u4"),
    ("tokens", "<u4"),
    ("text_bytes", "<u4"),
    ("id", "V16"),
]
HISTOGRAM_DTYPE = [("bucket", "<u2"), ("tokens", "<u8", (2,))]  # ascending; buckets without documents are left out
ORIGIN = ("id", "url", "source", "file", "record_id", "before", "after")  # the fields of a row in documents.jsonl
_BATCH_CHARACTERS = 1 << 20  # text in memory at once; each document counts _LINE_CHARACTERS more, even an empty one
_LINE_CHARACTERS = 200
_GATHER_DOCUMENTS = 1024  # documents whose tokens are copied at once
_reopened = functools.lru_cache(maxsize=1)(reopen)  # a worker tokenizes many files with one encoder


def heldout(places: np.ndarray, fraction: float) -> np.ndarray:
    """Return a bool per document: True if the document is held out, because its hash is in the lowest `fraction`."""
    return places < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Settings of `tokenize`.

    name, sha256: name and hash of the corpus file. tokenizer_sha256, eot, notice: arguments to open the encoder
    (tokenizer/encoder.py: reopen). path, tokenizer: paths of the corpus file and of tokenizer.json.
    """

    name: str
    sha256: str
    tokenizer_sha256: str
    eot: str
    notice: str
    dtype: str
    seed: int
    heldout_fraction: float
    path: Annotated[Path, PLACE]
    tokenizer: Annotated[Path, PLACE]


@dataclass(frozen=True, order=True)
class PlacedDocument:
    """The hash of a document that decides its split, and the document's id."""

    place: int
    id: str


@dataclass(frozen=True)
class TokenizedPart:
    """The result for one corpus file: the number of documents, and those with the lowest and highest hash `place`.

    If a split of a small source gets no document by chance, one of these two is moved into that split.
    """

    documents: int
    lowest: PlacedDocument | None
    highest: PlacedDocument | None


@task_function("tokenize")
def tokenize(specification: Tokenize, attempt: Attempt) -> TokenizedPart:
    """Write the folder of a tokenized file. Raises DataError if the corpus file is damaged."""
    encoder = _reopened(
        specification.tokenizer, specification.tokenizer_sha256, specification.eot, specification.notice
    )
    dtype = np.dtype(specification.dtype).newbyteorder("<")
    fresh = attempt.out / "fresh"
    fresh.mkdir()
    _encode(specification, attempt, encoder, dtype, fresh)
    index = mapped(fresh / "index.bin", INDEX_DTYPE)
    order = np.argsort(index["order"], kind="stable")
    with TokenizedWriter(attempt.out) as writer:
        for rows, tokens, lines in TokenizedFolder(fresh, dtype).taken(order):
            writer.append(rows, tokens, lines)
    np.save(attempt.out / "histogram.npy", _histogram(index, order, specification.heldout_fraction))
    shutil.rmtree(fresh)
    if not len(index):
        return TokenizedPart(0, None, None)
    lowest, highest = _placed(index[index["place"].argmin()]), _placed(index[index["place"].argmax()])
    return TokenizedPart(len(index), lowest, highest)


def _placed(row: np.void) -> PlacedDocument:
    return PlacedDocument(int(row["place"]), bytes(row["id"]).hex())


def _encode(specification: Tokenize, attempt: Attempt, encoder: Encoder, dtype: np.dtype, out: Path) -> None:
    """Write the folder of a tokenized file, but with the documents still in the order of the corpus file."""
    key = f"shuffle {derive(specification.seed, 'shuffle')}"
    eot = np.array([encoder.eot_id], dtype)
    batch: list[dict] = []

    def flush() -> None:
        texts = [well_formed(row["text"]) for row in batch]
        tokens = [np.append(ids.astype(dtype), eot) for ids in encoder.encode_batch(texts)]
        lines = [json_line({name: row.get(name, "") for name in ORIGIN}) for row in batch]
        index = np.zeros(len(batch), INDEX_DTYPE)
        index["tokens"], index["line_bytes"] = [len(ids) for ids in tokens], [len(line) for line in lines]
        index["text_bytes"] = [len(text.encode()) for text in texts]
        index["id"] = [np.void(bytes.fromhex(row["id"])) for row in batch]
        index["order"], index["place"] = _hashes(index["id"], key), _hashes(index["id"], "heldout")
        writer.append(index, np.concatenate(tokens), np.frombuffer(b"".join(lines), np.uint8))
        batch.clear()

    with TokenizedWriter(out) as writer:
        characters = 0
        for number, row in enumerate(read_part(specification.path, specification.sha256)):
            attempt.at(number)
            batch.append(row)
            characters += len(row["text"]) + _LINE_CHARACTERS
            if characters >= _BATCH_CHARACTERS:
                flush()
                characters = 0
        if batch:
            flush()
    attempt.at(-1)


def _hashes(ids: np.ndarray, purpose: str) -> np.ndarray:
    """Return a uniform uint64 hash of each document id. Hashes for different purposes are independent."""
    key = purpose.encode()
    digests = b"".join(hashlib.blake2b(bytes(one), digest_size=8, key=key).digest() for one in ids)
    return np.frombuffer(digests, "<u8")


def _histogram(index: np.ndarray, order: np.ndarray, fraction: float) -> np.ndarray:
    """Return HISTOGRAM_DTYPE rows: tokens per bucket. order: the permutation that sorts `index` by its `order`."""
    buckets = (index["order"][order] >> np.uint64(64 - BUCKET_BITS)).astype(np.uint16)
    out, tokens = heldout(index["place"], fraction)[order], index["tokens"][order].astype(np.uint64)
    firsts = np.flatnonzero(starts(buckets))
    counted = np.zeros(len(firsts), HISTOGRAM_DTYPE)
    counted["bucket"] = buckets[firsts]
    if len(firsts):
        counted["tokens"][:, 0] = np.add.reduceat(tokens * ~out, firsts)
        counted["tokens"][:, 1] = np.add.reduceat(tokens * out, firsts)
    return counted


def mapped(path: Path, dtype) -> np.ndarray:
    """Return the rows of a file, mapped into memory; an empty file gives an empty array."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


class TokenizedWriter:
    """A writer of tokens.bin, documents.jsonl and index.bin in a folder. Documents are written without gaps."""

    def __init__(self, folder: Path):
        self.documents = self._tokens = self._bytes = 0
        self._files = [(folder / name).open("wb") for name in ("index.bin", "tokens.bin", "documents.jsonl")]

    def __enter__(self) -> "TokenizedWriter":
        return self

    def __exit__(self, *exc) -> None:
        for file in self._files:
            file.close()

    def append(self, index: np.ndarray, tokens: np.ndarray, lines: np.ndarray) -> None:
        """Add n documents. index: INDEX_DTYPE [n]; its `start` and `line` are set here.

        tokens, lines: those of all n documents, concatenated.
        """
        index["start"] = self._tokens + np.cumsum(index["tokens"], dtype=np.uint64) - index["tokens"]
        index["line"] = self._bytes + np.cumsum(index["line_bytes"], dtype=np.uint64) - index["line_bytes"]
        self.documents, self._tokens, self._bytes = (
            self.documents + len(index), self._tokens + len(tokens), self._bytes + len(lines)
        )  # fmt: skip
        for file, values in zip(self._files, (index, tokens, lines), strict=True):
            file.write(values.tobytes())


class TokenizedFolder:
    """The folder of a tokenized file, mapped into memory. Three files stay open as long as the object exists."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.index = mapped(folder / "index.bin", INDEX_DTYPE)
        self.tokens, self.lines = mapped(folder / "tokens.bin", dtype), mapped(folder / "documents.jsonl", np.uint8)

    def taken(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (index, tokens, lines) for batches of the documents `rows`, in that order."""
        for at in range(0, len(rows), _GATHER_DOCUMENTS):
            index = self.index[rows[at : at + _GATHER_DOCUMENTS]]
            tokens = _pieces(self.tokens, index["start"], index["tokens"])
            yield index, tokens, _pieces(self.lines, index["line"], index["line_bytes"])


def _pieces(stream: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the slices of `stream` with these starts and lengths, concatenated."""
    return np.concatenate(
        [stream[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    )
