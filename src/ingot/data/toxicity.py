"""Toxicity: pages in which listed words are frequent, and what a classifier says if a recipe names one.

The word list comes with ingot. A classifier does not: no weights are shipped. One is trained on a named, licensed set
with `ingot data classifier train --positive TOXIC --negative HARMLESS` (docs/design/classifiers.md lists such sets).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from ingot.data.classify.scorer import model_sha256
from ingot.data.classify.stage import score_of
from ingot.schema.document import Document, Drop

_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, kw_only=True)
class ToxicityRules:
    """Both `min_words` listed words and a `words` share of all words are needed to drop a page.

    model: a fastText `.bin` or `.ftz`; "" for none. Pages whose probability of `label` is at least `classifier` are
    dropped; without a model these decide nothing. characters: beginning of a page that the model scores; 0: all of it.
    """

    enabled: bool = True
    words: float = 0.01
    min_words: int = 3
    model: str = ""
    label: str = "positive"
    classifier: float = 0.8
    characters: int = 5000

    def problems(self):
        if not self.label:
            yield "label", "is empty"
        if self.characters < 0:
            yield "characters", f"is {self.characters}, must be at least 0"
        for name in ("words", "classifier"):
            if not 0 < getattr(self, name) <= 1:
                yield name, f"is {getattr(self, name)}, must be in (0, 1]"


@cache
def listed_words() -> frozenset[str]:
    """The list that comes with ingot, toxicity_words.txt."""
    lines = files("ingot.data").joinpath("toxicity_words.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def fingerprint(rules: ToxicityRules) -> str:
    """What decides the stage's verdicts besides the rules' own values: the hash of its model, "" without one."""
    return model_sha256(Path(rules.model)) if rules.enabled and rules.model else ""


class Toxicity:
    """Stage with rules toxicity.words and toxicity.classifier; sets notes["toxicity"] to the classifier's score.

    words: lower-case words, matched between word borders; the shipped list if None.
    classifier: text -> score in [0, 1], a Python object in place of rules.model. It must be picklable when the build
    uses several workers. The model of the rules is loaded when first needed, once per process.
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
        self._sha256 = fingerprint(self.rules)

    @property
    def ran(self) -> str:
        rules, named = self.rules, "no classifier"
        if self.classifier is not None:
            named = f"classifier {classifier_name(self.classifier)}"
        elif rules.model:
            model = f"{Path(rules.model).name} ({self._sha256[:12]})"
            named = f"classifier {model}, {rules.label} from {rules.classifier:g} on"
        return f"word list of {len(self.words)} words; {named}"

    def __call__(self, document: Document) -> Drop | None:
        hits, share = self.listed(document.text)
        if hits >= self.rules.min_words and share >= self.rules.words:
            return Drop(self.name, "toxicity.words", f"{share:.3f} >= {self.rules.words:g}")
        score = self._score(document.text)
        if score is not None:
            document.notes["toxicity"] = round(score, 4)
            if score >= self.rules.classifier:
                return Drop(self.name, "toxicity.classifier", f"{score:.3f} >= {self.rules.classifier:g}")
        return None

    def _score(self, text: str) -> float | None:
        """What the classifier says, None if there is none."""
        rules = self.rules
        if self.classifier is not None:
            return float(self.classifier(text))
        if rules.model:
            return score_of(text, rules.model, self._sha256, rules.label, rules.characters)
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
