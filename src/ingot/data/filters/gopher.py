"""Gopher: document quality and repetition rules (Rae et al. 2021, arXiv 2112.11446, Table A1 and section A.1.1).

The definition of a word is a setting (filters/words) that changes these rules: if punctuation marks count as words,
`alphabetic_words` is far stricter than with whitespace-separated words. counts.py describes the counts.
"""

from dataclasses import dataclass

from ingot.data.filters.counts import GopherCounts, count_gopher, problems_of_limits
from ingot.ranges import Count, Limit
from ingot.schema.corpus import Document, Drop


@dataclass(frozen=True, kw_only=True)
class GopherRules:
    """Limits of Gopher's quality rules.

    word_count, mean_word_length: (least, most). stop_words: how many different English stop words a document needs;
    the rule is skipped for other languages. All other limits are shares of words or lines. Blank lines do not count,
    except with spaCy's words, as in datatrove.
    """

    enabled: bool = True
    word_count: tuple[Count, Count] = (50, 100_000)
    mean_word_length: tuple[Limit, Limit] = (3.0, 10.0)
    symbol_ratio: Limit = 0.1  # most "#" per word, and most ellipses per word
    bullet_lines: Limit = 0.9
    ellipsis_lines: Limit = 0.3
    alphabetic_words: Limit = 0.8  # the least share
    stop_words: Count = 2

    def problems(self):
        yield from problems_of_limits(self)


@dataclass(frozen=True, kw_only=True)
class RepetitionRules:
    """Limits of Gopher's repetition rules: the largest share of lines, paragraphs or characters that may be repeated
    text."""

    enabled: bool = True
    duplicate_lines: Limit = 0.30
    duplicate_paragraphs: Limit = 0.30
    duplicate_line_characters: Limit = 0.20
    duplicate_paragraph_characters: Limit = 0.20
    top_2_gram: Limit = 0.20
    top_3_gram: Limit = 0.18
    top_4_gram: Limit = 0.16
    duplicate_5_gram: Limit = 0.15
    duplicate_6_gram: Limit = 0.14
    duplicate_7_gram: Limit = 0.13
    duplicate_8_gram: Limit = 0.12
    duplicate_9_gram: Limit = 0.11
    duplicate_10_gram: Limit = 0.10

    def problems(self):
        yield from problems_of_limits(self)


_NGRAMS = tuple(f"top_{n}_gram" for n in (2, 3, 4)) + tuple(f"duplicate_{n}_gram" for n in range(5, 11))


class Gopher:
    """Stage with the rules gopher.* and gopher_repetition.*; does not change the text. words: one of
    filters.words.WORDS."""

    name = "gopher"

    def __init__(
        self,
        quality: GopherRules | None = None,
        repetition: RepetitionRules | None = None,
        *,
        words: str = "whitespace",
    ):
        self.quality = quality or GopherRules()
        self.repetition = repetition or RepetitionRules()
        self.words = words

    @property
    def ran(self) -> str:
        parts = [("quality", self.quality.enabled), ("repetition", self.repetition.enabled)]
        definition = "words of spaCy's rules for English" if self.words == "spacy" else "whitespace-separated words"
        return f"{' and '.join(name for name, on in parts if on)} rules; {definition}"

    def __call__(self, document: Document) -> Drop | None:
        counts = count_gopher(document.text, self.words)
        broken = None
        if self.quality.enabled:
            broken = broken_quality_rule(counts, self.quality)
            if broken is not None and broken[0] == "gopher.stop_words" and document.language not in ("", "en"):
                broken = None  # stop words are English; no quality rule follows this one
        if broken is None and self.repetition.enabled:
            broken = broken_repetition_rule(counts, self.repetition)
        return None if broken is None else Drop(self.name, *broken)


def broken_quality_rule(counts: GopherCounts, rules: GopherRules) -> tuple[str, str] | None:
    """Return (rule, value) of the first rule that a text with `counts` breaks, or None."""
    count = counts.real_words
    low, high = rules.word_count
    if not low <= count <= high:
        return "gopher.word_count", _outside(count, low, high)
    if not count:
        return None
    low, high = rules.mean_word_length
    mean = counts.real_characters / count
    if not low <= mean <= high:
        return "gopher.mean_word_length", _outside(mean, low, high)
    for rule, share in (
        ("symbol_ratio", max(counts.hashes, counts.ellipses) / counts.words),
        ("bullet_lines", counts.bullet_lines / counts.lines),
        ("ellipsis_lines", counts.ellipsis_lines / counts.lines),
    ):
        if share > getattr(rules, rule):
            return f"gopher.{rule}", f"{share:.3f} > {getattr(rules, rule):g}"
    alphabetic = counts.alphabetic_words / counts.words
    if alphabetic < rules.alphabetic_words:
        return "gopher.alphabetic_words", f"{alphabetic:.3f} < {rules.alphabetic_words:g}"
    if counts.stop_words < rules.stop_words:
        return "gopher.stop_words", f"{counts.stop_words} < {rules.stop_words}"
    return None


def _outside(value: float, low: float, high: float) -> str:
    return f"{value:.4g} < {low:g}" if value < low else f"{value:.4g} > {high:g}"


def broken_repetition_rule(counts: GopherCounts, rules: RepetitionRules) -> tuple[str, str] | None:
    """Return (rule, value) of the first rule that a text with `counts` breaks, or None."""
    characters = max(counts.characters, 1)
    shares = {
        "duplicate_paragraphs": counts.duplicate_paragraphs / counts.paragraphs,
        "duplicate_paragraph_characters": counts.duplicate_paragraph_characters / characters,
        "duplicate_lines": counts.duplicate_lines / counts.pieces,
        "duplicate_line_characters": counts.duplicate_line_characters / characters,
    } | {rule: getattr(counts, rule) / characters for rule in _NGRAMS}
    for rule, share in shares.items():
        if share > getattr(rules, rule):
            return f"gopher_repetition.{rule}", f"{share:.3f} > {getattr(rules, rule):g}"
    return None
