"""The plug-ins that a file names, and what each registers: for people who write one or take one over."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ingot.config import from_dict, read
from ingot.plugins.load import Plugin, import_plugins, installed_plugins
from ingot.plugins.registry import Registry
from ingot.ranges import Range
from ingot.schema.plugins import Plugins
from ingot.toml import toml_value
from ingot.value_names import type_name


@dataclass(frozen=True)
class ListedSetting:
    """A setting of a part. type: how a user writes its value, with its range. default: as TOML; None if a value must
    be given."""

    name: str
    type: str
    default: str | None


@dataclass(frozen=True)
class ListedPart:
    """A part that a plug-in registered. kind: what it is. key: the setting that chooses it, or the table that switches
    it on, such as [filter.domain]."""

    kind: str
    name: str
    key: str
    settings: tuple[ListedSetting, ...]


@dataclass(frozen=True)
class ListedPlugin:
    """A plug-in that was imported. version: of the distribution that gives it its short name, or ""."""

    name: str
    module: str
    file: str
    code: str
    version: str
    parts: tuple[ListedPart, ...]


@dataclass(frozen=True)
class OfferedPlugin:
    """A short name that an installed distribution gives to a module."""

    name: str
    module: str
    distribution: str
    version: str


@dataclass(frozen=True, kw_only=True)
class _NamesPlugins:
    """The part of a run file or recipe that this module reads."""

    plugins: Plugins = field(default_factory=Plugins)


def list_plugins(file: Path) -> list[ListedPlugin]:
    """Import the plug-ins that a run file or data recipe names, and describe them. Reads only its table [plugins].

    file: the file, or a folder with a run.toml. Raises ConfigError if one of them cannot be imported.
    """
    file = file / "run.toml" if file.is_dir() else file
    values, where = read(file, ())
    own = {name: value for name, value in values.items() if name == "plugins"}
    plugins = from_dict(_NamesPlugins, own, where=where).plugins
    return [_listed(one) for one in import_plugins(plugins.modules, file.parent / plugins.folder)]


def offered_plugins() -> list[OfferedPlugin]:
    """Return the short names that installed distributions offer. Imports none of the modules."""
    return [
        OfferedPlugin(
            name=name,
            module=point.module,
            distribution=point.dist.name if point.dist else "",
            version=point.dist.version if point.dist else "",
        )
        for name, point in sorted(installed_plugins().items())
    ]


def _listed(plugin: Plugin) -> ListedPlugin:
    parts = [
        ListedPart(
            registry.kind,
            entry.part.name,
            registry.key.replace("NAME", entry.part.name),
            settings_of(entry.part.settings),
        )
        for registry in Registry.every
        for entry in registry.entries()
        if entry.module == plugin.name
    ]
    return ListedPlugin(
        name=plugin.name,
        module=plugin.module,
        file=str(plugin.file),
        code=plugin.code,
        version=plugin.version,
        parts=tuple(parts),
    )


def settings_of(kind: type | None) -> tuple[ListedSetting, ...]:
    """Return the settings of a part. kind: the dataclass that it is registered with, None if it has no settings."""
    if kind is None:
        return ()
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(
        ListedSetting(one.name, _type(hints[one.name]), _default(one)) for one in dataclasses.fields(kind) if one.init
    )


def _type(hint: Any) -> str:
    limits = [one for one in get_args(hint)[1:] if isinstance(one, Range)]
    return " ".join([type_name(hint), *map(str, limits)])


def _default(one: "dataclasses.Field[Any]") -> str | None:
    if one.default is not dataclasses.MISSING:
        value = one.default
    elif one.default_factory is not dataclasses.MISSING:
        value = one.default_factory()
    else:
        return None
    return "absent" if value is None else toml_value(list(value) if isinstance(value, tuple) else value)
