"""One part of a corpus as tokens, its documents in the order in which shards will hold them.

A document's place among those of its source, and whether it is held out, are hashes of its id. So every part can be
tokenised and sorted by itself, and a shard is a range of hashes: what each part gives to it lies together.

The folder of a tokenised part:
    tokens.bin       token ids of its documents, each followed by the end of text, in the order of `order`
    documents.jsonl  where each one comes from, in the same order
    index.bin        one INDEX_DTYPE row per document, in the same order
    histogram.npy    HISTOGRAM_DTYPE: tokens of training and held-out documents by the leading bits of `order`
"""

import functools
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.data.build.corpus import json_line, read_part
from ingot.data.dedup.arrays import starts
from ingot.data.tasks.task import Context
from ingot.rng import derive
from ingot.tokenizer.encoder import Encoder, reopen, well_formed

BUCKET_BITS = 16
BUCKETS = 1 << BUCKET_BITS
# order: hash that decides the place in the source; place: hash that decides the split; row: number in the part;
# start: first token in tokens.bin; line, line_bytes: in documents.jsonl
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
ORIGIN = ("id", "url", "source", "file", "record_id", "before", "after")  # what documents.jsonl keeps of a row
_BATCH_CHARACTERS = 1 << 20  # of text in memory, its lines as _LINE_CHARACTERS each: there may be many empty ones
_LINE_CHARACTERS = 200
_GATHER_DOCUMENTS = 1024  # whose tokens are copied at once
_reopened = functools.lru_cache(maxsize=1)(reopen)  # a worker tokenises part after part


def heldout(places: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out by their hash alone: those in the lowest `fraction`."""
    return places < np.uint64(min(int(fraction * 2**64), 2**64 - 1))


def tokenise(context: Context) -> dict:
    """Task. arguments: part (name, sha256), tokenizer (sha256), eot, notice, dtype, seed, heldout_fraction.

    places: part, tokenizer (paths). Returns documents, lowest and highest ([place, id] of the documents with the
    lowest and highest place: a source that is too small to have both splits by chance gives one of them).
    Raises DataError for a part that is damaged.
    """
    arguments, places = context.task.arguments, context.task.places
    encoder = _reopened(Path(places["tokenizer"]), arguments["tokenizer"], arguments["eot"], arguments["notice"])
    dtype = np.dtype(arguments["dtype"]).newbyteorder("<")
    fresh = context.out / "fresh"
    fresh.mkdir()
    _encode(context, encoder, dtype, fresh)
    index = mapped(fresh / "index.bin", INDEX_DTYPE)
    order = np.argsort(index["order"], kind="stable")
    with PartWriter(context.out) as writer:
        for rows, tokens, lines in TokenisedPart(fresh, dtype).taken(order):
            writer.append(rows, tokens, lines)
    np.save(context.out / "histogram.npy", _histogram(index, order, arguments["heldout_fraction"]))
    ends = [index[index["place"].argmin()], index[index["place"].argmax()]] if len(index) else []
    named = [[int(row["place"]), bytes(row["id"]).hex()] for row in ends]
    shutil.rmtree(fresh)
    return {"documents": len(index), "lowest": named[:1], "highest": named[1:]}


def _encode(context: Context, encoder: Encoder, dtype: np.dtype, out: Path) -> None:
    """All documents as they come, in the layout of a tokenised part."""
    part = context.task.arguments["part"]
    key = f"shuffle {derive(context.task.arguments['seed'], 'shuffle')}"
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

    with PartWriter(out) as writer:
        characters = 0
        for number, row in enumerate(read_part(Path(context.task.places["part"]), part["sha256"])):
            context.at(number)
            batch.append(row)
            characters += len(row["text"]) + _LINE_CHARACTERS
            if characters >= _BATCH_CHARACTERS:
                flush()
                characters = 0
        if batch:
            flush()
    context.at(-1)


def _hashes(ids: np.ndarray, purpose: str) -> np.ndarray:
    """A uint64 per document id, uniform and independent for every purpose."""
    key = purpose.encode()
    digests = b"".join(hashlib.blake2b(bytes(one), digest_size=8, key=key).digest() for one in ids)
    return np.frombuffer(digests, "<u8")


def _histogram(index: np.ndarray, order: np.ndarray, fraction: float) -> np.ndarray:
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
    """A file of rows, mapped; a file without any cannot be."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


class PartWriter:
    """Writes tokens.bin, documents.jsonl and index.bin into a folder, documents back to back."""

    def __init__(self, folder: Path):
        self.documents = self._tokens = self._bytes = 0
        self._files = [(folder / name).open("wb") for name in ("index.bin", "tokens.bin", "documents.jsonl")]

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *exc) -> None:
        for file in self._files:
            file.close()

    def append(self, index: np.ndarray, tokens: np.ndarray, lines: np.ndarray) -> None:
        """index: INDEX_DTYPE [n], its `start` and `line` are set here; tokens, lines: of these documents."""
        index["start"] = self._tokens + np.cumsum(index["tokens"], dtype=np.uint64) - index["tokens"]
        index["line"] = self._bytes + np.cumsum(index["line_bytes"], dtype=np.uint64) - index["line_bytes"]
        self.documents, self._tokens, self._bytes = (
            self.documents + len(index), self._tokens + len(tokens), self._bytes + len(lines)
        )  # fmt: skip
        for file, values in zip(self._files, (index, tokens, lines), strict=True):
            file.write(values.tobytes())


class TokenisedPart:
    """A folder of a part, mapped for reading. Three files are open while it is used."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.index = mapped(folder / "index.bin", INDEX_DTYPE)
        self.tokens, self.lines = mapped(folder / "tokens.bin", dtype), mapped(folder / "documents.jsonl", np.uint8)

    def taken(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Index, tokens and lines of the documents `rows`, in that order, some at a time."""
        for at in range(0, len(rows), _GATHER_DOCUMENTS):
            index = self.index[rows[at : at + _GATHER_DOCUMENTS]]
            tokens = _pieces(self.tokens, index["start"], index["tokens"])
            yield index, tokens, _pieces(self.lines, index["line"], index["line_bytes"])


def _pieces(stream: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [stream[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
    )
