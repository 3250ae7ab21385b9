"""Functions of the package with parts of plug-ins."""

import dataclasses

import pytest
from tests.expect import refused
from tests.unit.plugins.data_plugins import plugins  # noqa: F401

import ingot
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


EXTRACTOR = """
@dataclass(frozen=True, kw_only=True)
class Rules:
    word: str{default}
EXTRACTORS.register(Extractor(name="odd", extract=lambda html, rules: {result}, settings={settings}))
"""


@pytest.mark.parametrize(
    ("settings", "result", "text"), [("Rules", "rules.word + '\\r\\n'", "found"), ("None", "repr(rules)", "None")]
)
def test_a_page_is_extracted_with_the_settings_of_the_plugin(plugins, settings, result, text):  # noqa: F811
    plugins.write("odd_extractor", EXTRACTOR.format(default=" = 'found'", settings=settings, result=result))
    plugins.recipe("", "odd_extractor")
    assert ingot.extract("<p>page", method="odd") == text
    with refused("E-PAGE-LIMIT"):
        ingot.extract("<div>" * 1100, method="odd")


def test_a_page_is_not_extracted_if_the_plugin_lacks_a_setting_or_returns_no_text(plugins):  # noqa: F811
    plugins.write("odd_extractor", EXTRACTOR.format(default="", settings="Rules", result="rules.word"))
    plugins.recipe("", "odd_extractor")
    with refused("E-CONFIG-SETTINGS"):
        ingot.extract("<p>page", method="odd")
    plugins.write("odd_extractor", EXTRACTOR.format(default="", settings="None", result="b'bytes'"))
    plugins.recipe("", "odd_extractor")
    with refused("E-DATA-PLUGIN-RESULT", part="extractor 'odd' of plug-in odd_extractor"):
        ingot.extract("<p>page", method="odd")
