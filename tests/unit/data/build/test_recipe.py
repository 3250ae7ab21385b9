import pytest
from tests.expect import refused

from ingot.config import to_toml
from ingot.data.build.recipe import DataRecipe, load_recipe, setting_of, value_of
from ingot.data.filters.gopher import Gopher


def test_the_preset_is_finewebs_recipe():
    recipe = load_recipe()
    assert recipe == DataRecipe()
    assert recipe.language.threshold == 0.65
    assert recipe.quality.fineweb.duplicate_line_characters == 0.01
    assert "whitespace-separated" in Gopher(recipe.quality.gopher).ran


def test_file_and_overrides(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[language]\nkeep = ["de"]\n[quality.gopher]\nsymbol_ratio = 0.2\n')
    recipe = load_recipe(path, ["quality.gopher.symbol_ratio=0.15", "quality.gopher.word_count=[20, 90]"])
    assert recipe.language.keep == ("de",)
    assert recipe.quality.gopher.symbol_ratio == 0.15
    assert recipe.quality.gopher.word_count == (20, 90)
    assert recipe.quality.c4 == DataRecipe().quality.c4


def test_a_recipe_written_out_reads_back(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(DataRecipe()))
    assert load_recipe(path) == DataRecipe()


def test_all_typos_at_once_with_suggestions():
    typo = "quality.gopher.symbol_rato"
    meant = {typo: ["quality.gopher.symbol_ratio"]}
    with refused("E-CONFIG-SETTINGS", keys=[typo, "pii.density", "dedup.bands"], meant=meant):
        load_recipe(None, [f"{typo}=1", "pii.density=7", "dedup.bands='x'"])


def test_a_key_of_the_same_section_is_suggested_before_one_of_another():
    meant = {"quality.gopher.min_words": ["quality.gopher.stop_words", "toxicity.min_words"]}
    with refused("E-CONFIG-SETTINGS", meant=meant):
        load_recipe(None, ["quality.gopher.min_words=30"])


@pytest.mark.parametrize(
    ("rule", "setting"),
    [
        ("gopher.symbol_ratio", "quality.gopher.symbol_ratio"),
        ("gopher_repetition.top_2_gram", "quality.gopher_repetition.top_2_gram"),
        ("c4.curly_bracket", "quality.c4.curly_bracket"),
        ("language.other", "language.keep"),
        ("near_duplicates.similar", "dedup.jaccard"),
        ("pii.density", "pii.density"),
        ("toxicity.words", "toxicity.words"),
        ("read.http_status", ""),
        ("url.duplicate", ""),
        ("gopher", "quality.gopher"),
    ],
)
def test_setting_of_a_rule(rule, setting):
    assert setting_of(rule) == setting


@pytest.mark.parametrize(
    "setting", ["quality.gopher.word_count", "language.keep", "dedup.enabled", "dedup.jaccard", "quality.gopher"]
)
def test_the_value_of_the_preset_can_be_set(setting):
    value = value_of(setting)
    assert bool(value) == (setting != "quality.gopher")
    assert load_recipe(None, [f"{setting}={value}"] if value else []) == DataRecipe()


def test_a_printed_recipe_reads_back_as_it_was(tmp_path, capsys):
    from ingot.cli.main import main

    changes = ["--set", 'source.code={preset="none", language={enabled=false}}', "--set", "quality.c4.sentences=7"]
    assert main(["data", "recipe", "--preset", "fineweb", *changes]) == 0
    (tmp_path / "recipe.toml").write_text(capsys.readouterr().out)
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe == load_recipe(None, [changes[1], changes[3]], "fineweb")
    assert recipe.quality.c4.sentences == 7
