"""The stage that keeps documents by the scores of classifiers. Off unless a recipe names models: ingot ships none."""

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.data.classify.model import Scorer, model_sha256
from ingot.errors import ConfigError
from ingot.schema.document import Document, Drop
from ingot.storage import canonical_json, sha256_bytes


@dataclass(frozen=True, kw_only=True)
class ModelRule:
    """One classifier. A document stays if its probability of `label` is at least `threshold` (keep "above") or less
    (keep "below").

    name: the name of the rule, classifier.NAME, and of the score in the lineage. model: a fastText `.bin` or `.ftz`.
    characters: beginning of a text that is scored (the model's card says with how much it was trained); 0: all of it.
    """

    name: str
    model: str
    label: str
    threshold: float = 0.5
    keep: Literal["above", "below"] = "above"
    characters: int = 5000

    def problems(self):
        if not self.name.replace("_", "").isalnum():
            yield "name", f"is {self.name!r}, must be letters, digits and '_'"
        for field in ("model", "label"):
            if not getattr(self, field):
                yield field, "is empty"
        if not 0 <= self.threshold <= 1:
            yield "threshold", f"is {self.threshold}, must be in [0, 1]"
        if self.characters < 0:
            yield "characters", f"is {self.characters}, must be at least 0"


@dataclass(frozen=True, kw_only=True)
class ClassifierRules:
    """Settings of the stage. models: applied in this order; the first that refuses a document drops it."""

    enabled: bool = False
    models: tuple[ModelRule, ...] = ()

    def problems(self):
        names = [rule.name for rule in self.models]
        if self.enabled and not names:
            yield "models", "is empty: a classifier that is switched on names its model files"
        if len(set(names)) < len(names):
            yield "models", "has two of one name"


def fingerprint(rules: ClassifierRules) -> str:
    """Return the hash of the models, which decide verdicts in addition to the rules; "" where the stage is off."""
    if not rules.enabled:
        return ""
    return sha256_bytes(canonical_json([model_sha256(Path(rule.model)) for rule in rules.models]).encode())


class Classify:
    """Stage with a rule classifier.NAME per model; sets notes["classifier.NAME"] to the score.

    It holds rules and hashes only: models are loaded when first needed, once per process.
    """

    name = "classifier"

    def __init__(self, rules: ClassifierRules):
        self.rules = rules
        self._hashes = tuple(model_sha256(Path(rule.model)) for rule in rules.models)

    @property
    def ran(self) -> str:
        return "; ".join(
            f"{rule.name}: keeps {rule.label} {rule.keep} {rule.threshold:g} by {Path(rule.model).name} ({digest[:12]})"
            for rule, digest in zip(self.rules.models, self._hashes, strict=True)
        )

    def __call__(self, document: Document) -> Drop | None:
        for rule, digest in zip(self.rules.models, self._hashes, strict=True):
            score = score_of(document.text, rule.model, digest, rule.label, rule.characters)
            document.notes[f"classifier.{rule.name}"] = round(score, 4)
            above = score >= rule.threshold
            if above != (rule.keep == "above"):
                sign = ">=" if above else "<"
                return Drop(self.name, f"classifier.{rule.name}", f"{score:.3f} {sign} {rule.threshold:g}")
        return None


def score_of(text: str, model: str, sha256: str, label: str, characters: int) -> float:
    """Return the probability of `label` for the beginning of `text`; 0 where the model knows no feature of it.

    Raises ConfigError for a label that the model does not have.
    """
    head = text[:characters] if characters else text
    return _scorer(model, sha256, label).scores(head).get(label, 0.0)


@functools.cache
def _scorer(model: str, sha256: str, label: str) -> Scorer:
    scorer = Scorer(Path(model))
    if scorer.sha256 != sha256:
        raise ConfigError(
            "E-CLASSIFIER-CHANGED",
            f"{model} was changed while a build uses it",
            rule="a build scores all documents with one model",
            fix="restore the file, or start the build again",
            path=model,
        )
    if scorer.labels and label not in scorer.labels:
        close = difflib.get_close_matches(label, scorer.labels, n=1)
        raise ConfigError(
            "E-CLASSIFIER-LABEL",
            f"{model} has no label {label!r}",
            rule=f"labels of this model: {', '.join(sorted(scorer.labels)[:20])}",
            fix=f"did you mean {close[0]!r}?" if close else "name one of its labels in the recipe",
            path=model,
            label=label,
            close=close,
        )
    return scorer
