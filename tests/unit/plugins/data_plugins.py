"""Plug-ins of data builds in tests: a folder with a recipe and modules, whose parts are forgotten afterwards."""

from pathlib import Path
from textwrap import dedent

import pytest

from ingot.data.build.recipe import DataRecipe, load_recipe
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
def plugins(tmp_path) -> PluginFolder:
    """A PluginFolder. What its plug-ins register and import is forgotten after the test, as after every test."""
    return PluginFolder(tmp_path)


def document(text: str = "", url: str = "http://a.example/1", raw: bytes = b"") -> Document:
    return Document(document_id("f", "1", url), url, "web", "f", "1", text=text, raw=raw, content_type="text/html")
