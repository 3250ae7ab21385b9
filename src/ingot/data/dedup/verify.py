"""Candidates become verified pairs: the exact Jaccard similarity of their sets of shingles.

Candidates are sorted by their later document, so that those are read in order; earlier ones, of which many are asked
for again and again, stay in a cache bounded in bytes. A pair whose ends are already connected by pairs of the same
slice is not compared: it changes no cluster. Slices can be verified by any worker: the clusters, and the first document
that each was found to be like, do not depend on how the candidates are cut.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.dedup.arrays import ArrayFile, ArrayWriter
from ingot.data.dedup.bands import unpack
from ingot.data.dedup.minhash import DedupRules, jaccard

VERIFIED = np.dtype([("earlier", "<u4"), ("later", "<u4"), ("jaccard", "<f4")])
_PIECE = 1 << 16


@dataclass(frozen=True)
class Verification:
    """How many candidates there were, how many of them were compared, how many are similar."""

    candidates: int
    compared: int
    similar: int


def slices(pairs: Path, at_most: int) -> list[tuple[int, int]]:
    """Slices [start, stop) of candidates for one task each; depends on their number alone."""
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
    """The candidates [start, stop) of the file `pairs` with a similarity of at least `rules.jaccard`: VERIFIED records.

    set_of(number): the shingle set of a document (`minhash.shingle_set`); later documents are asked for in order.
    cache_bytes: of sets that are kept; beside them, about 200 bytes per similar pair of the slice. The records in the
    .npy file `out` are ascending by (later, earlier).
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
    """The sets used last, up to a number of bytes."""

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
