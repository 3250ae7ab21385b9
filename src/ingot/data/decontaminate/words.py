"""The words of a text as arrays, and the shapes of their n-grams.

The shape of an n-gram is a number made from the lengths and first letters of its words. It is cheap to compute, and
nearly all n-grams without a match are excluded by it.
"""

import functools
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

_PLANE = 0x20000  # code points from here on are ideographs, then unassigned
_IDEOGRAPHS = (
    (0x2E80, 0x2FE0),
    (0x3040, 0x3130),
    (0x31A0, 0x3200),
    (0x3400, 0x4DC0),
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
)
# Odd, so that it has an inverse modulo 2^64.
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 2**64)
_LOW, _MASK_NUMBERS = np.uint64(20), np.uint64(4095)  # shift and bit mask: the bits of a product that choose a mask
_BLOCK = 1 << 14  # words at a time; also the length of the table of powers
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)  # odd; spreads shapes over the bitmap


@functools.cache
def _folded_characters() -> np.ndarray:
    """Return uint32 [_PLANE]: the lower-case code of each character that can be in a word, 0 for all others."""
    table = np.zeros(_PLANE, np.uint32)
    for code in range(_PLANE):
        char = chr(code)
        # Marks (category M) are vowel signs and accents; without them, words of Indic scripts would be split.
        if char.isalnum() or unicodedata.category(char)[0] == "M":
            lower = char.lower()
            table[code] = ord(lower) if len(lower) == 1 else code
    return table


@functools.cache
def _ideographs() -> np.ndarray:
    table = np.zeros(_PLANE, bool)
    for first, end in _IDEOGRAPHS:
        table[first:end] = True
    return table


class Words(NamedTuple):
    """The words of a text. Word i is folded[starts[i]:ends[i]] and has the same positions in the text.

    folded: uint8 (ASCII text) or uint32 [characters], lower case, 0 between words. starts, ends: int64 [words].
    """

    folded: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, text: str) -> "Words":
        if text.isascii():
            return cls(*_runs(np.frombuffer(text.encode().translate(_folded_ascii()), np.uint8)))
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        highest = int(codes.max())
        if highest < _IDEOGRAPHS[0][0]:
            return cls(*_runs(_folded_characters()[codes]))
        folded = _folded_characters()[np.minimum(codes, _PLANE - 1)]
        if highest >= _PLANE:
            folded = np.where((codes >= _PLANE) & (codes < 2 * _PLANE), codes, folded)
        return cls(*_runs(folded, _ideographs()[np.minimum(folded, _PLANE - 1)] | (folded >= _PLANE)))

    def strings(self, first: int = 0, end: int | None = None) -> list[str]:
        """Return the words [first, end) in lower case, as n-grams use them."""
        starts, ends = self.starts[first:end].tolist(), self.ends[first:end].tolist()
        if not starts:
            return []
        low = starts[0]
        text = self.folded[low : ends[-1]].astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
        return [text[start - low : end - low] for start, end in zip(starts, ends, strict=True)]

    def shapes(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """Return, for each n in `lengths`, the shapes of all windows of n words: uint64 [words - n + 1]."""
        features = self.folded[self.starts].astype(np.uint64)
        features <<= np.uint64(8)
        features += (self.ends - self.starts).view(np.uint64)
        if len(features) <= _BLOCK:
            return _rolling(features, lengths)
        step = _BLOCK + 1 - max(lengths)
        blocks = []
        for first in range(0, len(features), step):
            shapes = _rolling(features[first : first + _BLOCK], lengths)
            more = first + step < len(features)  # the next block repeats the last windows of the shorter lengths
            blocks.append([shape[:step] if more else shape for shape in shapes])
        return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def _runs(folded: np.ndarray, alone: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (folded, starts, ends) of the runs of nonzero characters. alone: bool, characters that are each a run."""
    is_word = np.zeros(len(folded) + 2, bool)
    np.not_equal(folded, 0, out=is_word[1:-1])
    border = is_word[1:] != is_word[:-1]
    if alone is None:
        edges = np.flatnonzero(border)
        return folded, edges[::2], edges[1::2]
    border[:-1] |= alone
    border[1:] |= alone
    return folded, np.flatnonzero(is_word[1:] & border), np.flatnonzero(is_word[:-1] & border)


@functools.cache
def _folded_ascii() -> bytes:
    return _folded_characters()[:128].astype(np.uint8).tobytes() + bytes(128)


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Return (base^i, base^-i) modulo 2^64 for i < _BLOCK."""
    factors = np.full((2, _BLOCK), 1, np.uint64)
    factors[:, 1:] = np.array([[_BASE], [_BASE_INVERSE]], np.uint64)
    powers = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers[0], powers[1]


def _rolling(features: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Return, for each n in `lengths`, an array whose item i is n + the sum of features[i + j] * base^j over j < n.
    The sums are differences of one running sum."""
    powers, inverse = _powers()
    sums = np.zeros(len(features) + 1, np.uint64)
    np.cumsum(features * powers[: len(features)], out=sums[1:])
    rolled = []
    for n in lengths:
        shapes = sums[n:] - sums[: max(len(sums) - n, 0)]
        shapes *= inverse[: len(shapes)]
        shapes += np.uint64(n)
        rolled.append(shapes)
    return rolled


def hash_words(words: list[str]) -> int:
    """Return the 64-bit hash of the n-gram `words`."""
    return xxhash.xxh3_64_intdigest(" ".join(words).encode("utf-8", "surrogatepass"))


class Bitmap:
    """A blocked Bloom filter of shapes: the four bits of a shape are in one uint64, so a look-up reads one uint64.

    The rate of false positives is about 1 in 1,000.
    """

    def __init__(self, data: np.ndarray):
        """Make a filter from its bits. data: uint64 [power of two]."""
        self.data = np.asarray(data)  # a plain array, because each slice of an np.memmap costs a microsecond more
        self._shift = np.uint64(64 - (len(data) - 1).bit_length())

    @classmethod
    def of(cls, shapes: np.ndarray) -> "Bitmap":
        """Return a filter of `shapes`, with 32 to 64 bits per shape."""
        bitmap = cls(np.zeros(1 << max((len(shapes) // 2).bit_length(), 4), np.uint64))
        places, masks = bitmap._places(shapes)
        np.bitwise_or.at(bitmap.data, places, masks)
        return bitmap

    def candidates(self, shapes: np.ndarray) -> np.ndarray:
        """Return the positions in `shapes`, int64, of the shapes that may be in the filter."""
        places, masks = self._places(shapes)
        return np.flatnonzero(self.data[places] & masks == masks)

    def _places(self, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        products = shapes * _MULTIPLIER
        places = products >> self._shift
        products >>= _LOW
        products &= _MASK_NUMBERS
        return places, _masks()[products]


@functools.cache
def _masks() -> np.ndarray:
    """Return masks with up to four bits set, uint64 [4096], from the hashes of a fixed sequence."""
    bits = np.array([xxhash.xxh3_64_intdigest(str(number).encode()) for number in range(4096)], np.uint64)
    masks = np.zeros(4096, np.uint64)
    for place in range(0, 24, 6):
        masks |= np.uint64(1) << (bits >> np.uint64(place) & np.uint64(63))
    return masks
