"""The plug-ins of the recipe: no other part is used, and their order is that of the filters."""

import dataclasses
import json

import pytest
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import plugins  # noqa: F401

from ingot.data.build import corpus_build
from ingot.data.build.corpus import read_documents
from ingot.data.build.plugin_code import check_parts
from ingot.data.build.process_input import ProcessInput
from ingot.data.build.recipe import DataRecipe, fingerprint
from ingot.data.build.stages import stages_of
from ingot.data.extract.html import ExtractRules
from ingot.data.filters.quality import PRESETS
from ingot.data.pii import PiiRules
from ingot.data.sources.input import Input
from ingot.data.tasks.task import encode
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


# -- the order of filters --


def adds(name: str) -> str:
    """A module with a filter that adds its name to each text."""
    return f"""
    class Adds:
        name, ran = {name!r}, "a test"
        def __init__(self, settings): pass
        def __call__(self, document): document.text += " " + self.name
    FILTERS.register(Filter(name={name!r}, make=Adds))
    """


@pytest.fixture
def two(plugins):  # noqa: F811
    """A function from names of modules to a recipe with the filters "one" and "two", whose modules have their names."""
    for name in ("one", "two"):
        plugins.write(name, adds(name))

    def recipe(*modules: str):
        tables = "".join(f"[filter.{name}]\n" for name in sorted(modules))
        found = plugins.recipe(f"[language]\nenabled = false\n{tables}", *modules)
        return dataclasses.replace(found, quality=PRESETS["none"])

    return recipe


@pytest.mark.parametrize("earlier", [(), ("one",), ("two",), ("one", "two"), ("two", "one")])
def test_filters_run_in_the_order_of_modules_whatever_was_imported_before(two, earlier):
    if earlier:
        two(*earlier)
    for modules in (("one", "two"), ("two", "one")):
        rows = [row.name for row in stages_of(two(*modules))]
        assert tuple(rows[rows.index("toxicity") + 1 : rows.index("pii")]) == modules


def test_the_order_of_filters_is_in_the_identity(two):
    assert "filters" not in fingerprint(DataRecipe())
    one, other = fingerprint(two("one", "two")), fingerprint(two("two", "one"))
    assert one["filters"] == {"": ["one", "two"]} and other == one | {"filters": {"": ["two", "one"]}}


def test_another_order_processes_an_input_of_an_interrupted_build_again(two, tmp_path, monkeypatch):
    crawl = tmp_path / "a.jsonl"
    crawl.write_text("".join(json.dumps({"text": f"page {number}"}) + "\n" for number in range(3)))
    inputs, real = [Input(location=str(crawl))], corpus_build.find_duplicates

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_build, "find_duplicates", stop)
    with pytest.raises(KeyboardInterrupt):
        corpus_build.build_corpus(inputs, tmp_path / "corpus", two("one", "two"))
    monkeypatch.setattr(corpus_build, "find_duplicates", real)
    for modules in (("two", "one"), ("one", "two")):
        corpus_build.build_corpus(inputs, tmp_path / "corpus", two(*modules))
        texts = [row["text"] for _, row in read_documents(tmp_path / "corpus")]
        assert texts == [f"page {number} {modules[0]} {modules[1]}" for number in range(3)]


def test_a_task_without_filters_of_plugins_keeps_its_key():
    names = {one.name for one in dataclasses.fields(ProcessInput)} - {"filters"}
    assert encode(ProcessInput(**dict.fromkeys(names))).keys() == names  # pyright: ignore[reportArgumentType]
