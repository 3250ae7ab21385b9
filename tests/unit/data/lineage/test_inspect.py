"""The result of an inspection, with lineage and, for folders of older builds, without."""

import gzip
import json

import pytest
from tests.expect import refused

from ingot.data.build.corpus import read_jsonl
from ingot.data.build.corpus_build import build_corpus
from ingot.data.lineage.inspect import RuleLimit, _spread, inspect
from ingot.data.lineage.records import write_lineage
from ingot.data.sources.input import Input


@pytest.fixture
def built(crawl, tmp_path):
    build_corpus([Input(location=str(path)) for path in crawl], tmp_path / "out" / "corpus")
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
    with refused("E-RULE-UNKNOWN", rule_or_stage="gopher.wordcount", close="gopher.word_count"):
        inspect(built, dropped_by="gopher.wordcount")


@pytest.mark.parametrize("total", [0, 1, 4, 5, 9, 10, 11, 99, 1000])
def test_examples_are_spread_over_everything(total):
    chosen, seen = _spread(({"n": n} for n in range(total)), 5)
    numbers = [row["n"] for row in chosen]
    assert seen == total
    assert len(numbers) == min(total, 5)
    assert numbers == sorted(set(numbers))
    assert not total or numbers[-1] >= total // 2


WORDS = [3, 12, 20, 30, 49]


@pytest.fixture
def traced(built):
    """The build of `crawl` with lineage of its own making: five pages that had too few words, four kept ones."""
    corpus = built / "corpus"
    for path in corpus.glob("lineage-*"):
        path.unlink()
    kept = [row for path in sorted(corpus.glob("web-*.gz")) for row in read_jsonl(path)]
    rows = []
    for number, row in enumerate(kept):
        after = "b" * 32 if number == 1 else "a" * 32
        lineage = {
            "before": "a" * 32,
            "before_bytes": 900,
            "after": after,
            "after_bytes": 900 - number,
            "language": "en",
        }
        rows.append(row | lineage | {"part": f"web-{row['file'][6]:0>5}.jsonl.gz", "notes": {"pii_email": number}})
    write_lineage(corpus / "lineage-00000.parquet", rows)
    dropped = []
    for number, words in enumerate(WORDS):
        row = {"id": f"{number:032x}", "url": f"https://{'ab'[number % 2]}.example/{number}", "source": "web"}
        row |= {"file": "x", "stage": "gopher", "rule": "gopher.word_count", "value": f"{words} < 50", "language": "de"}
        dropped.append(row | {"text": f"excerpt {number}"})
    row = dict(dropped[0], id="f" * 32, value="123456 > 100000", language="en", text="long")
    dropped.append(row)
    with gzip.open(corpus / "dropped-00001.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in dropped)
    write_lineage(corpus / "lineage-00001.parquet", dropped)
    return built


def test_counts_and_examples_come_from_lineage(traced):
    found = inspect(traced, dropped_by="gopher.word_count", count=3)
    assert found.total == 6
    assert [row["text"] for row in found.examples] == ["excerpt 0", "excerpt 2", "excerpt 4"]
    assert found.domains == (("a.example", 4), ("b.example", 2))
    assert found.languages == (("de", 5), ("en", 1))
    assert inspect(traced, dropped_by="gopher", domain="example", language="de").total == 5
    assert inspect(traced, dropped_by="gopher", domain="b.example").total == 2
    assert inspect(traced, dropped_by="gopher", url="example/3").total == 1
    assert inspect(traced, dropped_by="gopher", language="fr").examples == ()


def test_what_another_limit_would_let_pass(traced):
    limits = inspect(traced, dropped_by="gopher.word_count").limits
    for limit in limits:
        if limit.below:
            assert limit.kept == sum(words >= limit.limit for words in WORDS) and limit.dropped == len(WORDS)
    assert [limit.limit for limit in limits if limit.below] == [30, 20, 12, 3]
    assert [limit for limit in limits if not limit.below] == [RuleLimit(123456, False, 1, 1)]
    assert inspect(traced).limits == inspect(traced, dropped_by="gopher").limits == ()


def test_edits_of_kept_documents(traced):
    found = inspect(traced, count=9)
    assert found.total == 4
    assert sorted(row["notes"]["pii_email"] for row in found.examples) == [0, 1, 2, 3]
    assert all(row["after_bytes"] == 900 - row["notes"]["pii_email"] for row in found.examples)
    (edited,) = inspect(traced, edited=True).examples
    assert edited["notes"] == {"pii_email": 1} and edited["text"]


def test_an_old_folder_can_be_looked_at_but_not_filtered(built):
    for path in (built / "corpus").glob("lineage-*"):
        path.unlink()
    assert inspect(built).total == 4
    assert inspect(built, dropped_by="gopher.word_count").total == 1
    with refused("E-LINEAGE-MISSING"):
        inspect(built, language="en")
