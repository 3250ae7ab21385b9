"""Plug-ins of data builds in tests: a folder with a recipe and modules, whose parts are forgotten afterwards."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from ingot.data.build.recipe import DataRecipe, load_recipe
from ingot.plugins import load
from ingot.plugins.registry import Registry
from ingot.schema.corpus import Document, document_id

EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"
HEAD = """
from ingot.plugins.extractor import EXTRACTORS, Extractor
from ingot.plugins.filters import FILTERS, Filter
from ingot.plugins.mixture import MIXTURES, MixturePolicy
from ingot.plugins.pii import PII_KINDS, PiiKind
from ingot.plugins.source import FORMATS, InputFormat
from ingot.schema.corpus import Document, Drop, document_id
from dataclasses import dataclass


class Stage:
    name, ran = "odd", "a test"
    def __init__(self, settings): self.settings = settings
    def __call__(self, document): return self.look(document)
    def look(self, document): return None
"""


class PluginFolder:
    """A folder with modules and a recipe that names them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, module: str, text: str) -> None:
        (self.folder / f"{module}.py").write_text(HEAD + dedent(text))

    def recipe(self, text: str = "", *modules: str) -> DataRecipe:
        return load_recipe(self.recipe_file(text, *modules))

    def recipe_file(self, text: str = "", *modules: str) -> Path:
        path = self.folder / "recipe.toml"
        path.write_text(f"[plugins]\nmodules = {list(modules)!r}\n{dedent(text)}")
        return path


@pytest.fixture
def plugins(tmp_path) -> Iterator[PluginFolder]:
    """Yield a PluginFolder. What its plug-ins register and import is forgotten afterwards."""
    entries = [(registry, dict(registry._entries)) for registry in Registry.every]
    loaded, folders, path = dict(load._loaded), list(load._folders), list(sys.path)
    yield PluginFolder(tmp_path)
    for registry, before in entries:
        registry._entries = before
    load._loaded.clear()
    load._loaded.update(loaded)
    load._folders[:] = folders
    for name, module in list(sys.modules.items()):
        if str(vars(module).get("__file__") or "").startswith((str(tmp_path), str(EXAMPLES))):
            del sys.modules[name]
    sys.path[:] = path


def document(text: str = "", url: str = "http://a.example/1", raw: bytes = b"") -> Document:
    return Document(document_id("f", "1", url), url, "web", "f", "1", text=text, raw=raw, content_type="text/html")
