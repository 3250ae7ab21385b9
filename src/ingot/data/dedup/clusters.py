"""Verified pairs become clusters: all that pairs connect; the first document of a cluster stays.

Union-find over one array of 4 bytes per document, with the smallest number as the root (Tarjan 1975). Together with the
first document that each was found to be like, 12 bytes per document; pairs are read in pieces.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.dedup.arrays import PIECE, ArrayFile
from ingot.data.native import compiled
from ingot.errors import DataError

DUPLICATE = np.dtype([("document", "<u4"), ("kept", "<u4"), ("like", "<u4"), ("jaccard", "<f4")])
_CORE = compiled("_minhash")
_NONE = np.uint32(2**32 - 1)


@dataclass(frozen=True)
class Clusters:
    """Of every document: the first of its cluster, the smallest number it was found to be like and how much.

    roots, like: uint32 [documents]; jaccard: float32 [documents]. `like` of a document without a pair is 2^32 - 1.
    """

    roots: np.ndarray
    like: np.ndarray
    jaccard: np.ndarray

    def duplicates(self, fixed: int = 0) -> np.ndarray:
        """The documents to drop, DUPLICATE records (16 bytes) ascending by document. The first `fixed` all stay."""
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
    """Of documents 0 to `documents` - 1 by the pairs in the files `verified` (verify.py), in any order.

    Raises DataError for a pair of a document that is not there.
    """
    roots = np.arange(documents, dtype=np.uint32)
    like = np.full(documents, _NONE)
    jaccard = np.zeros(documents, np.float32)
    for path in verified:
        for piece in ArrayFile(path).pieces(rows=PIECE):
            if len(piece) and max(piece["earlier"].max(), piece["later"].max()) >= documents:
                raise DataError(
                    f"{path} names a document beyond the last of {documents:,}",
                    rule="verified pairs and clusters number the same folders",
                    fix="verify the candidates of these folders again",
                )
            if _CORE is not None:
                _CORE.unite(roots, like, jaccard, piece)
            else:
                unite_reference(roots, like, jaccard, piece)
    for start in range(0, documents, PIECE):  # what lies before is settled: parents are never greater
        piece = roots[start : start + PIECE]
        while not np.array_equal(above := roots[piece], piece):
            piece[:] = above
    return Clusters(roots, like, jaccard)


def unite_reference(parent: np.ndarray, like: np.ndarray, similarity: np.ndarray, pairs: np.ndarray) -> None:
    """Pairs (VERIFIED records) into the forest `parent` and into each document's smallest partner, in place."""
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
        np.minimum.at(parent, b, a)  # a root has one new parent; what lost against it goes round again
        while not np.array_equal(above := parent[parent[b]], parent[b]):  # chains of roots, halved
            parent[b] = above


def _roots(parent: np.ndarray, documents: np.ndarray) -> np.ndarray:
    while not np.array_equal(above := parent[documents], documents):
        documents = above
    return documents
