import pytest

from ingot.config import to_toml
from ingot.data.build.recipe import DataRecipe, load_recipe, setting_of, value_of
from ingot.data.filters.gopher import Gopher
from ingot.errors import ConfigError


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
    with pytest.raises(ConfigError) as error:
        load_recipe(None, ["quality.gopher.symbol_rato=1", "pii.density=7", "dedup.bands='x'"])
    assert "did you mean 'quality.gopher.symbol_ratio'" in error.value.found
    assert "pii.density" in error.value.found
    assert "dedup.bands" in error.value.found


def test_a_key_of_the_same_section_is_suggested_before_one_of_another():
    with pytest.raises(ConfigError) as error:
        load_recipe(None, ["quality.gopher.min_words=30"])
    near, other = error.value.found.find("quality.gopher.stop_words"), error.value.found.find("toxicity.min_words")
    assert 0 < near < other


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
