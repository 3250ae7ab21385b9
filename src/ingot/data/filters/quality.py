"""The quality section of a data recipe, its presets, and the stages it makes.

web      FineWeb's rules on whitespace-separated words: the default
fineweb  what datatrove's examples/fineweb.py runs, decision for decision: its words, limits and peculiarities
gopher   Gopher's quality and repetition rules alone
c4       C4's rules as the paper has them: every line ends in punctuation; bad words where a list is given
none     no quality rules
"""

from dataclasses import dataclass, field, replace

from ingot.data.filters.c4 import C4, C4Rules
from ingot.data.filters.fineweb import FineWeb, FineWebRules
from ingot.data.filters.gopher import Gopher, GopherRules, RepetitionRules
from ingot.data.filters.words import WORDS


@dataclass(frozen=True, kw_only=True)
class QualityRules:
    """words: what a word is, to all rules: "whitespace" or "spacy" (see ingot.data.filters.words)."""

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
    "c4": replace(_NONE, c4=C4Rules(terminal_punctuation=True)),
    "none": _NONE,
}


def quality_stages(rules: QualityRules) -> dict[str, Gopher | C4 | FineWeb | None]:
    """The stages by name, in the order in which they run; None for one that is switched off."""
    gopher = rules.gopher.enabled or rules.gopher_repetition.enabled
    return {
        "gopher": Gopher(rules.gopher, rules.gopher_repetition, words=rules.words) if gopher else None,
        "c4": C4(rules.c4, words=rules.words) if rules.c4.enabled else None,
        "fineweb": FineWeb(rules.fineweb, words=rules.words) if rules.fineweb.enabled else None,
    }
