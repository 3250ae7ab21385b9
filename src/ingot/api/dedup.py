"""Copies and near copies in a stream of texts, in memory: `ingot.Deduper`."""

import math
from dataclasses import dataclass

import numpy as np

from ingot.data.dedup.equal import text_hash
from ingot.data.dedup.minhash import DedupRules, jaccard, shingle_set, signature
from ingot.errors import UsageError

# The least probability with which a pair at the threshold shares a band; 16 bands of 8 rows have 0.947 at 0.8.
_FOUND = 0.94
_LONGEST = 4096  # numbers of a signature


@dataclass(frozen=True)
class NearCopy:
    """An earlier text that a text is like. index: its number among the texts that were kept, from 0. similarity: the
    Jaccard similarity of both sets of word 5-grams; 1.0 for an exact copy. exact: they differ at most in whitespace."""

    index: int
    similarity: float
    exact: bool


class Deduper:
    """A set of texts that finds copies and near copies of the texts in it. The same texts in the same order always give
    the same answers, on every machine.

    threshold: the least Jaccard similarity of word 5-grams of a near copy, above 0, at most 1. num_perm: length of the
    MinHash signatures. They are compared in bands, with as many rows per band as find at least 94% of the pairs at the
    threshold; a candidate counts only if the exact similarity reaches the threshold. A low threshold needs a
    long signature.

    The state is kept for texts that were no copies: a hash of 16 bytes, a signature of 4 x num_perm bytes, 8 bytes for
    each distinct 5-gram, and an entry per band. Texts are not kept. `ingot data build` has the same
    hashes on disk, for more texts than memory holds. Raises UsageError for a threshold or length out of range,
    and for a signature that is too short for the threshold.

        deduper = ingot.Deduper(threshold=0.8)
        unique = [text for text in texts if deduper.add(text) is None]
    """

    def __init__(self, threshold: float = 0.8, num_perm: int = 128):
        if not 0 < threshold <= 1 or not 1 <= num_perm <= _LONGEST:
            raise UsageError(
                "E-DEDUP-OPTION",
                f"threshold = {threshold}, num_perm = {num_perm}",
                rule=f"threshold is above 0 and at most 1, num_perm from 1 to {_LONGEST}",
                fix="use the defaults: Deduper(threshold=0.8, num_perm=128)",
                threshold=threshold,
                num_perm=num_perm,
            )
        rows = _rows(threshold, num_perm)
        if rows == 0:
            most = 1 - (1 - threshold) ** num_perm
            needed = math.log(1 - _FOUND) / math.log1p(-threshold)
            raise UsageError(
                "E-DEDUP-OPTION",
                f"num_perm = {num_perm} finds {most:.1%} of the pairs at threshold = {threshold}",
                rule=f"a Deduper finds at least {_FOUND:.0%} of the pairs at its threshold",
                fix=f"use num_perm = {math.ceil(needed)}" if needed <= _LONGEST else "use a higher threshold",
                threshold=threshold,
                num_perm=num_perm,
            )
        self.rules = DedupRules(jaccard=threshold, bands=num_perm // rows, rows=rows)
        self._exact: dict[bytes, int] = {}
        self._sets: list[np.ndarray] = []
        self._signatures: list[np.ndarray] = []
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(self.rules.bands)]

    def __len__(self) -> int:
        """Return the number of texts that were no copies."""
        return len(self._sets)

    def add(self, text: str) -> NearCopy | None:
        """Return the most similar earlier text if `text` is a copy or near copy; else add the text and return None."""
        return self._look(text, keep=True)

    def find(self, text: str) -> NearCopy | None:
        """Return what `add` would return, without adding the text."""
        return self._look(text, keep=False)

    def _look(self, text: str, keep: bool) -> NearCopy | None:
        digest = text_hash(text)
        if (same := self._exact.get(digest)) is not None:
            return NearCopy(same, 1.0, True)
        shingles = shingle_set(text, self.rules)
        signed = signature(shingles, self.rules.permutations)
        keys = [part.tobytes() for part in signed.reshape(self.rules.bands, self.rules.rows)]
        candidates = {number for band, key in zip(self._bands, keys, strict=True) for number in band.get(key, ())}
        if found := self._most_similar(sorted(candidates), shingles, signed):
            return found
        if keep:
            number = self._exact[digest] = len(self._sets)
            self._sets.append(shingles)
            self._signatures.append(signed)
            for band, key in zip(self._bands, keys, strict=True):
                band.setdefault(key, []).append(number)
        return None

    def _most_similar(self, candidates: list[int], shingles: np.ndarray, signed: np.ndarray) -> NearCopy | None:
        """Return the candidate with the highest similarity, of equal ones the first; None below the threshold."""
        best: NearCopy | None = None
        for number in candidates:
            estimate = np.count_nonzero(self._signatures[number] == signed) / len(signed)
            if estimate < self.rules.least_estimate:
                continue
            similarity = jaccard(self._sets[number], shingles)
            if similarity >= self.rules.jaccard and (best is None or similarity > best.similarity):
                best = NearCopy(number, similarity, False)
        return best


def _rows(threshold: float, num_perm: int) -> int:
    """Return the rows of a band: the largest divisor of `num_perm` with which a pair at the threshold is a candidate
    with a probability of at least _FOUND; 0 if there is none."""
    for rows in range(num_perm, 0, -1):
        if num_perm % rows == 0 and 1 - (1 - threshold**rows) ** (num_perm // rows) >= _FOUND:
            return rows
    return 0
