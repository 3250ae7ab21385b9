"""Filters of plug-ins: where they run, how their settings are checked, and what happens when their code is wrong."""

from dataclasses import replace

import pytest
import xxhash
from tests.expect import named, refused
from tests.unit.plugins.data_plugins import document, plugins  # noqa: F401

from ingot.data.build.plugin_code import check_parts
from ingot.data.build.process_input import _outcome, _StageClock
from ingot.data.build.recipe import DataRecipe, fingerprint, load_recipe, recipe_values
from ingot.data.build.stages import STAGES, StageSettings, document_stages, stages_of, what_ran
from ingot.data.guard import FIRST_DOCUMENTS
from ingot.data.lineage.purge.history import text_hash
from ingot.data.sources.input import Input
from ingot.data.sources.url import UrlDuplicates
from ingot.data.tasks.task import encode
from ingot.errors import IngotError
from ingot.plugins.filters import FILTERS, STAGE_NAMES, Filter

WEB = [Input(location="a.warc.gz")]


def odd(look: str, more: str = "") -> str:
    """A filter "odd" whose stage does `look`."""
    return f"""
    class Odd(Stage):
        def look(self, document):
            {look}
    FILTERS.register(Filter(name="odd", make=Odd, rules=("odd.one",){more}))
    """


def stage_of(recipe):
    stages = document_stages(StageSettings(recipe))
    return next(
        stage for stage in (*stages.before_purged, *stages.before_url, *stages.after_url) if stage.name == "odd"
    )


def test_the_names_of_stages_are_those_of_the_build():
    assert [stage.name for stage in STAGES] == list(STAGE_NAMES)


@pytest.mark.parametrize(
    ("after", "follows"), [("", "toxicity"), ("read", "read"), ("url", "url"), ("pii", "pii"), ("extract", "purged")]
)
def test_a_filter_runs_at_its_place_if_its_table_is_there(plugins, after, follows):  # noqa: F811
    plugins.write("place", odd("return None", f", after={after!r}" if after else ""))
    assert [row.name for row in stages_of(plugins.recipe("", "place"))] == list(STAGE_NAMES)
    recipe = plugins.recipe("[filter.odd]", "place")
    names = [row.name for row in stages_of(recipe)]
    assert names[names.index("odd") - 1] == follows
    stages = document_stages(StageSettings(recipe))
    assert ("odd" in [stage.name for stage in stages.before_purged]) is (after == "read")
    off = plugins.recipe("[filter.odd]\nenabled = false", "place")
    assert what_ran(StageSettings(off))["odd"] == "switched off"


@pytest.mark.parametrize("after", ["extract", "purged"])
def test_a_purged_document_is_found_by_its_text_before_filters_change_it(plugins, tmp_path, after):  # noqa: F811
    plugins.write("place", odd("document.text += ' changed'", f", after={after!r}"))
    recipe = plugins.recipe("[filter.odd]", "place")
    rows = [row.name for row in stages_of(recipe)]
    assert rows[rows.index("odd") - 1 : rows.index("odd") + 2] == ["purged", "odd", "url"]
    (tmp_path / "purged.txt").write_text(f"text {text_hash('a purged text')}\n")
    stages = replace(document_stages(StageSettings(recipe, purged=tmp_path)), after_url=())

    def outcome(text):
        raw = document(raw=text.encode())
        raw.content_type = "text/plain"
        return _outcome(raw, None, stages, UrlDuplicates(), _StageClock())

    assert outcome("a purged text").drop.rule == "purged.text"
    kept = outcome("another text")
    assert (kept.drop, kept.row["text"]) == (None, "another text changed")
    assert kept.row["before"] == xxhash.xxh3_128_hexdigest(b"another text")


def test_filters_with_one_place_run_in_the_order_of_registration(plugins):  # noqa: F811
    parts = [("one", "toxicity"), ("two", "toxicity"), ("three", "one"), ("four", "three")]
    plugins.write("many", "\n".join(f"FILTERS.register(Filter(name={n!r}, make=Stage, after={a!r}))" for n, a in parts))

    def placed(*names):
        rows = [row.name for row in stages_of(plugins.recipe("".join(f"[filter.{name}]\n" for name in names), "many"))]
        return rows[rows.index("toxicity") + 1 : rows.index("pii")]

    assert placed("one", "two", "three", "four") == ["one", "three", "four", "two"]
    assert placed("two", "four") == ["two", "four"]  # `four` follows filters that are not switched on


