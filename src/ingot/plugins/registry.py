"""Registries: the parts of one kind by name. Ingot's own parts and those of plug-ins have the same entries."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from ingot.config import from_dict, problems_of
from ingot.errors import ConfigError
from ingot.plugins.contract import Reference, require_functions
from ingot.plugins.origin import calling_origin
from ingot.value_names import close

INGOT, MAIN = "ingot", "__main__"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part that a run file or data recipe can choose by `name`.

    settings: a frozen dataclass of the part's own settings, read from the `options` table beside the name and checked
    like every other setting (ingot.config); None: the part has no settings.
    """

    name: str
    settings: type | None = None


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Entry(Generic[P]):
    """A part in a registry. module: the plug-in that it belongs to, as a run file names it; "ingot": a part of ingot;
    "__main__": no plug-in registered it, but the program or a module that the program imported.

    by: the Python module whose code registered it; "": ingot. code: the identity of that code when it was imported; ""
    if it was not registered during an import.
    """

    part: P
    module: str
    by: str = ""
    code: str = ""


class Registry(Generic[P]):
    """The parts of one kind. kind: what the parts are, in the singular. key: the setting that chooses one, or the table
    that switches one on; NAME in it is replaced by the part's name.

    An entry belongs to the plug-in that is imported when it is registered, until the import of a run's plug-ins assigns
    it (plugins/load.py).
    """

    every: ClassVar["list[Registry[Any]]"] = []
    importing: ClassVar[str | None] = None  # the plug-in whose import is running
    chosen: ClassVar[frozenset[str]] = frozenset()  # the plug-ins of the file for which it is imported
    displaced: ClassVar[set[str]] = set()  # modules with a part that a plug-in of another file replaced

    def __init__(self, kind: str, key: str, built_in: Iterable[P] = ()):
        self.kind, self.key = kind, key
        self._entries: dict[str, Entry[P]] = {part.name: Entry(part, INGOT) for part in built_in}
        Registry.every.append(self)

    def register(self, part: P) -> P:
        """Add `part`, and return it.

        A part of the main program replaces its own of the same name, because cells of a notebook run repeatedly; a part
        of a plug-in replaces that of a plug-in of another run file, which this process imported earlier. Raises
        ConfigError if the name is taken otherwise, or if the part is not what its kind requires.
        """
        origin = calling_origin()
        taken = self._entries.get(part.name)
        if taken and self._is_of_another_file(taken):
            Registry.displaced.add(taken.by)
        elif taken and not origin.module == taken.by == MAIN:
            raise ConfigError(
                "E-PLUGIN-NAME",
                f"{self.kind} {part.name!r} is already registered by {taken.module}",
                rule="the parts of one kind have different names",
                fix="give the part another name",
                kind=self.kind,
                name=part.name,
            )
        require_functions(self.kind, part, self.broken(part), origin)
        if part.settings is not None and not (isinstance(part.settings, type) and is_dataclass(part.settings)):
            raise ConfigError(
                "E-PLUGIN-SETTINGS",
                f"the settings of {self.kind} {part.name!r} are {part.settings!r}",
                rule="a dataclass describes the settings of a part, so that they are checked before a run starts",
                fix="register the part with a frozen dataclass, or without settings",
                kind=self.kind,
                name=part.name,
            )
        self._entries[part.name] = Entry(part, Registry.importing or MAIN, origin.module, origin.code)
        return part

    def broken(self, part: P) -> Iterator[str]:
        """Yield what is wrong with a part of this kind although its fields are functions where they have to be."""
        yield from ()

    @staticmethod
    def _is_of_another_file(entry: Entry[P]) -> bool:
        return Registry.importing is not None and entry.module not in (INGOT, MAIN, *Registry.chosen)

    def add_built_in(self, part: P) -> None:
        """Add a part of ingot that a floor above the registry makes."""
        self._entries[part.name] = Entry(part, INGOT)

    def forget(self, module: str) -> None:
        """Remove the parts that the code of a Python module registered, before it is imported again; "__main__": all
        parts that belong to no plug-in."""
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if entry.by != module and not entry.module == module == MAIN
        }

    def assign(self, owner_of: Callable[[Entry[P]], str]) -> None:
        """Let every part that is not ingot's belong to the plug-in that `owner_of` returns."""
        for name, entry in self._entries.items():
            if entry.module != INGOT:
                self._entries[name] = replace(entry, module=owner_of(entry))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> P:
        return self._entries[name].part

    def module_of(self, name: str) -> str:
        """Return the module that registered the part `name`: see Entry."""
        return self._entries[name].module

    def entries(self) -> Iterator[Entry[P]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        return list(self._entries)

    def unknown(self, name: str) -> str:
        """Return a message about a name that is not in the registry: what was probably meant, and what there is."""
        near = close(name, self._entries)
        meant = f"did you mean {near[0]!r}? " if near else ""
        return f"{name!r} is not a registered {self.kind}; {meant}there are: {', '.join(self._entries) or 'none'}"


def options_of(part: Part, values: Mapping[str, Any]) -> Any:
    """Return the instance of `part.settings` that `values` describe; None for a part without settings.

    Raises ConfigError with all problems of the values.
    """
    return None if part.settings is None else from_dict(part.settings, dict(values))


def options_problems(part: Part, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, problem and fix) for each problem of a part's own settings. prefix: the key of their table."""
    if part.settings is None:
        for name in values:
            yield f"{prefix}.{name}", f"{part.name!r} has no settings; remove it"
        return
    yield from problems_of(part.settings, values, prefix)


def resolve(reference: Reference) -> Callable[..., Any]:
    """Return the function or class of a Reference. Raises ConfigError if "module:name" leads nowhere."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "E-PLUGIN-REFERENCE",
            f"{reference!r} names nothing: {error}",
            rule='a reference is "module:name" of a function or class that can be imported',
            fix="correct the reference where the part is registered",
            reference=reference,
        ) from None
