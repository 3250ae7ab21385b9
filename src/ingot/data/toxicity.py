"""Toxicity: pages in which listed words are frequent, and what a classifier says if one is plugged in."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ingot.schema.document import Document, Drop

_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, kw_only=True)
class ToxicityRules:
    """Both `min_words` listed words and a `words` share of all words are needed to drop a page.

    classifier: pages that score at least this are dropped; without a classifier it decides nothing.
    """

    enabled: bool = True
    words: float = 0.01
    min_words: int = 3
    classifier: float = 0.8

    def problems(self):
        for name in ("words", "classifier"):
            if not 0 < getattr(self, name) <= 1:
                yield name, f"is {getattr(self, name)}, must be in (0, 1]"


@cache
def listed_words() -> frozenset[str]:
    """The list that comes with ingot, toxicity_words.txt."""
    lines = files("ingot.data").joinpath("toxicity_words.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


class Toxicity:
    """Stage with rules toxicity.words and toxicity.classifier.

    words: lower-case words, matched between word borders; the shipped list if None.
    classifier: text -> score in [0, 1]. It comes as a Python object, never as a name in a file, so that a recipe
    from elsewhere cannot run code. It must be picklable when the build uses several workers.
    """

    name = "toxicity"

    def __init__(
        self,
        rules: ToxicityRules | None = None,
        *,
        words: Sequence[str] | frozenset[str] | None = None,
        classifier: Callable[[str], float] | None = None,
    ):
        self.rules = rules or ToxicityRules()
        self.words = listed_words() if words is None else frozenset(word.lower() for word in words)
        self.classifier = classifier

    @property
    def ran(self) -> str:
        if self.classifier is None:
            return f"word list of {len(self.words)} words; no classifier"
        return f"word list of {len(self.words)} words; classifier {classifier_name(self.classifier)}"

    def __call__(self, document: Document) -> Drop | None:
        hits, share = self.listed(document.text)
        if hits >= self.rules.min_words and share >= self.rules.words:
            return Drop(self.name, "toxicity.words", f"{share:.3f} >= {self.rules.words:g}")
        if self.classifier is not None:
            score = float(self.classifier(document.text))
            if score >= self.rules.classifier:
                return Drop(self.name, "toxicity.classifier", f"{score:.3f} >= {self.rules.classifier:g}")
        return None

    def listed(self, text: str) -> tuple[int, float]:
        """How many words of `text` are listed, and their share of all words."""
        lower = text.lower()
        if not any(word in lower for word in self.words):  # 20x faster than splitting, and true of most pages
            return 0, 0.0
        words = _WORD.findall(lower)
        hits = sum(word in self.words for word in words)
        return hits, hits / max(len(words), 1)


def classifier_name(classifier: Callable[[str], float] | None) -> str:
    """What the funnel calls a classifier: its `name`, else where its class or function is defined."""
    if classifier is None:
        return "none"
    kind = classifier if hasattr(classifier, "__qualname__") else type(classifier)
    return str(getattr(classifier, "name", f"{kind.__module__}.{kind.__qualname__}"))
