"""FineWeb's own rules (Penedo et al. 2024, arXiv 2406.17557, section 3.6)."""

from dataclasses import dataclass

from ingot.data.filters.gopher import duplicates
from ingot.schema.document import Document, Drop

# The sentence marks of the scripts that crawls hold most of; straight and curly quotes close a sentence too.
TERMINAL_PUNCTUATION = tuple(".!?…\"'”’»。！？．｡।॥؟۔։።༎။។")


@dataclass(frozen=True, kw_only=True)
class FineWebRules:
    """terminal_punctuation: least share of lines that end in it. The others are the largest shares allowed.

    duplicate_line_characters: 0.01 is what FineWeb's code ran with; its paper and blog speak of 0.1.
    short_lines: of lines with at most `short_line_characters`. newline_ratio: line breaks per word.
    """

    enabled: bool = True
    terminal_punctuation: float = 0.12
    duplicate_line_characters: float = 0.01
    short_lines: float = 0.67
    short_line_characters: int = 30
    newline_ratio: float = 0.3


class FineWeb:
    """Stage with rules fineweb.*; only reads the text."""

    name = "fineweb"

    def __init__(self, rules: FineWebRules | None = None):
        self.rules = rules or FineWebRules()

    @property
    def ran(self) -> str:
        return f"custom rules, duplicate_line_characters {self.rules.duplicate_line_characters:g} (paper: 0.1)"

    def __call__(self, document: Document) -> Drop | None:
        rules, text = self.rules, document.text
        lines = [line for line in text.split("\n") if line.strip()]
        if not lines:
            return Drop(self.name, "fineweb.empty", "no line left")
        ended = sum(line.endswith(TERMINAL_PUNCTUATION) for line in lines) / len(lines)
        if ended < rules.terminal_punctuation:
            return self._drop("terminal_punctuation", ended, "<")
        short = sum(len(line) <= rules.short_line_characters for line in lines) / len(lines)
        if short > rules.short_lines:
            return self._drop("short_lines", short, ">")
        repeated = duplicates(lines)[1] / len(text.replace("\n", ""))
        if repeated > rules.duplicate_line_characters:
            return self._drop("duplicate_line_characters", repeated, ">")
        newlines = text.count("\n") / len(text.split())
        if newlines > rules.newline_ratio:
            return self._drop("newline_ratio", newlines, ">")
        return None

    def _drop(self, rule: str, share: float, sign: str) -> Drop:
        return Drop(self.name, f"fineweb.{rule}", f"{share:.3f} {sign} {getattr(self.rules, rule):g}")
