"""The data recipe: every threshold of the pipeline, in the order in which its stages run.

The preset `web` is these defaults: FineWeb's rules on whitespace-separated words. A TOML file or `--set` changes single
values: `--set quality.gopher.symbol_ratio=0.15`. The name of a rule in the funnel is, nearly always, its field here.
"""

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot import config
from ingot.data.dedup.minhash import DedupRules
from ingot.data.filters.c4 import C4Rules
from ingot.data.filters.fineweb import FineWebRules
from ingot.data.filters.gopher import GopherRules, RepetitionRules
from ingot.data.pii import PiiRules
from ingot.data.toxicity import ToxicityRules
from ingot.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LanguageRules:
    """keep: ISO 639 codes; empty keeps every language that is recognised. threshold: least probability of lid.176."""

    enabled: bool = True
    keep: tuple[str, ...] = ("en",)
    threshold: float = 0.65

    def problems(self):
        if not 0 <= self.threshold <= 1:
            yield "threshold", f"is {self.threshold}, must be in [0, 1]"


@dataclass(frozen=True, kw_only=True)
class QualityRules:
    gopher: GopherRules = field(default_factory=GopherRules)
    gopher_repetition: RepetitionRules = field(default_factory=RepetitionRules)
    c4: C4Rules = field(default_factory=C4Rules)
    fineweb: FineWebRules = field(default_factory=FineWebRules)


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Each section has `enabled`; a stage that is switched off stays in the funnel and says so."""

    language: LanguageRules = field(default_factory=LanguageRules)
    quality: QualityRules = field(default_factory=QualityRules)
    pii: PiiRules = field(default_factory=PiiRules)
    dedup: DedupRules = field(default_factory=DedupRules)
    toxicity: ToxicityRules = field(default_factory=ToxicityRules)


def load_recipe(path: Path | None = None, overrides: Sequence[str] = ()) -> DataRecipe:
    """The recipe of TOML `path` (the preset `web` if None) with `section.key=value` overrides. Raises ConfigError."""
    if path is not None and not path.is_file():
        raise ConfigError(
            f"no data recipe at {path}",
            rule="a recipe is a TOML file with the sections of the preset 'web'",
            fix="give its path, or leave --recipe out and change single values with --set",
        )
    return config.load(DataRecipe, path, overrides)


def setting_of(rule: str) -> str:
    """The dotted recipe key that decides `rule` ("gopher.symbol_ratio" -> "quality.gopher.symbol_ratio"), or ""."""
    for prefix in ("quality.", ""):
        kind: typing.Any = DataRecipe
        for name in (prefix + _KEYS.get(rule, rule)).split("."):
            if not dataclasses.is_dataclass(kind) or name not in {f.name for f in dataclasses.fields(kind)}:
                break
            kind = typing.get_type_hints(kind)[name]
        else:
            return prefix + _KEYS.get(rule, rule)
    return ""


def preset_of(setting: str) -> str:
    """The value of a recipe key in the preset `web`, as TOML ("quality.gopher.word_count" -> "[50, 100000]"), or ""."""
    value: typing.Any = config.to_dict(DataRecipe())
    for name in setting.split("."):
        value = value[name]
    return "" if isinstance(value, dict) else json.dumps(value)  # of numbers, strings and lists also TOML


# Rules that are not called like the field that decides them.
_KEYS = {
    "language.other": "language.keep",
    "language.unsure": "language.threshold",
    "near_duplicates.same_text": "dedup.enabled",
    "near_duplicates.similar": "dedup.jaccard",
}
