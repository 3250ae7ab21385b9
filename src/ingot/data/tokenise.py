"""One part of a corpus as tokens, its documents in the order in which shards will hold them.

A document's place among those of its source, and whether it is held out, are hashes of its id. So every part can be
tokenised and sorted by itself, and a shard is a range of hashes: what each part gives to it lies together.

The folder of a tokenised part:
    tokens.bin       token ids of its documents, each followed by the end of text, in the order of `order`
    documents.jsonl  where each one comes from, in the same order
    index.npy        one INDEX_DTYPE row per document, in the same order
    histogram.npy    uint64 [2, BUCKETS]: tokens of training and held-out documents by the leading bits of `order`
"""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np

from ingot.data.corpus import json_line, read_part
from ingot.data.execute.task import Context
from ingot.data.tokenizer.encoder import Encoder, reopen, well_formed
from ingot.rng import derive

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
ORIGIN = ("id", "url", "source", "file", "record_id", "before", "after")  # what documents.jsonl keeps of a row
_BATCH_CHARACTERS = 1 << 20
_GATHER_DOCUMENTS = 1024
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
    spool, lines = context.out / "spool.bin", context.out / "spool.jsonl"
    index = _encode(context, encoder, dtype, spool, lines)
    key = f"shuffle {derive(arguments['seed'], 'shuffle')}"
    index["order"], index["place"] = _hashes(index["id"], key), _hashes(index["id"], "heldout")
    index = index[np.argsort(index["order"], kind="stable")]
    starts, line_starts = index["start"].copy(), index["line"].copy()
    index["start"] = np.cumsum(index["tokens"], dtype=np.uint64) - index["tokens"]
    index["line"] = np.cumsum(index["line_bytes"], dtype=np.uint64) - index["line_bytes"]
    if len(index):
        _gather(np.memmap(spool, dtype, "r"), starts, index["tokens"], context.out / "tokens.bin")
        _gather(np.memmap(lines, np.uint8, "r"), line_starts, index["line_bytes"], context.out / "documents.jsonl")
    spool.unlink()
    lines.unlink()
    np.save(context.out / "index.npy", index)
    np.save(context.out / "histogram.npy", _histogram(index, arguments["heldout_fraction"]))
    ends = [index[index["place"].argmin()], index[index["place"].argmax()]] if len(index) else []
    named = [[int(row["place"]), bytes(row["id"]).hex()] for row in ends]
    return {"documents": len(index), "lowest": named[:1], "highest": named[1:]}


def _encode(context: Context, encoder: Encoder, dtype: np.dtype, spool: Path, lines: Path) -> np.ndarray:
    """Write all documents as they come; returns the index in that order, without hashes."""
    part = context.task.arguments["part"]
    eot = np.array([encoder.eot_id], dtype).tobytes()
    entries: list[tuple] = []
    at = line_at = 0
    batch: list[dict] = []

    def flush(tokens_file, lines_file) -> None:
        nonlocal at, line_at
        texts = [well_formed(row["text"]) for row in batch]
        for row, text, ids in zip(batch, texts, encoder.encode_batch(texts), strict=True):
            line = json_line({name: row.get(name, "") for name in ORIGIN})
            tokens_file.write(ids.astype(dtype).tobytes() + eot)
            lines_file.write(line)
            length = len(ids) + 1
            entries.append((0, 0, at, line_at, len(line), length, len(text.encode()), bytes.fromhex(row["id"])))
            at, line_at = at + length, line_at + len(line)
        batch.clear()

    with spool.open("wb") as tokens_file, lines.open("wb") as lines_file:
        characters = 0
        for number, row in enumerate(read_part(Path(context.task.places["part"]), part["sha256"])):
            context.at(number)
            batch.append(row)
            characters += len(row["text"])
            if characters >= _BATCH_CHARACTERS:
                flush(tokens_file, lines_file)
                characters = 0
        flush(tokens_file, lines_file)
    context.at(-1)
    return np.array(entries, INDEX_DTYPE)


def _hashes(ids: np.ndarray, purpose: str) -> np.ndarray:
    """A uint64 per document id, uniform and independent for every purpose."""
    key = purpose.encode()
    digests = b"".join(hashlib.blake2b(bytes(one), digest_size=8, key=key).digest() for one in ids)
    return np.frombuffer(digests, "<u8")


def _histogram(index: np.ndarray, fraction: float) -> np.ndarray:
    out = heldout(index["place"], fraction)
    buckets = (index["order"] >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
    counted = np.zeros((2, BUCKETS), np.uint64)
    for split, chosen in enumerate((~out, out)):
        np.add.at(counted[split], buckets[chosen], index["tokens"][chosen].astype(np.uint64))
    return counted


def _gather(stream: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: Path) -> None:
    """Write the pieces of `stream` one behind the other."""
    with out.open("wb") as file:
        for at in range(0, len(starts), _GATHER_DOCUMENTS):
            batch = zip(
                starts[at : at + _GATHER_DOCUMENTS].tolist(), lengths[at : at + _GATHER_DOCUMENTS].tolist(), strict=True
            )
            file.write(np.concatenate([stream[start : start + length] for start, length in batch]).tobytes())


class TokenisedPart:
    """A finished folder, for reading: index and tokens stay on disk."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.index = np.load(folder / "index.npy", mmap_mode="r")
        size = (folder / "tokens.bin").stat().st_size if len(self.index) else 0
        self.tokens = np.memmap(folder / "tokens.bin", dtype, "r") if size else np.zeros(0, dtype)
        self._lines = (folder / "documents.jsonl").open("rb") if size else None

    def origin(self, row: int) -> dict:
        """Where document `row` comes from."""
        assert self._lines is not None
        self._lines.seek(int(self.index["line"][row]))
        return json.loads(self._lines.read(int(self.index["line_bytes"][row])))
