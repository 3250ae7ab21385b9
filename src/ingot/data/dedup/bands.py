"""Candidate pairs by locality-sensitive hashing (Indyk & Motwani 1998), from files, in bounded memory and linear time.

Every processed input file has a folder of signatures (`write_bands`):
    keys.npy        uint64 [bands + 1, documents]: a hash of each band's rows; the last row hashes the whole signature
    signatures.npy  uint8 [documents, permutations]: the low byte of every place, enough to estimate similarity
                    (b-bit minwise hashing, Li & König 2010: unequal places agree once in 256)
Documents are numbered consecutively over all folders. One task per row of the keys collects the documents of all
folders that share a key (`band_candidates`), and `merge_candidates` merges the results of the tasks.
A pair is one uint64 with the later document in its upper half, so that sorted pairs are sorted by (later, earlier). A
document is the later document of a bounded number of pairs, and the earlier document of any number.

Big buckets. In a bucket of up to WINDOW + 1 different signatures, all pairs are compared. In a bigger bucket
(boilerplate, templates), the first member is compared with all others, and those that are almost surely similar to it
are removed; this is done LEADERS times, then each remaining member is compared with the WINDOW members before it. So a
bucket of k members costs at most (LEADERS + WINDOW) * k comparisons, and has at most that many candidates. A pair can
be missed if its members are in a big bucket, more than WINDOW apart, and neither is a leader. If one was removed, the
leader nearly always connects the cluster; also, the pair may share other bands. docs/design/dedup.md has the measured
loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ingot.data.dedup.arrays import (
    PIECE,
    ArrayFile,
    ArrayWriter,
    Partitions,
    by_hash,
    partitions_for,
    sorted_set,
    starts,
)
from ingot.data.dedup.equal import equal_rows
from ingot.data.dedup.minhash import DedupRules
from ingot.errors import DataError

WINDOW = 32
LEADERS = 8
_SETTLED = 3  # an estimate this many standard errors above the threshold is wrong for one pair in a thousand
_ROW_BYTES = 96  # memory per document while a partition of keys is processed
_PAIR_BYTES = 16 * (LEADERS + WINDOW)  # most memory per document while its pairs are sorted
_PAIRS_AT_ONCE = 1 << 18  # pairs whose signatures are in memory: 64 MiB at 128 permutations
_MOST_DOCUMENTS = 2**32 - 1
_KEYED = np.dtype([("key", "<u8"), ("number", "<u4")])
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def write_bands(signatures: np.ndarray, rules: DedupRules, folder: Path) -> None:
    """Write the signatures of one processed input file into the existing `folder`. signatures: uint32 [documents,
    permutations], in the order of the documents."""
    columns = np.ascontiguousarray(signatures.T)
    keys = [_key(columns[band * rules.rows : (band + 1) * rules.rows]) for band in range(rules.bands)]
    np.save(folder / "keys.npy", np.array([*keys, _key(columns)], "<u8"))
    np.save(folder / "signatures.npy", signatures.astype(np.uint8))


def join_folders(folders: Sequence[Path], rules: DedupRules, out: Path) -> None:
    """Join several folders, in their order, into the existing folder `out`. Raises DataError as SignatureFolders does.

    A search opens every folder once per quarter of a million pairs, which takes 0.1 ms, so a thousand large folders
    are better than many small folders.
    """
    source = SignatureFolders(folders, rules)
    with ArrayWriter(out / "keys.npy", "<u8", (rules.bands + 1, -1)) as file:
        for band in range(rules.bands + 1):
            for _, keys in source.keys(band):
                file.append(keys)
    with ArrayWriter(out / "signatures.npy", "u1", (-1, rules.permutations)) as file:
        for folder in folders:
            for piece in ArrayFile(folder / "signatures.npy").pieces(rows=rules.permutations * PIECE):
                file.append(piece)


def _key(columns: np.ndarray) -> np.ndarray:
    """Return a hash of each document's n values, uint64 [documents]. columns: uint32 [n, documents]."""
    key = np.zeros(columns.shape[1], np.uint64)
    for column in columns:
        key = key * _MULTIPLIER + column + np.uint64(1)
        key ^= key >> np.uint64(29)
    return key


