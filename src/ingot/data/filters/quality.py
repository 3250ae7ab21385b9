"""The quality section of a data recipe: its presets and stages, and FineWeb's own rules. The presets:

web      FineWeb's rules on whitespace-separated words: the default
fineweb  the same decisions as datatrove's examples/fineweb.py: its words, limits and peculiarities
gopher   Gopher's quality and repetition rules alone
c4       C4's rules alone, with the thresholds and end marks of its authors' code: 3 sentences, lines of 5 words that
         end in punctuation; bad words if a list is given (quality.c4.bad_words). c4.py names the differences
none     no quality rules
"""

from dataclasses import dataclass, field, replace
from typing import TypedDict

from ingot.data.filters.c4 import C4, C4Rules
from ingot.data.filters.counts import count_fineweb, problems_of_limits
from ingot.data.filters.gopher import Gopher, GopherRules, RepetitionRules
from ingot.data.filters.words import WORDS, split_english
from ingot.ranges import Count, Limit
from ingot.schema.corpus import Document, Drop

# FineWeb's own rules (Penedo et al. 2024, arXiv 2406.17557, section 3.6).


@dataclass(frozen=True, kw_only=True)
class FineWebRules:
    """Limits of FineWeb's rules.

    terminal_punctuation: the least share of lines that end in a sentence mark. The other limits are largest values.

    closing_quotes: a line may also end in a quotation mark or an ellipsis, not only in a sentence mark of any script.
    duplicate_line_characters: share of characters in repeated lines. FineWeb's code uses 0.01, its paper says 0.1.
    short_lines: share of lines with at most `short_line_characters` characters. newline_ratio: newlines per word.
    """

    enabled: bool = True
    terminal_punctuation: Limit = 0.12
    closing_quotes: bool = True
    duplicate_line_characters: Limit = 0.01
    short_lines: Limit = 0.67
    short_line_characters: Count = 30
    newline_ratio: Limit = 0.3

    def problems(self):
        yield from problems_of_limits(self)


class FineWeb:
    """Stage with the rules fineweb.*; does not change the text. words: one of filters.words.WORDS."""

    name = "fineweb"

    def __init__(self, rules: FineWebRules | None = None, *, words: str = "whitespace"):
        self.rules = rules or FineWebRules()
        self.words = words

    @property
    def ran(self) -> str:
        return f"custom rules, duplicate_line_characters {self.rules.duplicate_line_characters:g} (paper: 0.1)"

    def __call__(self, document: Document) -> Drop | None:
        rules = self.rules
        counts = count_fineweb(document.text, rules.short_line_characters, rules.closing_quotes)
        if not counts.lines:
            return Drop(self.name, "fineweb.empty", "no line left")
        ended = counts.ended_lines / counts.lines
        if ended < rules.terminal_punctuation:
            return self._drop("terminal_punctuation", ended, "<")
        short = counts.short_lines / counts.lines
        if short > rules.short_lines:
            return self._drop("short_lines", short, ">")
        repeated = counts.duplicate_characters / counts.characters
        if repeated > rules.duplicate_line_characters:
            return self._drop("duplicate_line_characters", repeated, ">")
        newlines = counts.newlines / counts.words
        if newlines > rules.newline_ratio and self.words == "spacy":
            # spaCy never finds fewer words than whitespace does, so its slower splitting matters only here.
            newlines = counts.newlines / len(split_english(document.text))
        if newlines > rules.newline_ratio:
            return self._drop("newline_ratio", newlines, ">")
        return None

    def _drop(self, rule: str, share: float, sign: str) -> Drop:
        return Drop(self.name, f"fineweb.{rule}", f"{share:.3f} {sign} {getattr(self.rules, rule):g}")


@dataclass(frozen=True, kw_only=True)
class QualityRules:
    """Settings of all quality rules. words: the definition of a word, "whitespace" or "spacy"
    (ingot.data.filters.words)."""

    words: str = "whitespace"
    gopher: GopherRules = field(default_factory=GopherRules)
    gopher_repetition: RepetitionRules = field(default_factory=RepetitionRules)
    c4: C4Rules = field(default_factory=C4Rules)
    fineweb: FineWebRules = field(default_factory=FineWebRules)

    def problems(self):
        if self.words not in WORDS:
            yield "words", f"is {self.words!r}, must be one of {', '.join(WORDS)}"


_WEB = QualityRules()
_NONE = QualityRules(
    gopher=GopherRules(enabled=False),
    gopher_repetition=RepetitionRules(enabled=False),
    c4=C4Rules(enabled=False),
    fineweb=FineWebRules(enabled=False),
)

PRESETS: dict[str, QualityRules] = {
    "web": _WEB,
    "fineweb": replace(_WEB, words="spacy", fineweb=FineWebRules(closing_quotes=False)),
    "gopher": replace(_NONE, gopher=GopherRules(), gopher_repetition=RepetitionRules()),
    "c4": replace(_NONE, c4=C4Rules(sentences=3, line_words=5, terminal_punctuation=True, single_quotes=False)),
    "none": _NONE,
}


class QualityStages(TypedDict):
    """The stages of a quality section by name, in the order in which they run; None: switched off."""

    gopher: Gopher | None
    c4: C4 | None
    fineweb: FineWeb | None


def quality_stages(rules: QualityRules) -> QualityStages:
    """Return the stages of `rules`."""
    gopher = rules.gopher.enabled or rules.gopher_repetition.enabled
    return {
        "gopher": Gopher(rules.gopher, rules.gopher_repetition, words=rules.words) if gopher else None,
        "c4": C4(rules.c4, words=rules.words) if rules.c4.enabled else None,
        "fineweb": FineWeb(rules.fineweb, words=rules.words) if rules.fineweb.enabled else None,
    }
