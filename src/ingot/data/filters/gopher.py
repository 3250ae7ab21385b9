"""Gopher: document quality and repetition rules (Rae et al. 2021, arXiv 2112.11446, Table A1 and section A.1.1).

The counting follows datatrove, with which FineWeb was made (Penedo et al. 2024, arXiv 2406.17557), except for the
definition of a word: here words are separated by whitespace. datatrove's default splits punctuation off as words of
their own, which makes `alphabetic_words` far stricter: the definition of a word decides these rules.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ingot.schema.document import Document, Drop

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: an odd number that mixes well


@dataclass(frozen=True, kw_only=True)
class GopherRules:
    """word_count, mean_word_length: least and most. The others are shares of words or lines, stop_words a count."""

    enabled: bool = True
    word_count: tuple[int, int] = (50, 100_000)
    mean_word_length: tuple[float, float] = (3.0, 10.0)
    symbol_ratio: float = 0.1  # most '#', and most ellipses, per word
    bullet_lines: float = 0.9
    ellipsis_lines: float = 0.3
    alphabetic_words: float = 0.8  # at least
    stop_words: int = 2  # different ones, at least


@dataclass(frozen=True, kw_only=True)
class RepetitionRules:
    """The largest share of lines, paragraphs or characters that may be repetition."""

    enabled: bool = True
    duplicate_lines: float = 0.30
    duplicate_paragraphs: float = 0.30
    duplicate_line_characters: float = 0.20
    duplicate_paragraph_characters: float = 0.20
    top_2_gram: float = 0.20
    top_3_gram: float = 0.18
    top_4_gram: float = 0.16
    duplicate_5_gram: float = 0.15
    duplicate_6_gram: float = 0.14
    duplicate_7_gram: float = 0.13
    duplicate_8_gram: float = 0.12
    duplicate_9_gram: float = 0.11
    duplicate_10_gram: float = 0.10


class Gopher:
    """Stage with rules gopher.* and gopher_repetition.*; only reads the text."""

    name = "gopher"

    def __init__(self, quality: GopherRules | None = None, repetition: RepetitionRules | None = None):
        self.quality = quality or GopherRules()
        self.repetition = repetition or RepetitionRules()

    @property
    def ran(self) -> str:
        parts = [("quality", self.quality.enabled), ("repetition", self.repetition.enabled)]
        return f"{' and '.join(name for name, on in parts if on)} rules; whitespace-separated words"

    def __call__(self, document: Document) -> Drop | None:
        text, words = document.text, document.text.split()
        broken = None
        if self.quality.enabled:
            broken = broken_quality_rule(text, words, self.quality)
        if broken is None and self.repetition.enabled:
            broken = broken_repetition_rule(text, words, self.repetition)
        return None if broken is None else Drop(self.name, *broken)


def broken_quality_rule(text: str, words: list[str], rules: GopherRules) -> tuple[str, str] | None:
    """(rule, value) of the first rule that `text` with its `words` breaks, or None."""
    counts = Counter(words)
    count = alphabetic = len(words)
    characters = sum(map(len, words))
    for word in [word for word in counts if not word.isalpha()]:
        if not any(map(str.isalpha, word)):
            alphabetic -= counts[word]
            if not any(map(str.isalnum, word)):  # symbols only: no word, and not in the mean length
                count -= counts[word]
                characters -= counts[word] * len(word)
    low, high = rules.word_count
    if not low <= count <= high:
        return "gopher.word_count", _outside(count, low, high)
    if not count:
        return None
    low, high = rules.mean_word_length
    if not low <= characters / count <= high:
        return "gopher.mean_word_length", _outside(characters / count, low, high)
    symbols = max(text.count("#"), text.count("...") + text.count("…")) / len(words)
    if symbols > rules.symbol_ratio:
        return "gopher.symbol_ratio", f"{symbols:.3f} > {rules.symbol_ratio:g}"
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
    if bullets > rules.bullet_lines:
        return "gopher.bullet_lines", f"{bullets:.3f} > {rules.bullet_lines:g}"
    ellipses = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
    if ellipses > rules.ellipsis_lines:
        return "gopher.ellipsis_lines", f"{ellipses:.3f} > {rules.ellipsis_lines:g}"
    if alphabetic / len(words) < rules.alphabetic_words:
        return "gopher.alphabetic_words", f"{alphabetic / len(words):.3f} < {rules.alphabetic_words:g}"
    stop_words = sum(word in counts for word in STOP_WORDS)
    if stop_words < rules.stop_words:
        return "gopher.stop_words", f"{stop_words} < {rules.stop_words}"
    return None


def _outside(value: float, low: float, high: float) -> str:
    return f"{value:.4g} < {low:g}" if value < low else f"{value:.4g} > {high:g}"


def broken_repetition_rule(text: str, words: list[str], rules: RepetitionRules) -> tuple[str, str] | None:
    """(rule, value) of the first rule that `text` with its `words` breaks, or None."""
    for kind, separator in (("paragraph", "\n\n"), ("line", "\n")):
        pieces = [piece.strip("\n") for piece in text.strip().split(separator) if piece]
        if not pieces:
            return None
        repeated, characters = duplicates(pieces)
        for rule, share in (
            (f"duplicate_{kind}s", repeated / len(pieces)),
            (f"duplicate_{kind}_characters", characters / max(len(text), 1)),
        ):
            if share > getattr(rules, rule):
                return f"gopher_repetition.{rule}", f"{share:.3f} > {getattr(rules, rule):g}"
    for rule, characters in ngram_characters(words):
        share = characters / len(text)
        if share > getattr(rules, rule):
            return f"gopher_repetition.{rule}", f"{share:.3f} > {getattr(rules, rule):g}"
    return None


def duplicates(pieces: list[str]) -> tuple[int, int]:
    """How many `pieces` stood there before, and their characters."""
    seen = set(pieces)
    if len(seen) == len(pieces):
        return 0, 0
    return len(pieces) - len(seen), sum(map(len, pieces)) - sum(map(len, seen))


def ngram_characters(words: list[str]):
    """Yield (rule, characters of repetition) for top_2_gram .. top_4_gram, duplicate_5_gram .. duplicate_10_gram.

    Words and n-grams become 64-bit hashes (a collision needs about 2^32 of them), so that counting is sorting
    integers. Most documents end at n = 5, where nothing is repeated any more.
    """
    if len(words) < 2:
        return
    word_hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    ends = np.zeros(len(words) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, words), np.int64, len(words)), out=ends[1:])
    hashes, repeated = word_hashes, np.arange(len(words))
    for n in range(2, min(10, len(words)) + 1):
        hashes = hashes[:-1] * _MULTIPLIER + word_hashes[n - 1 :]
        repeated = _positions_of_repeated(hashes, repeated[: np.searchsorted(repeated, len(hashes))])
        if n < 5:
            yield f"top_{n}_gram", _top_characters(hashes, ends, repeated, n)
        elif len(repeated):
            yield f"duplicate_{n}_gram", _duplicate_characters(hashes, ends, repeated, n)
        else:
            return


def _top_characters(hashes, ends, repeated, n: int) -> int:
    """Length with spaces times count of the commonest n-gram; of equally common ones the first in the text counts."""
    first, most = 0, 1
    if len(repeated):
        _, firsts, counts = np.unique(hashes[repeated], return_index=True, return_counts=True)
        most = int(counts.max())
        first = int(repeated[firsts[counts == most].min()])
    return int(ends[first + n] - ends[first] + n - 1) * most


def _positions_of_repeated(hashes, positions):
    """Those of `positions` (ascending) whose n-gram stands at another of them too, ascending.

    A repeated n-gram begins with a repeated (n-1)-gram, so the positions shrink quickly as n grows.
    """
    values = hashes[positions]
    order = values.argsort()
    in_order = values[order]
    again = in_order[1:] == in_order[:-1]
    twice = np.zeros(len(values), bool)
    twice[order[1:]] = again
    twice[order[:-1]] |= again
    return positions[twice]


def _duplicate_characters(hashes, ends, repeated, n: int) -> int:
    """Characters without spaces of n-grams seen before, where the n words of a hit are not looked at again.

    Only positions in `repeated`, where an n-gram stands that occurs twice or more, can matter.
    """
    seen, characters, allowed = set(), 0, 0
    lengths = (ends[repeated + n] - ends[repeated]).tolist()
    for position, value, length in zip(repeated.tolist(), hashes[repeated].tolist(), lengths, strict=True):
        if position < allowed:
            continue
        if value in seen:
            characters += length
            allowed = position + n
        else:
            seen.add(value)
    return characters
