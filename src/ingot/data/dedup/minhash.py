"""MinHash signatures of word n-grams (Broder 1997). The share of equal places in two signatures estimates the Jaccard
similarity of their texts.

Shingles are all runs of `ngram` lower-case words (whitespace-separated), as 64-bit hashes; a permutation maps their
lower 32 bits h to a*h + b mod 2^32, with a odd. The mean error of the estimate over 128 places is about 0.025.
The compiled core (native/minhash.c) gives the same bytes as the Python below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from xxhash import xxh3_64_intdigest

from ingot.data.dedup.arrays import sorted_set
from ingot.data.native import compiled
from ingot.ranges import PositiveQueue, Share

_BLOCK = 4096  # shingles at a time: their 128 permutations take 2 MiB, which fit in the cache
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xFF51AFD7ED558CCD)
_CORE = compiled("_minhash")
_STANDARD_ERRORS = 4  # 3 in 100,000 pairs at the threshold have an estimate this many standard errors below it


@dataclass(frozen=True, kw_only=True)
class DedupRules:
    """Settings of deduplication. Documents that share all rows of a band are candidate pairs; candidates whose Jaccard
    similarity is at least `jaccard` are duplicates.

    16 bands of 8 rows find 99% of the pairs with Jaccard 0.8 or more; exact verification removes false candidates.
    exact: first drop texts that are equal except for whitespace (equal.py). ngram: words per shingle.
    """

    enabled: bool = True
    exact: bool = True
    jaccard: Share = 0.8
    ngram: PositiveQueue = 5
    bands: PositiveQueue = 16
    rows: PositiveQueue = 8

    def problems(self):
        if not 0 < self.jaccard <= 1:
            yield "jaccard", f"is {self.jaccard}, must be in (0, 1]"
        for name in ("ngram", "bands", "rows"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}, must be at least 1"

    @property
    def permutations(self) -> int:
        return self.bands * self.rows

    @property
    def least_estimate(self) -> float:
        """The least estimated similarity at which a candidate pair is verified."""
        return self.jaccard - _STANDARD_ERRORS * self.standard_error

    @property
    def standard_error(self) -> float:
        """The standard error of the estimate for a pair whose similarity is `jaccard` (binomial)."""
        return (self.jaccard * (1 - self.jaccard) / self.permutations) ** 0.5

    @property
    def ran(self) -> str:
        return f"MinHash {self.bands}x{self.rows} of word {self.ngram}-grams, verified: Jaccard >= {self.jaccard:g}"


def shingles(text: str, ngram: int = 5) -> np.ndarray:
    """Return the hashes of the n-grams of `text`, uint64 [max(words - ngram + 1, 1)], in order, repeats included.

    A text of fewer than `ngram` words is one shingle. Hashes are the same in every process and on every machine.
    """
    if _CORE is not None:
        return np.frombuffer(_CORE.shingles(text.lower(), ngram, xxh3_64_intdigest), np.uint64)
    return shingles_reference(text, ngram)


def shingles_reference(text: str, ngram: int) -> np.ndarray:
    """Compute `shingles` without the compiled core."""
    hashes = word_hashes(text.lower())
    if not len(hashes):
        return np.zeros(1, np.uint64)
    ngram = min(ngram, len(hashes))
    count = len(hashes) - ngram + 1
    mixed = hashes[:count].copy()
    for offset in range(1, ngram):
        mixed *= _MULTIPLIER
        mixed += hashes[offset : offset + count]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIXER
    mixed ^= mixed >> np.uint64(29)
    return mixed


def word_hashes(text: str) -> np.ndarray:
    """Return the XXH3-64 hash of the UTF-8 of every whitespace-separated word, uint64 [words]."""
    # Words contain no whitespace, so joining, encoding and splitting gives the same words as bytes.
    words = " ".join(text.split()).encode("utf-8", "surrogatepass").split()
    return np.fromiter(map(xxh3_64_intdigest, words), np.uint64, len(words))


def shingle_set(text: str, rules: DedupRules) -> np.ndarray:
    """Return the distinct shingles of `text`, uint64, ascending; verification compares these sets."""
    return sorted_set(shingles(text, rules.ngram))


def signature_of(text: str, rules: DedupRules) -> np.ndarray:
    """Return the MinHash signature of `text`, uint32 [permutations]."""
    if _CORE is not None:
        found = _CORE.signature(text.lower(), rules.ngram, xxh3_64_intdigest, *_permutations(rules.permutations))
        return np.frombuffer(found, np.uint32)
    return signature_reference(shingles_reference(text, rules.ngram), rules.permutations)


@cache
def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    factors = random.integers(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    offsets = random.integers(0, 2**32, count, dtype=np.uint32)
    return factors, offsets


def signature(hashes: np.ndarray, permutations: int = 128) -> np.ndarray:
    """Return the MinHash signature, uint32 [permutations], of the shingles `hashes`, uint64 [n]."""
    if _CORE is not None:
        return np.frombuffer(_CORE.minima(np.ascontiguousarray(hashes), *_permutations(permutations)), np.uint32)
    return signature_reference(hashes, permutations)


def signature_reference(hashes: np.ndarray, permutations: int) -> np.ndarray:
    """Compute `signature` without the compiled core."""
    factors, offsets = (column[:, None] for column in _permutations(permutations))
    low = hashes.astype(np.uint32)
    least = np.full(permutations, 0xFFFFFFFF, np.uint32)
    for start in range(0, len(low), _BLOCK):
        values = factors * low[start : start + _BLOCK]
        values += offsets
        np.minimum(least, values.min(axis=1), out=least)
    return least


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets of shingles, uint64, each ascending without repeats (`shingle_set`)."""
    common = _common(a, b)
    return common / (len(a) + len(b) - common)


def common_reference(a: np.ndarray, b: np.ndarray) -> int:
    """Count the shingles that two sets share."""
    return len(np.intersect1d(a, b, assume_unique=True))


_common: Callable[[np.ndarray, np.ndarray], int] = common_reference if _CORE is None else _CORE.common
