"""The data recipe: every threshold of a data build, in the order in which its stages run.

A preset sets the quality rules: `web` (the default), `fineweb`, `gopher`, `c4`, `none` (filters/quality.py). A TOML
file or `--set` changes single values: `--set quality.gopher.symbol_ratio=0.15`. A rule in the funnel usually has the
name of its field here; `setting_of` knows the exceptions.
"""

import dataclasses
import difflib
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot import config
from ingot.config import LEFT_OUT_AT_DEFAULT
from ingot.data import decontaminate, parts
from ingot.data.classify import stage as classify
from ingot.data.classify.stage import ClassifierRules
from ingot.data.decontaminate import DecontaminationRules
from ingot.data.dedup.minhash import DedupRules
from ingot.data.dedup.substrings import SubstringRules
from ingot.data.extract.html import ExtractRules
from ingot.data.filters import blocklist, language, toxicity
from ingot.data.filters.blocklist import BlocklistRules
from ingot.data.filters.junk import JunkRules
from ingot.data.filters.language import LanguageRules
from ingot.data.filters.quality import PRESETS, QualityRules
from ingot.data.filters.quarantine import QuarantineRules, quarantined_names
from ingot.data.filters.toxicity import ToxicityRules
from ingot.data.pii import PiiRules
from ingot.data.sources.bounded import Limits
from ingot.data.sources.remote import RemoteRules
from ingot.errors import ConfigError
from ingot.plugins.load import load_plugins
from ingot.schema.plugins import Plugins
from ingot.storage import sha256_file

