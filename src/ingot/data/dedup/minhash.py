"""MinHash signatures of word n-grams (Broder 1997): equal places of two signatures estimate the Jaccard similarity.

Shingles are all runs of `ngram` lower-case words (whitespace-separated), as 64-bit hashes; a permutation is
h -> a*h + b mod 2^32 with odd a on 32 bits of them. The mean error of the estimate over 128 places is about 0.025.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from xxhash import xxh3_64_intdigest

_BLOCK = 4096  # shingles at a time: 128 permutations of them are 2 MiB, which stay in cache
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xFF51AFD7ED558CCD)


@dataclass(frozen=True, kw_only=True)
class DedupRules:
    """Documents that share all rows of one band are candidates; those with at least `jaccard` are duplicates.

    16 bands of 8 rows find 99% of the pairs with Jaccard 0.8 or more; exact verification removes the false ones.
    """

    enabled: bool = True
    jaccard: float = 0.8
    ngram: int = 5
    bands: int = 16
    rows: int = 8

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
    def ran(self) -> str:
        return f"MinHash {self.bands}x{self.rows} of word {self.ngram}-grams, verified: Jaccard >= {self.jaccard:g}"


def shingles(text: str, ngram: int = 5) -> np.ndarray:
    """The n-grams of `text` as uint64 hashes [max(words - ngram + 1, 1)], in order, repeats included.

    A text of fewer than `ngram` words is one shingle. Hashes are the same in every process.
    """
    # Words hold no whitespace, so that joining, encoding and splitting again gives them back as bytes.
    words = " ".join(text.lower().split()).encode("utf-8", "surrogatepass").split()
    hashes = np.fromiter(map(xxh3_64_intdigest, words), np.uint64, len(words))
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


@cache
def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    factors = random.integers(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    offsets = random.integers(0, 2**32, count, dtype=np.uint32)
    return factors[:, None], offsets[:, None]


def signature(hashes: np.ndarray, permutations: int = 128) -> np.ndarray:
    """MinHash of shingles [n] as uint32 [permutations]."""
    factors, offsets = _permutations(permutations)
    low = hashes.astype(np.uint32)
    least = np.full(permutations, 0xFFFFFFFF, np.uint32)
    for start in range(0, len(low), _BLOCK):
        values = factors * low[start : start + _BLOCK]
        values += offsets
        np.minimum(least, values.min(axis=1), out=least)
    return least


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of two sets of shingles, each sorted and without repeats (`numpy.unique`)."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)
