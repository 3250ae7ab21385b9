"""Find rows that equal an earlier row, in many parts and bounded memory. A row is the hash of a URL or a whole text.

Rows go to partitions by hash, each partition is sorted separately, and the rows found are put back in the order of the
parts. The result depends only on the rows and their order. Only distinct keys are kept between pieces, so a key that
fills half of the corpus costs no more than any other.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_digest

from ingot.data.dedup.arrays import PIECE, ArrayFile, ArrayWriter, Partitions, by_hash, partitions_for

EQUAL = np.dtype([("part", "<u4"), ("row", "<u4"), ("first_part", "<u4"), ("first_row", "<u4")])
_ROW_BYTES = 96  # memory per row while a partition is sorted: keys, numbers, order and their copies
_FOUND = np.dtype([("row", "<u8"), ("first", "<u8")])


def text_hash(text: str) -> bytes:
    """Return the XXH3-128 hash (16 bytes, as two little-endian uint64) of the words of `text`, joined by single spaces.

    Whitespace is ignored, because two extractions of one page differ in it. Case matters: this stage has no threshold
    and no verification, so it drops only texts that look equal to a reader; near-duplicate search ignores case.
    Among 10^10 different texts the probability of a false match is 10^-19.
    """
    return xxh3_128_digest(" ".join(text.split()).encode("utf-8", "surrogatepass"))[::-1]


def firsts(parts: Sequence[np.ndarray | Path], out: Path, *, limit_bytes: int = 256 << 20) -> np.ndarray:
    """Return every row that equals an earlier row, with the first equal row, as EQUAL records, ascending; the result
    is mapped from the file `out`.

    parts: hashes in corpus order; a part is an array uint64 [rows], or [rows, 2] for 128 bits, or an .npy file of such
    an array, with up to 2^32 rows. limit_bytes: approximate memory limit for sorting. Scratch files, as large as the
    parts, are next to `out`.
    """
    sizes = [len(ArrayFile(part)) if isinstance(part, Path) else len(part) for part in parts]
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.uint64))).astype(np.uint64)
    numbered = (
        (int(start), keys) for start, part in zip(starts, parts, strict=False) for start, keys in _rows(part, start)
    )
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch, ArrayWriter(out, EQUAL) as writer:
        for found in equal_rows(numbered, int(starts[-1]), Path(scratch), limit_bytes):
            records = np.empty(len(found), EQUAL)
            for name, numbers in (("", found["row"]), ("first_", found["first"])):
                part = np.searchsorted(starts, numbers, side="right") - 1
                records[f"{name}part"], records[f"{name}row"] = part, numbers - starts[part]
            writer.append(records)
    return np.load(out, mmap_mode="r") if writer.rows else np.empty(0, EQUAL)


def rows_of(found: np.ndarray, part: int) -> np.ndarray:
    """Return the records of `found`, the result of `firsts`, whose row is in `part`."""
    return found[np.searchsorted(found["part"], part) : np.searchsorted(found["part"], part, side="right")]


def _rows(part: np.ndarray | Path, start: int) -> Iterator[tuple[int, np.ndarray]]:
    if isinstance(part, Path):
        file = ArrayFile(part)
        width = file.shape[1] if len(file.shape) == 2 else 1
        pieces = (keys.reshape(-1, width) for keys in file.pieces(rows=width * PIECE))
    else:
        rows = part if part.ndim == 2 else part[:, None]
        pieces = (rows[first : first + PIECE] for first in range(0, len(rows), PIECE))
    for keys in pieces:
        yield int(start), keys
        start += len(keys)


def equal_rows(
    numbered: Iterable[tuple[int, np.ndarray]], total: int, scratch: Path, limit_bytes: int
) -> Iterator[np.ndarray]:
    """Yield blocks of records (row, first equal row), ascending by row, for every row that equals an earlier row.

    numbered: pairs (number of the first row, keys uint64 [rows, 1 or 2]), ascending. total: number of all rows.
    scratch: the folder for scratch files.
    """
    count = partitions_for(total, _ROW_BYTES, limit_bytes)
    spread: Partitions | None = None
    for start, keys in numbered:
        if spread is None:
            dtype = np.dtype([("key", "<u8", (keys.shape[1],)), ("row", "<u8")])
            spread = Partitions(scratch / "keys", count, dtype, limit_bytes // 4)
        records = np.empty(len(keys), spread.dtype)
        records["key"], records["row"] = keys, np.arange(start, start + len(keys), dtype=np.uint64)
        spread.append(records, by_hash(records["key"][:, 0], count))
    if spread is None:
        return
    ranges = partitions_for(total, _ROW_BYTES, limit_bytes)
    found = Partitions(scratch / "found", ranges, _FOUND, limit_bytes // 4)
    for number in range(count):
        for block in _equal_in(spread.take(number, max(limit_bytes // _ROW_BYTES, 1))):
            found.append(block, (block["row"] // np.uint64(-(-total // ranges))).astype(np.uint32))
    for number in range(ranges):
        block = found.take_all(number)
        if len(block):
            yield block[np.argsort(block["row"])]


def _equal_in(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    known: np.ndarray | None = None  # for each key so far, its first row
    for piece in pieces:
        rows = piece if known is None else np.concatenate((known, piece))
        order = _order(rows["key"])
        rows = rows[order]
        new = np.ones(len(rows), bool)
        new[1:] = (rows["key"][1:] != rows["key"][:-1]).any(axis=1)
        first = rows["row"][new][np.cumsum(new) - 1]
        later = ~new  # a known row is always the first of its key
        block = np.empty(int(later.sum()), _FOUND)
        block["row"], block["first"] = rows["row"][later], first[later]
        known = rows[new]
        yield block


def _order(keys: np.ndarray) -> np.ndarray:
    """Return the indices that sort `keys`, uint64 [rows, 1 or 2]. The sort is stable: equal keys stay in corpus
    order."""
    order = np.argsort(keys[:, 0], kind="stable")
    if keys.shape[1] == 2:
        a = keys[order]
        tied = a[1:, 0] == a[:-1, 0]
        if (a[1:, 1] != a[:-1, 1])[tied].any():  # different keys share their first 64 bits: sort by both halves
            return np.lexsort((keys[:, 1], keys[:, 0]))
    return order
