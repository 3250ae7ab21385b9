import pytest

from ingot.data.build import Input, build_corpus
from ingot.data.inspect import _spread, inspect
from ingot.errors import UsageError


@pytest.fixture
def built(crawl, tmp_path):
    build_corpus([Input(path) for path in crawl], tmp_path / "out" / "corpus")
    return tmp_path / "out"


def test_rules_with_counts_and_kept_documents(built):
    found = inspect(built)
    assert found.rules[0] == ("url.duplicate", 2)
    assert found.total == len(found.examples) == 4
    assert found.setting == ""


def test_examples_of_a_rule_or_a_stage(built):
    found = inspect(built / "corpus", dropped_by="gopher.word_count")
    assert [row["url"] for row in found.examples] == ["http://a.example/short"]
    assert found.setting == "quality.gopher.word_count"
    assert inspect(built, dropped_by="url").total == 2
    assert inspect(built, dropped_by="url", url="A.example").total == 1


def test_a_typo_gets_a_suggestion(built):
    with pytest.raises(UsageError, match=r"did you mean 'gopher\.word_count'"):
        inspect(built, dropped_by="gopher.wordcount")


@pytest.mark.parametrize("total", [0, 1, 4, 5, 9, 10, 11, 99, 1000])
def test_examples_are_spread_over_everything(total):
    chosen, seen = _spread(({"n": n} for n in range(total)), 5)
    numbers = [row["n"] for row in chosen]
    assert seen == total
    assert len(numbers) == min(total, 5)
    assert numbers == sorted(set(numbers))
    assert not total or numbers[-1] >= total // 2