class SignatureFolders:
    """The documents of many folders, by number. Files are opened one at a time, when they are read."""

    def __init__(self, folders: Sequence[Path], rules: DedupRules):
        """Open `folders`. Raises DataError for a folder made with other rules, or too many documents for one search."""
        self.folders, self.rules = list(folders), rules
        sizes = []
        for folder in self.folders:
            keys, signatures = ArrayFile(folder / "keys.npy"), ArrayFile(folder / "signatures.npy")
            if keys.shape[0] != rules.bands + 1 or signatures.shape != (keys.shape[1], rules.permutations):
                raise DataError(
                    "E-DEDUP-RULES-DIFFER",
                    f"{folder} has {keys.shape[0] - 1} bands and {signatures.shape[1]} permutations in all",
                    rule=f"only signatures of the same rules can be compared: {rules.ran}",
                    fix="compute the signatures of this folder again with these rules",
                    folder=str(folder),
                    bands=keys.shape[0] - 1,
                    permutations=signatures.shape[1],
                )
            sizes.append(keys.shape[1])
        self.starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)
        if self.documents > _MOST_DOCUMENTS:
            raise DataError(
                "E-DEDUP-TOO-MANY",
                f"{self.documents:,} documents in one search for near-duplicates",
                rule=f"one search takes at most {_MOST_DOCUMENTS:,} documents: their numbers have 32 bits",
                fix="build each crawl separately, and name the index of the earlier builds with --against",
                documents=self.documents,
                limit=_MOST_DOCUMENTS,
            )

    @property
    def documents(self) -> int:
        return int(self.starts[-1])

    def keys(self, band: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (number of the first document, keys of consecutive documents, uint64 [n]) through all folders. For
        band = `rules.bands`, the keys are the hashes of whole signatures."""
        for folder, start in zip(self.folders, self.starts.tolist(), strict=False):
            file = ArrayFile(folder / "keys.npy")
            documents = file.shape[1]
            for piece in file.pieces(band * documents, (band + 1) * documents):
                yield start, piece
                start += len(piece)

    def whole_keys(self, numbers: np.ndarray) -> np.ndarray:
        """Return the hash of the whole signature of each document in `numbers`, uint64 [len(numbers)]."""
        return self._gather(numbers, "keys.npy", np.empty(len(numbers), np.uint64), lambda array: array[-1])

    def estimates(self, earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
        """Return the estimated Jaccard similarity of each pair of documents, float32 [pairs]."""
        found = np.empty(len(earlier), np.float32)
        for first in range(0, len(earlier), _PAIRS_AT_ONCE):
            chunk = slice(first, first + _PAIRS_AT_ONCE)
            agree = np.count_nonzero(self.signatures(earlier[chunk]) == self.signatures(later[chunk]), axis=1)
            found[chunk] = (agree / self.rules.permutations - 1 / 256) / (1 - 1 / 256)
        return found

    def signatures(self, numbers: np.ndarray) -> np.ndarray:
        """Return the signatures of the documents `numbers`, uint8 [len(numbers), permutations]."""
        out = np.empty((len(numbers), self.rules.permutations), np.uint8)
        return self._gather(numbers, "signatures.npy", out, lambda array: array)

    def _gather(self, numbers, name: str, out: np.ndarray, rows_of) -> np.ndarray:
        order = np.argsort(numbers)
        ascending = numbers[order].astype(np.int64)
        borders = np.searchsorted(ascending, self.starts)
        for folder in np.flatnonzero(np.diff(borders)).tolist():
            mine = slice(borders[folder], borders[folder + 1])
            rows = rows_of(np.load(self.folders[folder] / name, mmap_mode="r"))
            out[order[mine]] = rows[ascending[mine] - self.starts[folder]]
        return out


def band_candidates(
    band: int, folders: Sequence[Path], rules: DedupRules, out: Path, *, fixed: int = 0, limit_bytes: int = 512 << 20
) -> int:
    """Write the pairs of documents of all `folders` that share band `band` and look similar; return their number.

    band: 0 to `rules.bands`; the last value pairs each document with the first that has the same whole signature.
    out: .npy file of pairs (uint64), ascending, each once. fixed: pairs among the first `fixed` documents are left out.
    limit_bytes: approximate memory limit, without the mapped signatures of one folder and up to 100 MB of scratch
    memory. It changes the result only if a bucket has more than limit_bytes / 96 documents, because that bucket is cut.
    Scratch files are next to `out`. Raises DataError as SignatureFolders does.
    """
    source = SignatureFolders(folders, rules)
    with TemporaryDirectory(dir=out.parent) as scratch:
        ranges = partitions_for(source.documents, _PAIR_BYTES, limit_bytes)
        width = max(-(-source.documents // ranges), 1)
        spread = Partitions(Path(scratch) / "pairs", ranges, "<u8", limit_bytes // 4)
        found = _copies if band == rules.bands else _band_pairs
        for pairs in found(source, band, Path(scratch), limit_bytes):
            pairs = pairs[pairs >> _HALF >= fixed]
            spread.append(pairs, (pairs >> _HALF).astype(np.uint32) // np.uint32(width))
        with ArrayWriter(out, "<u8") as writer:
            for number in range(ranges):
                writer.append(sorted_set(spread.take_all(number)))
    return writer.rows


def pack(earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    return later.astype(np.uint64) << _HALF | earlier.astype(np.uint64)


def unpack(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (earlier, later), uint32 each."""
    return (pairs & _LOW).astype(np.uint32), (pairs >> _HALF).astype(np.uint32)


def _copies(source: SignatureFolders, band: int, scratch: Path, limit_bytes: int) -> Iterator[np.ndarray]:
    keys = ((start, keys[:, None]) for start, keys in source.keys(band))
    for block in equal_rows(keys, source.documents, scratch, limit_bytes):
        yield pack(block["first"], block["row"])


def _band_pairs(source: SignatureFolders, band: int, scratch: Path, limit_bytes: int) -> Iterator[np.ndarray]:
    count = partitions_for(source.documents, _ROW_BYTES, limit_bytes // 2)
    spread = Partitions(scratch / "keys", count, _KEYED, limit_bytes // 4)
    for start, keys in source.keys(band):
        records = np.empty(len(keys), _KEYED)
        records["key"], records["number"] = keys, np.arange(start, start + len(keys), dtype=np.uint32)
        spread.append(records, by_hash(keys, count))
    for number in range(count):
        # A partition usually fits in half a piece. With an enormous bucket it is cut into several pieces, and the first
        # document of each bucket is added to the next piece.
        records = np.empty(0, _KEYED)
        for piece in spread.take(number, max(limit_bytes // _ROW_BYTES, 1)):
            records = np.concatenate((records[starts(records["key"])], piece))
            order = np.argsort(records["key"], kind="stable")
            records = records[order]
            yield from _bucket_pairs(records["key"], records["number"], source)


def _bucket_pairs(keys: np.ndarray, numbers: np.ndarray, source: SignatureFolders) -> Iterator[np.ndarray]:
    """Yield the pairs that look similar among documents with equal keys. keys: ascending. numbers: the documents,
    ascending among equal keys."""
    new = starts(keys)
    alone = new & np.append(new[1:], True)
    bucket, numbers = np.cumsum(new)[~alone], numbers[~alone]
    bucket, numbers = _without_copies(bucket, numbers, source)

    def similar(earlier: np.ndarray, later: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        estimates = source.estimates(earlier, later)
        return pack(earlier, later)[estimates >= source.rules.least_estimate], estimates

    active = np.ones(len(bucket), bool)
    for _ in range(LEADERS):
        big = np.flatnonzero(active)
        big = big[(np.bincount(bucket[big]) > WINDOW + 1)[bucket[big]]] if len(big) else big
        if not len(big):
            break
        leads = starts(bucket[big])
        leaders = big[leads][np.cumsum(leads) - 1][~leads]
        others = big[~leads]
        active[big[leads]] = False  # a leader is compared with all others below
        for first in range(0, len(others), PIECE):
            chunk = slice(first, first + PIECE)
            pairs, estimates = similar(numbers[leaders[chunk]], numbers[others[chunk]])
            yield pairs
            settled = source.rules.jaccard + _SETTLED * source.rules.standard_error
            active[others[chunk][estimates >= min(settled, 1)]] = False
    bucket, numbers = bucket[active], numbers[active]
    left = np.arange(len(bucket))
    for distance in range(1, WINDOW + 1):
        left = left[left + distance < len(bucket)]
        left = left[bucket[left] == bucket[left + distance]]
        if not len(left):
            break
        for first in range(0, len(left), PIECE):
            chunk = left[first : first + PIECE]
            yield similar(numbers[chunk], numbers[chunk + distance])[0]


def _without_copies(bucket, numbers, source: SignatureFolders) -> tuple[np.ndarray, np.ndarray]:
    """Return (bucket, numbers) with only the first of equal signatures in each bucket; `_copies` finds the others."""
    whole = source.whole_keys(numbers)
    order = np.lexsort((whole, bucket))
    first = np.sort(order[starts(bucket[order]) | starts(whole[order])])
    return bucket[first], numbers[first]


def merge_candidates(files: Iterable[Path], out: Path) -> int:
    """Merge the pairs of all `files`, each ascending, into `out`, ascending and without repeats; return their
    number."""
    sources = [file for file in map(ArrayFile, files) if len(file)]
    places = [0] * len(sources)
    size = max(PIECE // max(len(sources), 1), 1)
    with ArrayWriter(out, "<u8") as writer:
        while any(place < len(file) for file, place in zip(sources, places, strict=True)):
            heads = [
                file.read(place, min(place + size, len(file))) for file, place in zip(sources, places, strict=True)
            ]
            # All pairs up to the smallest last pair of the heads have been read.
            last = min(head[-1] for head in heads if len(head))
            counts = [int(np.searchsorted(head, last, side="right")) for head in heads]
            places = [place + count for place, count in zip(places, counts, strict=True)]
            writer.append(sorted_set(np.concatenate([head[:n] for head, n in zip(heads, counts, strict=True)])))
    return writer.rows
