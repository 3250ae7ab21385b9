"""Extractors of plug-ins: settings, limits, and what happens when their code is wrong."""

import pytest
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import document, plugins  # noqa: F401

from ingot.data.build.own_filters import make_extract
from ingot.data.build.plugin_code import check_parts
from ingot.data.guard import FIRST_DOCUMENTS
from ingot.data.sources.input import Input

EXTRACTOR = """
@dataclass(frozen=True, kw_only=True)
class Rules:
    tag: str = "p"
def extract(html, rules):
    {}
    return html.split(f"<{{rules.tag}}>")[1].split("<")[0] + "\\r\\n"
EXTRACTORS.register(Extractor(name="odd", extract=extract, settings=Rules{}))
"""


def stage_of(plugins, text="", body="pass", more=""):  # noqa: F811
    plugins.write("odd_extractor", EXTRACTOR.format(body, more))
    return make_extract(plugins.recipe(f"[extract]\nmethod = 'odd'\n{text}", "odd_extractor"))


@pytest.mark.parametrize(("text", "found"), [("", "one"), ("[extractor.odd]\ntag = 'b'", "two")])
def test_an_extractor_gets_its_settings_and_the_decoded_page(plugins, text, found):  # noqa: F811
    stage = stage_of(plugins, text)
    page = document(raw=f"<html><p>{found if not text else ''}</p><b>two</b></html>".encode("utf-16"))
    assert stage(page) is None
    assert (page.text, page.raw) == (found, b"")
    assert stage.ran == "odd: plug-in odd_extractor, main content"


def test_a_page_beyond_the_limits_does_not_reach_an_extractor(plugins):  # noqa: F811
    stage = stage_of(plugins, "max_depth = 5", body="raise KeyError")
    assert stage(document(raw=b"<html>" + b"<div>" * 9)).rule == "extract.too_deep"


def test_a_page_on_which_an_extractor_raises_is_dropped(plugins):  # noqa: F811
    stage = stage_of(plugins)
    drop = stage(document(raw=b"<html><i>no paragraph</i>"))
    assert drop.rule == "extract.plugin" and drop.value.startswith("IndexError: list index out of range (odd_extractor")
    for _ in range(FIRST_DOCUMENTS - 2):
        stage(document(raw=b"<html>"))
    with refused("E-DATA-PLUGIN-RAISED", part="extractor 'odd' of plug-in odd_extractor"):
        stage(document(raw=b"<html>"))


@pytest.mark.parametrize("result", ["None", "b'text'", "7"])
def test_a_result_that_is_no_text_ends_the_build(plugins, result):  # noqa: F811
    with refused("E-DATA-PLUGIN-RESULT"):
        stage_of(plugins, body=f"return {result}")(document(raw=b"<html><p>x"))


def test_a_method_that_is_not_registered_is_refused_with_its_line(plugins):  # noqa: F811
    with refused("E-CONFIG-SETTINGS") as caught:
        plugins.recipe("[extract]\nmethod = 'acurate'")
    assert named(caught.value.facts["problems"], "recipe.toml:4", "accurate")


def test_a_package_that_is_not_installed_is_reported_before_the_build(plugins):  # noqa: F811
    plugins.write("needs", EXTRACTOR.format("pass", ", package='no-such-package'"))
    recipe = plugins.recipe("[extract]\nmethod = 'odd'", "needs")
    with refused("E-DATA-PLUGIN-CREATE", name="odd"):
        check_parts(recipe, [Input(location="a.warc.gz")])
