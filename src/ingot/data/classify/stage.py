"""The stage that keeps documents by the scores of classifiers. It is off unless a recipe names models; ingot comes
without models."""

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.data.classify.model import Scorer, model_sha256
from ingot.errors import ConfigError
from ingot.ranges import Count, Share
from ingot.schema.corpus import Document, Drop
from ingot.storage import canonical_json, sha256_bytes


@dataclass(frozen=True, kw_only=True)
class ModelRule:
    """Settings of one classifier. A document is kept if its probability of `label` is at least `threshold` (keep
    "above"), or less than `threshold` (keep "below").

    name: used for the rule, classifier.NAME, and for the score in the lineage. model: a fastText `.bin` or `.ftz`.
    characters: how many characters from the start of a text are scored (the model's card shows how many it was trained
    on); 0: all.
    """

    name: str
    model: str
    label: str
    threshold: Share = 0.5
    keep: Literal["above", "below"] = "above"
    characters: Count = 5000

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
    """Settings of the stage. models: the classifiers, in the order in which they are applied; the first that
    does not keep a document drops it."""

    enabled: bool = False
    models: tuple[ModelRule, ...] = ()

    def problems(self):
        names = [rule.name for rule in self.models]
        if self.enabled and not names:
            yield "models", "is empty: a stage that is switched on needs at least one model"
        if len(set(names)) < len(names):
            yield "models", "has two models with the same name"


def fingerprint(rules: ClassifierRules) -> str:
    """Return a hash of the model files, which affect the decisions in addition to the rules; "" if the stage is off."""
    if not rules.enabled:
        return ""
    return sha256_bytes(canonical_json([model_sha256(Path(rule.model)) for rule in rules.models]).encode())


class Classify:
    """Stage with a rule classifier.NAME per model; sets notes["classifier.NAME"] to the score.

    The object has only rules and hashes; a model is loaded when first needed, once per process.
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
    """Return the probability of `label` for the first `characters` of `text` (0: all); 0 if the model knows no feature
    of the text.

    Raises ConfigError if the model does not have the label, or if the file no longer has the hash `sha256`.
    """
    head = text[:characters] if characters else text
    return _scorer(model, sha256, label).scores(head).get(label, 0.0)


@functools.cache
def _scorer(model: str, sha256: str, label: str) -> Scorer:
    scorer = Scorer(Path(model))
    if scorer.sha256 != sha256:
        raise ConfigError(
            "E-CLASSIFIER-CHANGED",
            f"{model} was changed during a build that uses it",
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