DEFAULT_PRESET = "web"
OF_ONE_SOURCE = (
    "preset", "extract", "blocklist", "language", "quality", "junk", "classifier", "toxicity", "pii",
    "filter", "format", "extractor", "pii_kind",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """The rules of every stage. A stage that is switched off (`enabled` in its section) stays in the funnel.

    preset: name of the quality preset; it gives the values of [quality] that the recipe file does not set. remote:
    rules for fetching inputs, which have no effect on the documents. source: source name -> values that differ for its
    documents (code needs other rules than prose); only the sections in `OF_ONE_SOURCE` can differ. quarantine: lists of
    documents to leave out. plugins: modules
    that register parts; filter, format, extractor, pii_kind, mixture: name of such a part -> its settings (parts.py).
    """

    preset: str = DEFAULT_PRESET
    remote: RemoteRules = field(default_factory=RemoteRules)
    limits: Limits = field(default_factory=Limits)
    extract: ExtractRules = field(default_factory=ExtractRules)
    blocklist: BlocklistRules = field(default_factory=BlocklistRules)
    language: LanguageRules = field(default_factory=LanguageRules)
    quality: QualityRules = field(default_factory=lambda: PRESETS[DEFAULT_PRESET])
    junk: JunkRules = field(default_factory=JunkRules)
    classifier: ClassifierRules = field(default_factory=ClassifierRules)
    toxicity: ToxicityRules = field(default_factory=ToxicityRules)
    pii: PiiRules = field(default_factory=PiiRules)
    decontamination: DecontaminationRules = field(default_factory=DecontaminationRules)
    dedup: DedupRules = field(default_factory=DedupRules)
    substrings: SubstringRules = field(default_factory=SubstringRules)
    source: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantine: QuarantineRules = field(default_factory=QuarantineRules, metadata=LEFT_OUT_AT_DEFAULT)
    plugins: Plugins = field(default_factory=Plugins, metadata=LEFT_OUT_AT_DEFAULT)
    filter: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=LEFT_OUT_AT_DEFAULT)
    format: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=LEFT_OUT_AT_DEFAULT)
    extractor: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=LEFT_OUT_AT_DEFAULT)
    pii_kind: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=LEFT_OUT_AT_DEFAULT)
    mixture: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=LEFT_OUT_AT_DEFAULT)

    @property
    def tables(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The settings of the parts of plug-ins: kind -> name -> table."""
        return {kind: getattr(self, kind) for kind in parts.KINDS}

    def problems(self):
        if self.preset not in PRESETS:
            close = difflib.get_close_matches(self.preset, PRESETS, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            yield "preset", f"{self.preset!r} is none of {', '.join(PRESETS)}{meant}"


def load_recipe(path: Path | None = None, overrides: Sequence[str] = (), preset: str = "") -> DataRecipe:
    """Return the recipe in the TOML file `path` (if None, only the preset), changed by `section.key=value` overrides.

    preset: the name of a preset to use instead of the one in the file. Raises ConfigError.
    """
    if path is not None and not path.is_file():
        raise ConfigError(
            "E-RECIPE-MISSING",
            f"there is no data recipe at {path}",
            rule="a recipe is a TOML file with the sections of the preset 'web'",
            fix="correct the path, or leave --recipe out and change single values with --set",
            path=str(path),
        )
    overrides = [f'preset="{preset}"', *overrides] if preset else overrides
    values, where = config.read(path, overrides)
    values = _with_plugins(values, path.parent if path else Path())
    recipe = config.from_dict(DataRecipe, _with_preset(values), where=where)
    parts.check_tables(recipe.tables, where)
    for name in recipe.source:
        own = recipe_of(recipe, name)  # raises ConfigError now if the rules of a source are wrong
        parts.check_tables(own.tables, lambda key, name=name: f"source.{name}.{key}")
    return recipe


def _with_plugins(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Import the plug-ins that the values of a recipe name. Return the values with the plug-ins' absolute folder and
    the identities of their code.

    folder: the folder of the recipe file.
    """
    try:
        plugins = config.from_dict(Plugins, values.get("plugins", {}))
    except (ConfigError, TypeError, AttributeError):
        return values  # the whole recipe is checked next, and the message names the line
    if not plugins.modules:
        return values
    place = (folder / plugins.folder).resolve()
    code = load_plugins(plugins.modules, place)
    return values | {"plugins": {"modules": list(plugins.modules), "folder": str(place), "code": code}}


def recipe_of(recipe: DataRecipe, source: str) -> DataRecipe:
    """Return the recipe for documents of `source`. Raises ConfigError."""
    changes = recipe.source.get(source)
    if not changes:
        return recipe
    if foreign := [name for name in changes if name not in OF_ONE_SOURCE]:
        raise ConfigError(
            "E-RECIPE-SOURCE-KEY",
            f"source.{source}.{foreign[0]}: this section cannot differ between sources",
            rule=f"only these can differ: {', '.join(OF_ONE_SOURCE)}",
            fix=f"set it for all sources: [{foreign[0]}]",
            source=source,
            key=foreign[0],
        )
    values = config.to_dict(recipe)
    if "preset" in changes:
        del values["quality"]
    return config.from_dict(
        DataRecipe, _with_preset(_merged(values, changes)), where=lambda key: f"source.{source}.{key}"
    )


def _with_preset(values: dict[str, Any]) -> dict[str, Any]:
    chosen, given = values.get("preset", DEFAULT_PRESET), values.get("quality", {})
    if not isinstance(chosen, str) or chosen not in PRESETS or not isinstance(given, dict):
        return values  # from_dict reports the wrong value
    return values | {"quality": _merged(config.to_dict(PRESETS[chosen]), given)}


def _merged(base: dict, changes: dict) -> dict:
    """Return `base` with the values of `changes`, section by section. Unknown keys are kept, to be reported later."""
    both = base | changes
    for name, value in base.items():
        if isinstance(value, dict) and isinstance(changes.get(name), dict):
            both[name] = _merged(value, changes[name])
    return both


def fingerprint(recipe: DataRecipe) -> dict[str, Any]:
    """Return everything that decides the effect of a recipe: its values, the hashes of the files it names, and the
    order of the filters of plug-ins if it switches any on.
    """
    values = recipe_values(replace(recipe, plugins=Plugins(), mixture={}, quarantine=QuarantineRules()))
    del values["remote"]
    owns = {name: recipe_of(recipe, name) for name in ("", *recipe.source)}
    order = {name: filters for name, own in owns.items() if (filters := list(parts.filters_on(own)))}
    files = {name: _files(own) for name, own in owns.items()}
    return {"recipe": values, "files": files} | ({"filters": order} if order else {})


def recipe_values(recipe: DataRecipe) -> dict[str, Any]:
    """Return a recipe as JSON values, without the sections about plug-ins that it does not have.

    So a recipe without plug-ins has the values, and the hash, that it had before there were plug-ins.
    """
    values = config.to_dict(recipe)
    for one in dataclasses.fields(DataRecipe):
        if one.metadata == LEFT_OUT_AT_DEFAULT and getattr(recipe, one.name) == getattr(_DEFAULT, one.name):
            del values[one.name]
    return values


def _files(recipe: DataRecipe) -> dict[str, Any]:
    bad_words = recipe.quality.c4.bad_words if recipe.quality.c4.enabled else ""
    of_plugins = parts.files_of_filters(recipe.filter)
    listed = quarantined_names(recipe.quarantine).sha256 if recipe.quarantine.files else ""
    return (
        ({"plugins": of_plugins} if of_plugins else {})
        | ({"quarantine": listed} if listed else {})
        | {
            "bad_words": sha256_file(Path(bad_words)) if bad_words else "",
            "blocklist": blocklist.fingerprint(recipe.blocklist) if recipe.blocklist.enabled else {},
            "classifier": classify.fingerprint(recipe.classifier) if recipe.classifier.enabled else {},
            "toxicity": toxicity.fingerprint(recipe.toxicity) if recipe.toxicity.enabled else "",
            "language": language.fingerprint(recipe.language) if recipe.language.enabled else "",
            "decontamination": decontaminate.fingerprint(recipe.decontamination)
            if recipe.decontamination.enabled
            else {},
        }
    )


_DEFAULT = DataRecipe()


def setting_of(rule: str) -> str:
    """Return the recipe key that sets `rule` ("gopher.word_count" -> "quality.gopher.word_count"), or "" if none."""
    for prefix in ("quality.", ""):
        kind: typing.Any = DataRecipe
        for name in (prefix + _KEYS.get(rule, rule)).split("."):
            if not dataclasses.is_dataclass(kind) or name not in {f.name for f in dataclasses.fields(kind)}:
                break
            kind = typing.get_type_hints(kind)[name]
        else:
            return prefix + _KEYS.get(rule, rule)
    return ""


def value_of(setting: str, recipe: dict[str, Any] | None = None) -> str:
    """Return the value of a recipe key as TOML ("quality.gopher.word_count" -> "[50, 100000]"), or "" for a section.

    recipe: the values of a recipe as they are in corpus.json; if None, those of the preset `web`.
    """
    value: typing.Any = recipe or config.to_dict(_DEFAULT)
    for name in setting.split("."):
        value = value[name]
    return "" if isinstance(value, dict) else json.dumps(value)  # for numbers, strings and lists JSON is also TOML


# Rules whose name differs from the recipe key that sets them: rule -> key.
_KEYS = {
    "language.other": "language.keep",
    "language.unsure": "language.threshold",
    "blocklist.domain": "blocklist.files",
    "blocklist.url": "blocklist.files",
    "contaminated.ngram": "decontamination.ngram",
    "pii.plugin": "pii.ids",
    "duplicates.same_text": "dedup.exact",
    "near_duplicates.similar": "dedup.jaccard",
}
