"""FineWeb's own rules (Penedo et al. 2024, arXiv 2406.17557, section 3.6)."""

from dataclasses import dataclass

from ingot.data.filters.counts import count_fineweb
from ingot.data.filters.limits import problems_of_limits
from ingot.data.filters.words import split_english
from ingot.schema.document import Document, Drop


@dataclass(frozen=True, kw_only=True)
class FineWebRules:
    """terminal_punctuation: least share of lines that end in it. The others are the largest shares allowed.

    closing_quotes: quotation marks and ellipses end a line too, not only the sentence marks of all scripts.
    duplicate_line_characters: 0.01 is what FineWeb's code ran with; its paper and blog speak of 0.1.
    short_lines: of lines with at most `short_line_characters`. newline_ratio: line breaks per word.
    """

    enabled: bool = True
    terminal_punctuation: float = 0.12
    closing_quotes: bool = True
    duplicate_line_characters: float = 0.01
    short_lines: float = 0.67
    short_line_characters: int = 30
    newline_ratio: float = 0.3

    def problems(self):
        yield from problems_of_limits(self)


class FineWeb:
    """Stage with rules fineweb.*; only reads the text. words: of ingot.data.filters.words.WORDS."""

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
            # spaCy never finds fewer words than there are between whitespace: only now the splitting can matter.
            newlines = counts.newlines / len(split_english(document.text))
        if newlines > rules.newline_ratio:
            return self._drop("newline_ratio", newlines, ">")
        return None

    def _drop(self, rule: str, share: float, sign: str) -> Drop:
        return Drop(self.name, f"fineweb.{rule}", f"{share:.3f} {sign} {getattr(self.rules, rule):g}")