def test_a_filter_may_run_for_one_source_only(plugins):  # noqa: F811
    plugins.write("place", odd("return Drop('odd', 'odd.one')"))
    recipe = plugins.recipe("[source.code.filter.odd]", "place")
    assert stage_of(recipe_for(recipe, "code"))(document("x")) is not None
    assert "odd" not in [stage.name for stage in document_stages(StageSettings(recipe)).after_url]
    assert what_ran(StageSettings(recipe))["odd"] == "switched off; of code: a test"


def recipe_for(recipe, source):
    return StageSettings(recipe).of_source(source).recipe


@pytest.mark.parametrize(
    ("register", "code"),
    [
        ('FILTERS.register(Filter(name="gopher", make=Stage))', "E-PLUGIN-NAME"),
        ('FILTERS.register(Filter(name="url", make=Stage))', "E-FILTER-PLACE"),
        ('FILTERS.register(Filter(name="odd", make=Stage, after="duplicates"))', "E-FILTER-PLACE"),
        ('FILTERS.register(Filter(name="odd", make=Stage, after="toxcity"))', "E-FILTER-PLACE"),
        ('FILTERS.register(Filter(name="odd", make=Stage, rules=("one",)))', "E-FILTER-PLACE"),
        ("1 / 0", "E-PLUGIN-IMPORT"),
    ],
)
def test_a_wrong_registration_is_refused(plugins, register, code):  # noqa: F811
    plugins.write("wrong", register)
    with refused(code):
        plugins.recipe("", "wrong")


def test_the_nearest_place_is_named(plugins):  # noqa: F811
    plugins.write("wrong", 'FILTERS.register(Filter(name="odd", make=Stage, after="contaminate"))')
    with refused("E-FILTER-PLACE", after="contaminate") as caught:
        plugins.recipe("", "wrong")
    assert named([caught.value.fix], "'contaminated'")


SETTINGS = """
@dataclass(frozen=True, kw_only=True)
class Rules:
    least: int
    words: tuple[str, ...] = ()
    def problems(self):
        if self.least < 0:
            yield "least", "is negative"
FILTERS.register(Filter(name="odd", make=Stage, settings=Rules))
"""


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("leest = 1\nleast = 1", ("recipe.toml:4", "filter.odd.leest", "filter.odd.least")),
        ("least = 'x'", ("recipe.toml:4", "filter.odd.least")),
        ("least = -1", ("recipe.toml:4", "filter.odd.least")),
        ("words = ['a']", ("recipe.toml:3", "filter.odd.least")),
        ("least = 1\nenabled = 1", ("recipe.toml:5", "filter.odd.enabled")),
    ],
)
def test_settings_are_checked_with_the_line_in_the_recipe(plugins, table, words):  # noqa: F811
    plugins.write("strict", SETTINGS)
    with refused("E-CONFIG-SETTINGS") as caught:
        plugins.recipe(f"[filter.odd]\n{table}", "strict")
    assert named(caught.value.facts["problems"], *words)


def test_settings_of_one_source_are_checked(plugins):  # noqa: F811
    plugins.write("strict", SETTINGS)
    with refused("E-CONFIG-SETTINGS", keys=["filter.odd.leest"]) as caught:
        plugins.recipe("[filter.odd]\nleast = 1\n[source.code.filter.odd]\nleest = 2", "strict")
    assert named(caught.value.facts["problems"], "source.code.filter.odd.leest")


def test_a_table_without_a_registered_part_is_refused(plugins):  # noqa: F811
    plugins.write("strict", SETTINGS)
    with refused("E-DATA-PLUGIN-TABLE") as caught:
        plugins.recipe("[filter.od]\n[format.odd]", "strict")
    assert named(caught.value.facts["problems"], "recipe.toml:3", "'odd'", "recipe.toml:4")
    with refused("E-DATA-PLUGIN-TABLE"):
        load_recipe(None, ["filter.junk.enabled=false"])  # a filter of ingot has a section of its own


def test_a_stage_that_cannot_be_created_ends_the_build_before_it_begins(plugins):  # noqa: F811
    plugins.write("broken", 'FILTERS.register(Filter(name="odd", make=lambda settings: 1 / 0))')
    with refused("E-DATA-PLUGIN-CREATE", name="odd") as caught:
        check_parts(plugins.recipe("[filter.odd]", "broken"), WEB)
    assert "broken.py:" in caught.value.found and "plug-in broken" in caught.value.found
    plugins.write("other", 'FILTERS.register(Filter(name="even", make=lambda settings: None))')
    with refused("E-DATA-PLUGIN-RESULT"):
        check_parts(plugins.recipe("[filter.even]", "other"), WEB)


