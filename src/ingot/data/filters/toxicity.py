"""Filter toxic pages by the share of listed words, and by a classifier if the recipe names one.

The word list comes with ingot; a classifier does not. Train a classifier on a licensed data set with
`ingot data classifier train --positive TOXIC --negative HARMLESS` (docs/design/classifiers.md lists such sets).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from ingot.data.classify.model import model_sha256
from ingot.data.classify.stage import score_of
from ingot.ranges import Count, Share
from ingot.schema.corpus import Document, Drop

_LETTER = r"[^\W\d_]"
_WORD = re.compile(f"{_LETTER}+")
_START_BYTES = 4
_SPREAD = np.uint32(0x9E3779B1)  # Fibonacci hashing: the upper half of the product is the index in a table


@dataclass(frozen=True, kw_only=True)
class ToxicityRules:
    """Settings of the toxicity rules.

    A page is dropped if it has at least `min_words` listed words and they are at least the share `words` of its words.
    model: a fastText `.bin` or `.ftz`; "": none. With a model, a page whose probability of `label` is at least
    `classifier` is dropped. characters: how many characters from the start of a page the model scores; 0: all.
    """

    enabled: bool = True
    words: Share = 0.01
    min_words: Count = 3
    model: str = ""
    label: str = "positive"
    classifier: Share = 0.8
    characters: Count = 5000

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
    """Return the word list that comes with ingot, toxicity_words.txt."""
    lines = files("ingot.data.filters").joinpath("toxicity_words.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def fingerprint(rules: ToxicityRules) -> str:
    """Return the SHA-256 of the model, which decides about pages in addition to the rules; "" without a model."""
    return model_sha256(Path(rules.model)) if rules.enabled and rules.model else ""


class Toxicity:
    """Stage with rules toxicity.words and toxicity.classifier; sets notes["toxicity"] to the classifier's score.

    words: words to find as whole words, in any case; if None, the list that comes with ingot.
    classifier: a Python callable, text -> score in [0, 1], used instead of rules.model. It must be picklable if the
    build uses several workers. rules.model is loaded when first needed, once per process.
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
        self._listed = _Listed(self.words)
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
        lower = document.text.lower()
        hits = self._listed.count(lower)
        if hits and hits >= self.rules.min_words:  # rarely true, so the words of few pages are counted
            share = hits / len(_WORD.findall(lower))
            if share >= self.rules.words:
                return Drop(self.name, "toxicity.words", f"{share:.3f} >= {self.rules.words:g}")
        score = self._score(document.text)
        if score is not None:
            document.notes["toxicity"] = round(score, 4)
            if score >= self.rules.classifier:
                return Drop(self.name, "toxicity.classifier", f"{score:.3f} >= {self.rules.classifier:g}")
        return None

    def _score(self, text: str) -> float | None:
        """Return the score of the classifier, None without a classifier."""
        rules = self.rules
        if self.classifier is not None:
            return float(self.classifier(text))
        if rules.model:
            return score_of(text, rules.model, self._sha256, rules.label, rules.characters)
        return None


class _Listed:
    """Counts the listed words in a lower-case text.

    Most pages contain none. So the text is read as overlapping 4-byte integers, and a listed word is searched for only
    if one of these integers equals its first four bytes. This is five times faster than one search per word, and ten
    times faster than splitting the text.
    """

    def __init__(self, words: Iterable[str]):
        self._patterns: dict[int, list[re.Pattern]] = defaultdict(list)  # by the first four bytes
        self._short: list[re.Pattern] = []
        self._table = np.zeros(1 << 16, bool)
        for word in sorted(words):
            if not _WORD.fullmatch(word):
                continue  # cannot match a word of a text
            # `re` is fast for patterns that begin with literal text, so the test of the letter before the word is a
            # lookbehind after the word.
            pattern = re.compile(f"{word}(?<!{_LETTER}{word})(?!{_LETTER})")
            start = word.encode("utf-8", "surrogatepass")[:_START_BYTES]
            if len(start) < _START_BYTES:
                self._short.append(pattern)
                continue
            number = np.frombuffer(start, "<u4")
            self._patterns[int(number[0])].append(pattern)
            self._table[_places(number)] = True

    def count(self, lower: str) -> int:
        found = list(self._short)
        data = lower.encode("utf-8", "surrogatepass")
        if (count := len(data) - _START_BYTES + 1) > 0:
            numbers = np.ndarray(count, "<u4", data, strides=(1,))
            likely = numbers[self._table[_places(numbers)]]
            for number in self._patterns.keys() & set(likely.tolist()):
                found += self._patterns[number]
        return sum(len(pattern.findall(lower)) for pattern in found)


def _places(numbers: np.ndarray) -> np.ndarray:
    return numbers * _SPREAD >> np.uint32(16)


def classifier_name(classifier: Callable[[str], float] | None) -> str:
    """Return the name that the funnel shows for a classifier: its attribute `name`, else its module and qualified
    name."""
    if classifier is None:
        return "none"
    kind = classifier if hasattr(classifier, "__qualname__") else type(classifier)
    return str(getattr(classifier, "name", f"{kind.__module__}.{kind.__qualname__}"))
