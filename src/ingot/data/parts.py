"""The parts of plug-ins that a data recipe uses: their settings, and the identity of their code.

The settings of a part are in the table [KIND.NAME] of the recipe, for every kind:

    [filter.domain]     a filter; the table also switches it on, and `enabled = false` switches it off
    [format.sqlite]     a format of inputs
    [extractor.mine]    the extractor of extract.method = "mine"
    [pii_kind.badge]    the kind of personal data of pii.kinds = [..., "badge"]
    [mixture.mine]      the policy of `ingot data mix --preset mine`

A table is checked as strictly as every other section, against the dataclass that the part is registered with.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ingot import config
from ingot.data.guard import broken_contract, failure
from ingot.errors import ConfigError, IngotError
from ingot.plugins.extractor import EXTRACTORS
from ingot.plugins.filters import FILTERS, Filter
from ingot.plugins.mixture import MIXTURES
from ingot.plugins.pii import PII_KINDS
from ingot.plugins.registry import INGOT, MAIN, Reference, Registry, resolve
from ingot.plugins.source import FORMATS
from ingot.storage import sha256_file
from ingot.value_names import close

Table = dict[str, Any]
KINDS: dict[str, Registry] = {
    "filter": FILTERS,
    "format": FORMATS,
    "extractor": EXTRACTORS,
    "pii_kind": PII_KINDS,
    "mixture": MIXTURES,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoSettings:
    pass


def check_tables(tables: Mapping[str, Mapping[str, Table]], where: Callable[[str], str]) -> None:
    """Check the tables of all parts. Raises a ConfigError that lists all problems.

    tables: kind -> name -> settings. where: function from a dotted key to its place, for messages.
    """
    _check_names(tables, where)
    sections = []
    for kind in KINDS:
        fields = [(part.name, _checked_settings(kind, part), None) for part in _of_plugins(kind)]
        sections.append((kind, dataclasses.make_dataclass(kind, fields), None))
    config.from_dict(dataclasses.make_dataclass("Tables", sections), dict(tables), where=where)


def _of_plugins(kind: str) -> list[Any]:
    return [entry.part for entry in KINDS[kind].entries() if entry.module != INGOT]


def _check_names(tables: Mapping[str, Mapping[str, Table]], where: Callable[[str], str]) -> None:
    """Raise a ConfigError that lists the tables of parts that no plug-in of the recipe registers."""
    problems = []
    for kind, named in tables.items():
        known = [part.name for part in _of_plugins(kind)]
        for name in (name for name in named if name not in known):
            near = close(name, known)
            meant = f"did you mean {near[0]!r}? " if near else ""
            what = f"{where(f'{kind}.{name}')}: [{kind}.{name}]: no plug-in registers a {KINDS[kind].kind} {name!r}"
            problems.append(f"{what}; {meant}registered are: {', '.join(known) or 'none'}")
    if problems:
        raise ConfigError(
            "E-DATA-PLUGIN-TABLE",
            "\n".join(problems),
            rule="a table [KIND.NAME] belongs to a part that a plug-in of [plugins] modules registers",
            fix="correct the name, or add the plug-in to [plugins] modules",
            problems=problems,
        )


def _checked_settings(kind: str, part: Any) -> type:
    """Return the dataclass of a table: that of the part's settings, and for a filter also the field `enabled`."""
    settings = part.settings or _NoSettings
    if not (dataclasses.is_dataclass(settings) and part.name.isidentifier()):
        found = f"has the settings {settings!r}" if part.name.isidentifier() else "has a name that is not an identifier"
        rule = "a name has letters, digits and _; settings are a dataclass, or None"
        raise broken_contract(in_words(kind, part.name), found, rule)
    if kind != "filter" or "enabled" in {field.name for field in dataclasses.fields(settings)}:
        return settings
    enabled = ("enabled", bool, dataclasses.field(default=True, kw_only=True))
    frozen = vars(settings)["__dataclass_params__"].frozen
    return dataclasses.make_dataclass(settings.__name__, [enabled], bases=(settings,), frozen=frozen)


def settings_of(kind: str, name: str, table: Table | None) -> Any:
    """Return the settings of a part of a plug-in, from its table in the recipe; None for a part without settings."""
    part = KINDS[kind][name]
    if part.settings is None:
        return None
    own = {field.name for field in dataclasses.fields(part.settings)}
    values = {key: value for key, value in (table or {}).items() if key != "enabled" or key in own}
    return config.from_dict(part.settings, values, where=lambda key: f"{kind}.{name}.{key}")