def test_a_document_on_which_a_filter_raises_is_dropped_with_the_place_of_the_error(plugins):  # noqa: F811
    plugins.write("raises", odd("return None if document.text == 'good' else {}['k']"))
    stage = stage_of(plugins.recipe("[filter.odd]", "raises"))
    drop = stage(document("bad"))
    assert (drop.stage, drop.rule) == ("odd", "odd.plugin")
    assert drop.value.startswith("KeyError: 'k' (raises.py:")
    assert stage(document("good")) is None
    assert all(stage(document("bad")) for _ in range(2 * FIRST_DOCUMENTS))  # the first document was not bad


def test_a_filter_that_raises_on_each_of_the_first_documents_ends_the_build(plugins):  # noqa: F811
    plugins.write("raises", odd("1 / 0"))
    stage = stage_of(plugins.recipe("[filter.odd]", "raises"))
    for _ in range(FIRST_DOCUMENTS - 1):
        assert stage(document("bad")).rule == "odd.plugin"
    with refused("E-DATA-PLUGIN-RAISED", part="filter 'odd' of plug-in raises"):
        stage(document("bad"))


@pytest.mark.parametrize(
    "look",
    ["document.text = None", "document.language = 3", "document.notes['x'] = [1]", "document.notes = None"],
)
def test_a_document_that_a_filter_spoils_before_it_raises_is_dropped_as_it_was(plugins, look):  # noqa: F811
    plugins.write("spoils", odd(f"{look}; 1 / 0"))
    one = document("a text")
    one.language, one.notes = "en", {"encoding": "utf-8"}
    assert stage_of(plugins.recipe("[filter.odd]", "spoils"))(one).rule == "odd.plugin"
    assert (one.text, one.language, one.notes) == ("a text", "en", {"encoding": "utf-8"})


def test_memory_is_no_fault_of_a_document_alone(plugins):  # noqa: F811
    plugins.write("greedy", odd("raise MemoryError"))
    with pytest.raises(MemoryError):  # the worker dies, and the record is tried again
        stage_of(plugins.recipe("[filter.odd]", "greedy"))(document("x"))


@pytest.mark.parametrize(
    "look",
    [
        "return True",
        "return 'odd.one'",
        "return Drop('even', 'odd.one')",
        "return Drop('odd', 'odd.two')",
        "return Drop('odd', 'odd.one', 3)",
        "document.text = None",
        "document.language = 3",
        "document.notes['x'] = [1]",
        "document.notes[1] = 1",
        "document.notes = None",
    ],
)
def test_a_wrong_result_ends_the_build(plugins, look):  # noqa: F811
    plugins.write("wrong", odd(look))
    with refused("E-DATA-PLUGIN-RESULT", part="filter 'odd' of plug-in wrong"):
        stage_of(plugins.recipe("[filter.odd]", "wrong"))(document("x"))


def test_a_recipe_without_plugins_keeps_its_values(plugins):  # noqa: F811
    added = {"plugins", "filter", "format", "extractor", "pii_kind", "mixture"}
    assert not added & recipe_values(DataRecipe()).keys()
    assert not added & encode(DataRecipe()).keys()  # what the keys of tasks are made of
    assert "filter" in encode(DataRecipe(filter={"odd": {}}))
    plugins.write("place", odd("return None"))
    plugins.write("policy", 'MIXTURES.register(MixturePolicy(name="mine", weights=lambda a, s: ({}, [])))')
    mixtures = plugins.recipe("[mixture.mine]", "place", "policy")
    assert fingerprint(mixtures) == fingerprint(DataRecipe())  # a plug-in that no document passes decides nothing
    assert fingerprint(plugins.recipe("[filter.odd]", "place")) != fingerprint(DataRecipe())


def test_files_of_a_filter_are_in_the_fingerprint(plugins, tmp_path):  # noqa: F811
    (tmp_path / "list.txt").write_text("a")
    files = f", files=lambda settings: [{str(tmp_path / 'list.txt')!r}]"
    plugins.write("files", odd("return None", files))
    recipe = plugins.recipe("[filter.odd]", "files")
    before = fingerprint(recipe)
    (tmp_path / "list.txt").write_text("b")
    assert fingerprint(recipe) != before
    (tmp_path / "list.txt").unlink()
    with refused("E-DATA-PLUGIN-CREATE", name="odd"):
        fingerprint(recipe)


def test_own_filters_are_entries_of_the_registry():
    assert all(isinstance(FILTERS[name], Filter) for name in STAGE_NAMES[5:13])
    with pytest.raises(IngotError):
        FILTERS.register(Filter(name="junk", make="x:y"))
