"""Functions of the package with parts of plug-ins."""

import dataclasses

import pytest
from tests.unit.plugins.data_plugins import plugins  # noqa: F401

from ingot.api import building
from ingot.data.build.recipe import DataRecipe
from ingot.schema.plugins import Plugins

FORMAT = 'FORMATS.register(InputFormat(name="odd", read=lambda *given: [], endings=("odd",)))'


def test_a_recipe_of_the_program_imports_its_plugins_before_a_folder_is_searched(plugins, monkeypatch):  # noqa: F811
    plugins.write("odd_api_format", FORMAT)
    (plugins.folder / "in").mkdir()
    (plugins.folder / "in/a.odd").write_bytes(b"x")

    class Found(Exception):
        pass

    def prepare(inputs, out, recipe, **options):
        raise Found([one.name for one in inputs], recipe.plugins.code.keys())

    monkeypatch.setattr(building, "prepare", prepare)
    recipe = dataclasses.replace(DataRecipe(), plugins=Plugins(modules=("odd_api_format",), folder=str(plugins.folder)))
    with pytest.raises(Found) as found:
        building.build_data(plugins.folder / "in", plugins.folder / "out", recipe=recipe, runner="inline")
    assert found.value.args == (["a.odd"], {"odd_api_format"})
