"""Near-duplicates in memory: candidates by band, verified, united; the earliest stays.

Holds all signatures (512 bytes per document at 128 permutations) and compares all pairs of a bucket. near.py finds the
same clusters from files, in bounded memory and linear time.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ingot.data.dedup.minhash import DedupRules, jaccard

_STANDARD_ERRORS = 5  # a pair whose estimate is so far below the threshold is not verified
_CACHED_SETS = 4096


class Duplicate(NamedTuple):
    """`kept`: the document that stays. `like`: the document it was first found to be like, at `jaccard`."""

    kept: int
    like: int
    jaccard: float


def near_duplicates(
    signatures: np.ndarray, shingle_set: Callable[[int], np.ndarray], rules: DedupRules
) -> dict[int, Duplicate]:
    """The documents to drop: number -> Duplicate. A cluster is all that verified pairs connect; its first stays.

    signatures: uint32 [documents, permutations], in crawl order: the result depends on that order and nothing else.
    shingle_set(i): document i's shingles, sorted without repeats; only asked for candidates.
    """
    least_estimate = (
        rules.jaccard - _STANDARD_ERRORS * (0.25 / rules.permutations) ** 0.5
    )  # at most sqrt(j (1 - j) / n)
    clusters = _Clusters(len(signatures))
    shingle_set = lru_cache(_CACHED_SETS)(shingle_set)
    links: dict[int, tuple[int, float]] = {}
    refused: set[tuple[int, int]] = set()

    def compare(earlier: int, later: int) -> None:
        if (earlier, later) in refused or clusters.root(earlier) == clusters.root(later):
            return
        similarity = jaccard(shingle_set(earlier), shingle_set(later))
        if similarity < rules.jaccard:
            refused.add((earlier, later))
        else:
            links.setdefault(later, (earlier, similarity))
            links.setdefault(earlier, (later, similarity))
            clusters.unite(earlier, later)

    firsts = _collapse_equal(signatures, compare)
    for bucket in _buckets(signatures[firsts], rules):
        members = firsts[bucket]
        rows = signatures[members]
        for position in range(1, len(members)):
            estimates = (rows[:position] == rows[position]).mean(axis=1)
            for earlier in members[:position][estimates >= least_estimate].tolist():
                compare(earlier, int(members[position]))
    duplicates = {}
    for document, (like, similarity) in sorted(links.items()):
        kept = clusters.root(document)
        if kept != document:
            duplicates[document] = Duplicate(kept, like, similarity)
    return duplicates


def _collapse_equal(signatures: np.ndarray, compare: Callable[[int, int], None]) -> np.ndarray:
    """The first document of each signature; later ones are compared with it, so that copies do not fill the buckets."""
    first_of: dict[bytes, int] = {}
    firsts = []
    for number, row in enumerate(np.ascontiguousarray(signatures)):
        first = first_of.setdefault(row.tobytes(), number)
        if first == number:
            firsts.append(number)
        else:
            compare(first, number)
    return np.array(firsts, np.int64)


def _buckets(signatures: np.ndarray, rules: DedupRules) -> Iterator[np.ndarray]:
    """Row numbers (ascending) that agree in a whole band, band by band, in a fixed order."""
    for band in range(rules.bands):
        keys = np.zeros(len(signatures), np.uint64)
        for column in range(band * rules.rows, (band + 1) * rules.rows):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + signatures[:, column].astype(np.uint64) + np.uint64(1)
            keys ^= keys >> np.uint64(29)
        order = np.argsort(keys, kind="stable")
        borders = np.flatnonzero(np.diff(keys[order])) + 1
        for bucket in np.split(order, borders) if len(borders) < len(order) - 1 else ():
            if len(bucket) > 1:
                yield bucket


class _Clusters:
    """Union-find in which the smallest number is the root."""

    def __init__(self, count: int):
        self._parent = list(range(count))

    def root(self, document: int) -> int:
        parent = self._parent
        while parent[document] != document:
            parent[document] = parent[parent[document]]
            document = parent[document]
        return document

    def unite(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self._parent[max(a, b)] = min(a, b)
