"""Parts that no plug-in of the recipe registered: refused, because workers do not import them."""

import dataclasses

import pytest
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import plugins  # noqa: F401

from ingot.data.build.plugin_code import check_parts
from ingot.data.build.recipe import DataRecipe
from ingot.data.build.stages import stages_of
from ingot.data.extract.html import ExtractRules
from ingot.data.pii import PiiRules
from ingot.data.sources.input import Input
from ingot.plugins.filters import FILTERS, Filter
from ingot.schema.plugins import Plugins

PARTS = """
FILTERS.register(Filter(name="odd", make=Stage))
EXTRACTORS.register(Extractor(name="odd", extract=lambda html, settings: ""))
PII_KINDS.register(PiiKind(name="odd", find=lambda text, settings: [], placeholder="<ODD>"))
FORMATS.register(InputFormat(name="odd", read=lambda *given: [], endings=("odd",)))
"""
RECIPES = {
    "filter": DataRecipe(filter={"odd": {}}),
    "source": DataRecipe(source={"web": {"filter": {"odd": {}}}}),
    "format": DataRecipe(),
    "extractor": DataRecipe(extract=ExtractRules(method="odd")),
    "pii_kind": DataRecipe(pii=PiiRules(kinds=("odd",))),
}


def check(recipe, name="a.jsonl", *modules):
    """Check the parts of a recipe whose plug-ins were imported already."""
    recipe = dataclasses.replace(recipe, plugins=Plugins(modules=modules))
    check_parts(recipe, [Input(location=name)])


@pytest.mark.parametrize("kind", RECIPES)
def test_a_part_of_a_module_that_the_recipe_does_not_name_is_refused(plugins, kind):  # noqa: F811
    plugins.write("parts", PARTS)
    plugins.write("others", "")
    plugins.recipe("", "parts", "others")  # an earlier build of this process
    recipe, name = RECIPES[kind], "a.odd" if kind == "format" else "a.jsonl"
    for modules in ((), ("others",)):
        with refused("E-DATA-PLUGIN-MODULE", kind="filter" if kind == "source" else kind, name="odd") as caught:
            check(recipe, name, *modules)
        assert named([caught.value.fix], "'parts'", "[plugins] modules")
    check(recipe, name, "parts")


def test_a_part_of_the_program_itself_is_refused(plugins):  # noqa: F811
    FILTERS.register(Filter(name="odd", make="x:y"))
    recipe = DataRecipe(filter={"odd": {}})
    with refused("E-DATA-PLUGIN-MODULE", kind="filter", name="odd") as caught:
        check(recipe)
    assert named([caught.value.found], "the program itself") and named([caught.value.fix], "[plugins] modules")
    check(DataRecipe(filter={"odd": {"enabled": False}}))


@pytest.mark.parametrize("name", ["nothing", "junk"])
def test_a_filter_that_no_plugin_registers_is_refused(name):
    with refused("E-DATA-PLUGIN-MODULE", name=name):
        check(DataRecipe(filter={name: {}}))


def test_no_process_leaves_out_a_filter_that_is_switched_on():
    with refused("E-DATA-PLUGIN-MODULE", name="nothing"):
        stages_of(DataRecipe(filter={"nothing": {}}))
    with refused("E-DATA-PLUGIN-MODULE", name="nothing"):
        stages_of(DataRecipe(source={"web": {"filter": {"nothing": {}}}}))
    stages_of(DataRecipe(filter={"nothing": {"enabled": False}}))
