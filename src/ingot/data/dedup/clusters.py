"""Verify candidate pairs, and join verified pairs into clusters; the first document of each cluster stays.

Verification computes the exact Jaccard similarity of two shingle sets. Candidates are sorted by their later document,
so that later sets are read in order; earlier sets, which are needed many times, stay in a cache of bounded size. A pair
whose documents are already connected in its slice is skipped, because it changes no cluster. Any worker can verify a
slice: the clusters, and the first similar document of each document, do not depend on how candidates are sliced.

Clusters are made by union-find over one array of 4 bytes per document, with the smallest number as the root (Tarjan
1975). With each document's first similar document and their similarity, memory is 12 bytes per document; pairs are read
in pieces.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.dedup.arrays import PIECE, ArrayFile, ArrayWriter
from ingot.data.dedup.bands import unpack
from ingot.data.dedup.minhash import DedupRules, jaccard
from ingot.data.native import compiled
from ingot.errors import DataError

DUPLICATE = np.dtype([("document", "<u4"), ("kept", "<u4"), ("like", "<u4"), ("jaccard", "<f4")])
_CORE = compiled("_minhash")
_NONE = np.uint32(2**32 - 1)


@dataclass(frozen=True)
class Clusters:
    """The clusters of documents 0 .. n - 1.

    roots: uint32 [n], the first document of each document's cluster. like: uint32 [n], its first similar document, or
    2^32 - 1 if there is none. jaccard: float32 [n], the similarity of the document and `like`.
    """

    roots: np.ndarray
    like: np.ndarray
    jaccard: np.ndarray

    def duplicates(self, fixed: int = 0) -> np.ndarray:
        """Return the documents to drop, as DUPLICATE records (16 bytes) ascending by document. The first `fixed`
        documents are never dropped."""
        found = np.empty(sum(map(len, self._dropped(fixed))), DUPLICATE)
        place = 0
        for dropped in self._dropped(fixed):
            piece = found[place : place + len(dropped)]
            piece["document"], piece["kept"] = dropped, self.roots[dropped]
            piece["like"], piece["jaccard"] = self.like[dropped], self.jaccard[dropped]
            place += len(dropped)
        return found

    def _dropped(self, fixed: int) -> Iterator[np.ndarray]:
        for start in range(fixed, len(self.roots), PIECE):
            roots = self.roots[start : start + PIECE]
            yield start + np.flatnonzero(roots != np.arange(start, start + len(roots), dtype=np.uint32))


def clusters(documents: int, verified: Sequence[Path]) -> Clusters:
    """Join documents 0 to `documents` - 1 into clusters by the pairs in the files `verified`, in any order.

    Raises DataError if a pair has a document number of `documents` or more.
    """
    roots = np.arange(documents, dtype=np.uint32)
    like = np.full(documents, _NONE)
    jaccard = np.zeros(documents, np.float32)
    for path in verified:
        for piece in ArrayFile(path).pieces(rows=PIECE):
            if len(piece) and max(piece["earlier"].max(), piece["later"].max()) >= documents:
                raise DataError(
                    "E-DEDUP-PAIR-RANGE",
                    f"{path} names a document beyond the last of {documents:,}",
                    rule="verified pairs and clusters number the documents of the same folders",
                    fix="remove the work folder and build again",
                    path=str(path),
                    documents=documents,
                )
            if _CORE is not None:
                _CORE.unite(roots, like, jaccard, piece)
            else:
                unite_reference(roots, like, jaccard, piece)
    for start in range(0, documents, PIECE):  # earlier pieces are final: a parent is never greater
        piece = roots[start : start + PIECE]
        while not np.array_equal(above := roots[piece], piece):
            piece[:] = above
    return Clusters(roots, like, jaccard)


def unite_reference(parent: np.ndarray, like: np.ndarray, similarity: np.ndarray, pairs: np.ndarray) -> None:
    """Add `pairs` (VERIFIED records) to the union-find `parent`, and update `like` and `similarity` where a pair gives
    a document a similar document with a smaller number. All arrays are changed in place."""
    document = np.concatenate((pairs["earlier"], pairs["later"]))
    partner = np.concatenate((pairs["later"], pairs["earlier"]))
    order = np.lexsort((partner, document))
    order = order[np.append(True, np.diff(document[order]) != 0)[: len(order)]]
    order = order[partner[order] < like[document[order]]]
    like[document[order]] = partner[order]
    similarity[document[order]] = np.concatenate((pairs["jaccard"], pairs["jaccard"]))[order]
    a, b = pairs["earlier"], pairs["later"]
    while len(a):
        a, b = _roots(parent, a), _roots(parent, b)
        apart = a != b
        a, b = np.minimum(a[apart], b[apart]), np.maximum(a[apart], b[apart])
        np.minimum.at(parent, b, a)  # a root gets one new parent; its other pairs stay for the next round
        while not np.array_equal(above := parent[parent[b]], parent[b]):  # halves chains of parents
            parent[b] = above


def _roots(parent: np.ndarray, documents: np.ndarray) -> np.ndarray:
    while not np.array_equal(above := parent[documents], documents):
        documents = above
    return documents


VERIFIED = np.dtype([("earlier", "<u4"), ("later", "<u4"), ("jaccard", "<f4")])
_PIECE = 1 << 16


@dataclass(frozen=True)
class Verification:
    """The numbers of candidate pairs, of pairs that were compared, and of similar pairs."""

    candidates: int
    compared: int
    similar: int


def slices(pairs: Path, at_most: int) -> list[tuple[int, int]]:
    """Return slices [start, stop) of at most `at_most` candidates each, one per task. They depend only on the number
    of candidates in the file `pairs`."""
    count = len(ArrayFile(pairs))
    return [(start, min(start + at_most, count)) for start in range(0, count, at_most)]


def verify_pairs(
    pairs: Path,
    set_of: Callable[[int], np.ndarray],
    rules: DedupRules,
    out: Path,
    *,
    start: int = 0,
    stop: int | None = None,
    cache_bytes: int = 256 << 20,
) -> Verification:
    """Write the candidates [start, stop) of the file `pairs` with a similarity of at least `rules.jaccard` to `out`.

    out: .npy file of VERIFIED records, ascending by (later, earlier). set_of: returns the shingle set of a document
    (`minhash.shingle_set`); later documents are requested in order. cache_bytes: limit of cached sets. In addition,
    about 200 bytes per similar pair of the slice are in memory.
    """
    sets = _Cache(set_of, cache_bytes)
    connected = _Connected()
    candidates = compared = 0
    with ArrayWriter(out, VERIFIED) as writer:
        for piece in ArrayFile(pairs).pieces(start, stop, _PIECE):
            candidates += len(piece)
            records = []
            for earlier, later in _open_pairs(piece, connected):
                compared += 1
                similarity = jaccard(sets[earlier], sets[later])
                if similarity >= rules.jaccard:
                    connected.unite(earlier, later)
                    records.append((earlier, later, similarity))
            writer.append(np.array(records, VERIFIED))
    return Verification(candidates, compared, writer.rows)


def _open_pairs(piece: np.ndarray, connected: "_Connected") -> Iterator[tuple[int, int]]:
    earlier, later = unpack(piece)
    for pair in zip(earlier.tolist(), later.tolist(), strict=True):
        if connected.root(pair[0]) != connected.root(pair[1]):
            yield pair


class _Connected:
    """Union-find over the few documents that have a verified pair in this slice."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, document: int) -> int:
        parent = self._parent
        while (above := parent.get(document, document)) != document:
            parent[document] = parent.get(above, above)
            document = above
        return document

    def unite(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self._parent[max(a, b)] = min(a, b)


class _Cache:
    """An LRU cache of shingle sets, limited by their bytes."""

    def __init__(self, set_of: Callable[[int], np.ndarray], limit_bytes: int):
        self._set_of, self._limit, self._bytes = set_of, limit_bytes, 0
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getitem__(self, document: int) -> np.ndarray:
        if document in self._held:
            self._held.move_to_end(document)
            return self._held[document]
        found = self._held[document] = np.ascontiguousarray(self._set_of(document), np.uint64)
        self._bytes += found.nbytes
        while self._bytes > self._limit and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1].nbytes
        return found