def in_order(names: Collection[str], modules: Sequence[str]) -> list[Filter]:
    """Return the filters `names` of plug-ins in the order of `modules`, then in the order in which each registers them.

    The order of all entries of the registry depends on the modules that this process imported earlier.
    """
    entries = [entry for entry in FILTERS.entries() if entry.part.name in names and entry.module != INGOT]
    places = {module: place for place, module in enumerate(modules)}
    return [entry.part for entry in sorted(entries, key=lambda entry: places.get(entry.module, len(places)))]


def filters_on(recipe: Any) -> tuple[str, ...]:
    """Return the names of the filters of plug-ins that a DataRecipe switches on, in the order of `in_order`.

    With the places of the filters, which are in their code, this order decides the order of the stages.
    """
    names = [name for name, table in recipe.filter.items() if is_on(table)]
    return tuple(part.name for part in in_order(names, recipe.plugins.modules))


def files_of_filters(tables: Mapping[str, Table]) -> dict[str, str]:
    """Return path -> SHA-256 of the files that the filters of plug-ins read. Raises ConfigError for a missing file."""
    found = {}
    for name, table in tables.items():
        part = FILTERS[name]
        if is_on(table) and part.files is not None:
            for path in created("filter", name, part.files, settings_of("filter", name, table)):
                found[str(path)] = created("filter", name, sha256_file, Path(path))
    return found


def _used(recipe: Any, format: str) -> list[tuple[str, str]]:
    """Return (kind, name) of the parts that can change the documents of an input of this format."""
    used = [("format", format), ("extractor", recipe.extract.method)]
    used += [("filter", name) for name, table in recipe.filter.items() if is_on(table)]
    return used + [("pii_kind", name) for name in recipe.pii.kinds if recipe.pii.enabled]


def check_modules(recipe: Any, format: str, modules: Collection[str]) -> None:
    """Check that ingot or a plug-in of the recipe registered each part that an input of this format uses.

    Other processes import only the plug-ins of the recipe, and only their code is in the identity of a corpus.
    modules: the plug-ins of the recipe. Raises ConfigError.
    """
    for kind, name in _used(recipe, format):
        if name in KINDS[kind]:
            module = KINDS[kind].module_of(name)
            if module in modules or (module == INGOT and kind != "filter"):
                continue
            by = "the program itself" if module == MAIN else module
            found = f"{KINDS[kind].kind} {name!r} is registered by {by}"
            fix = (
                "put the part into a module of its own, and name it in [plugins] modules"
                if module == MAIN
                else f"switch it in its own section, and remove [filter.{name}]"
                if module == INGOT
                else f"add {module!r} to [plugins] modules"
            )
        elif kind == "format" and not name:  # the first bytes of the input decide, for formats of ingot only
            continue
        else:
            found, fix = KINDS[kind].unknown(name), "correct the name, or add its plug-in to [plugins] modules"
        raise ConfigError(
            "E-DATA-PLUGIN-MODULE",
            found,
            rule="a part that a build uses is registered by a plug-in of [plugins] modules: every process imports them",
            fix=fix,
            kind=kind,
            name=name,
        )


def code_of_parts(recipe: Any, format: str, code: Mapping[str, str]) -> dict[str, str]:
    """Return module -> identity of the code that can change the documents of an input.

    recipe: the DataRecipe for the input's source. format: the format of the input. code: module -> identity, of all
    plug-ins of the recipe.
    """
    found = {}
    for kind, name in _used(recipe, format):
        if (module := module_of(kind, name)) in code:
            found[module] = code[module]
    method = EXTRACTORS[recipe.extract.method]
    if method.package and module_of("extractor", method.name) != INGOT:
        found[method.package] = version(method.package)
    return dict(sorted(found.items()))


def is_on(table: Table | None) -> bool:
    """Return True if the table of a filter is in the recipe and does not switch the filter off."""
    return table is not None and table.get("enabled", True) is not False


def module_of(kind: str, name: str) -> str:
    """Return the plug-in that registered a part; "ingot" for a part of ingot and for a name that is not registered."""
    return next((entry.module for entry in KINDS[kind].entries() if entry.part.name == name), INGOT)


def in_words(kind: str, name: str) -> str:
    """Return the name of a part for messages: filter 'domain' of plug-in domain_filter."""
    return f"{KINDS[kind].kind} {name!r} of plug-in {module_of(kind, name)}"


def created(kind: str, name: str, make: Reference, *arguments: Any) -> Any:
    """Call a function of a plug-in before documents are read. Raises ConfigError if it raises."""
    try:
        return resolve(make)(*arguments)
    except (IngotError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            "E-DATA-PLUGIN-CREATE",
            f"{in_words(kind, name)} cannot be used: {failure(error)}",
            rule="every part is created from its settings before documents are read",
            fix=f"correct the plug-in, or its settings in [{kind}.{name}]",
            kind=kind,
            name=name,
        ) from error
