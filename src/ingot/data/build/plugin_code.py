"""The code besides ingot's in the identity of a corpus: libraries, and the plug-ins that can change its documents."""

import contextlib
import functools
import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.data.build.custom_filter import checked_stage
from ingot.data.build.own_filters import make_extract, make_pii
from ingot.data.build.recipe import DataRecipe, recipe_of, recipe_values
from ingot.data.filters.quarantine import QuarantineRules
from ingot.data.parts import check_modules, code_of_parts, is_on, module_of, settings_of
from ingot.data.sources.input import Input, format_by_input
from ingot.plugins.filters import FILTERS
from ingot.plugins.load import load_plugins
from ingot.plugins.registry import INGOT, resolve
from ingot.plugins.source import FORMATS
from ingot.schema.plugins import Plugins


@functools.cache
def _libraries() -> dict[str, str]:
    """Return library name -> version. It is in each task's key, so an update does not mix old and new results."""
    found = {}
    for name in ("fastwarc", "resiliparse", "trafilatura", "lxml", "spacy", "pyarrow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_beside_ingot(recipe: DataRecipe, one: Input) -> dict[str, str]:
    """Return name -> version or identity of the libraries and plug-ins that decide the documents of an input."""
    return _libraries() | used_code(recipe, [one])


def used_code(recipe: DataRecipe, inputs: Sequence[Input]) -> dict[str, str]:
    """Return module -> identity of the code of the plug-ins that can change the documents of `inputs`."""
    if not recipe.plugins.modules:
        return {}
    found = {}
    for source, format in {(one.source, format_by_input(one)) for one in inputs}:
        found |= code_of_parts(recipe_of(recipe, source), format, recipe.plugins.code)
    return dict(sorted(found.items()))


def written_recipe(recipe: DataRecipe, inputs: Sequence[Input]) -> dict[str, Any]:
    """Return the recipe as a corpus records it: without secrets, places on this machine, and code that was not used."""
    code = used_code(recipe, inputs)
    modules = tuple(name for name in recipe.plugins.modules if name in code)
    plugins = Plugins(modules=modules, code={name: code[name] for name in modules})
    remote = recipe.remote.without_secrets()
    return recipe_values(replace(recipe, remote=remote, plugins=plugins, mixture={}, quarantine=QuarantineRules()))


def import_plugins(recipe: DataRecipe) -> DataRecipe:
    """Import the plug-ins of a recipe. Return the recipe with the identities of their code."""
    if not recipe.plugins.modules:
        return recipe
    code = load_plugins(recipe.plugins.modules, Path(recipe.plugins.folder))
    place = str(Path(recipe.plugins.folder).resolve())
    return replace(recipe, plugins=replace(recipe.plugins, folder=place, code=code))


def check_parts(recipe: DataRecipe, inputs: Sequence[Input]) -> None:
    """Create the parts of plug-ins that the inputs need, before a build begins.

    Raises ConfigError, also for a part that no plug-in of the recipe registered.
    """
    for source, format in sorted({(one.source, format_by_input(one)) for one in inputs}):
        own = recipe_of(recipe, source)
        check_modules(own, format, recipe.plugins.modules)
        if module_of("format", format) != INGOT:
            resolve(FORMATS[format].read)
            settings_of("format", format, own.format.get(format))
        if module_of("extractor", own.extract.method) != INGOT:
            make_extract(own)
        if any(module_of("pii_kind", kind) != INGOT for kind in own.pii.kinds):
            make_pii(own)
        for name, table in own.filter.items():
            if is_on(table):
                checked_stage(FILTERS[name], table)
