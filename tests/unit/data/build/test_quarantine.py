"""Documents of a quarantine list are left out of a build, counted by reason; its purge removes them from a folder."""

import shutil
from dataclasses import replace

import pytest
from tests.expect import refused
from tests.unit.data.conftest import english, write_crawl

from ingot.cli.main import main
from ingot.data.build import corpus_build
from ingot.data.build.corpus import load_corpus, read_documents, read_dropped
from ingot.data.build.prepare import prepare
from ingot.data.build.recipe import fingerprint, load_recipe
from ingot.data.filters.quarantine import QuarantineRules
from ingot.data.lineage.records import find
from ingot.data.sources.input import Input
from ingot.schema.quarantine import QuarantineEntry, add_to_quarantine

PAGES = [(f"http://web.example/{number}", english(number), 200) for number in range(8)]


@pytest.fixture
def built(tmp_path):
    """A folder of a build, and entries for three of its documents: by id, by URL, and by text."""
    crawl = write_crawl(tmp_path / "crawl.warc.gz", PAGES)
    build(crawl, tmp_path / "data")
    rows = {row["url"]: row for row in find(tmp_path / "data", domain="web.example")}
    one, two, three = (rows[f"http://web.example/{number}"] for number in (1, 2, 3))
    entry = QuarantineEntry(document=one["id"], reason="mojibake", run="r", step=5, date="2026-11-28")
    other = {"document": "f" * 32, "reason": "entropy"}
    listed = [
        entry,
        replace(entry, **other, url="HTTP://WEB.example:80/2#top"),
        replace(entry, **other | {"document": "e" * 32}, text=three["before"]),
    ]
    add_to_quarantine(tmp_path / "list.jsonl", listed)
    assert two["url"] == "http://web.example/2"
    return crawl, tmp_path / "data", tmp_path / "list.jsonl"


def recipe_with(*lists):
    return load_recipe(None, [f"quarantine.files={[str(one) for one in lists]}"], "none")


def build(crawl, out, recipe=None):
    return prepare([Input(location=str(crawl))], out, recipe or load_recipe(None, [], "none"), vocab_size=300)


def test_listed_documents_are_left_out_and_counted_by_reason(built, tmp_path):
    crawl, data, quarantine = built
    again = build(crawl, tmp_path / "again", recipe_with(quarantine))
    stage = next(stage for stage in again.corpus.funnel if stage.name == "quarantine")
    assert stage.dropped == {"quarantine.entropy": 2, "quarantine.mojibake": 1}
    assert stage.documents_in == 8 and stage.documents_out == 5 and stage.ran == "3 documents of 1 list"
    left = {row["url"] for _, row in read_documents(tmp_path / "again/corpus")}
    assert left == {f"http://web.example/{number}" for number in (0, 4, 5, 6, 7)}
    why = {row["url"]: row["value"] for row in read_dropped(tmp_path / "again/corpus")}
    assert [why[f"http://web.example/{n}"].split()[1] for n in (1, 2, 3)] == ["document", "URL", "text"]
    assert "quarantine" not in {stage.name for stage in load_corpus(data / "corpus").funnel}


def test_a_corpus_depends_on_what_its_lists_leave_out_alone(built, tmp_path):
    crawl, _, quarantine = built
    build(crawl, tmp_path / "again", recipe_with(quarantine))
    moved = tmp_path / "moved.jsonl"
    moved.write_text(quarantine.read_text().replace('"step": 5', '"step": 6').replace("2026-11-28", "2026-12-01"))
    assert not build(crawl, tmp_path / "again", recipe_with(moved)).fresh  # complete: nothing to do
    text = quarantine.read_text()
    quarantine.write_text("".join(text.splitlines(keepends=True)[:2]))  # an entry less
    with refused("E-TOKENS-FINISHED"):
        build(crawl, tmp_path / "again", recipe_with(quarantine))
    shutil.rmtree(tmp_path / "again/tokens")
    assert sum(build(crawl, tmp_path / "again", recipe_with(quarantine)).corpus.funnel[4].dropped.values()) == 2


def test_the_path_of_a_list_is_not_in_the_records_of_a_build(built, tmp_path):
    crawl, _, quarantine = built
    shutil.copy(quarantine, tmp_path / "moved.jsonl")
    (tmp_path / "less.jsonl").write_text(quarantine.read_text().splitlines()[0] + "\n")
    one, two, less = (
        build(crawl, tmp_path / name, recipe_with(tmp_path / f"{name}.jsonl")) for name in ("list", "moved", "less")
    )
    assert one.corpus.recipe == two.corpus.recipe and one.corpus.config_sha256 == two.corpus.config_sha256
    assert one.corpus.config_sha256 != less.corpus.config_sha256


def test_a_list_that_grows_during_a_build_ends_it(built, tmp_path, monkeypatch):
    crawl, _, quarantine = built

    def grown(recipe):
        decides = fingerprint(recipe)
        more = QuarantineEntry(document="a" * 32, reason="entropy", date="2026-11-28")
        add_to_quarantine(quarantine, [more])
        return decides

    monkeypatch.setattr(corpus_build, "fingerprint", grown)
    with refused("E-QUARANTINE-CHANGED"):
        build(crawl, tmp_path / "again", recipe_with(quarantine))


def test_a_recipe_without_lists_is_the_one_from_before_there_were_any():
    recipe = load_recipe(None, [], "none")
    assert recipe.quarantine == QuarantineRules() and "quarantine" not in str(fingerprint(recipe))


def test_a_missing_list_is_refused_before_the_build(built, tmp_path):
    crawl, _, _ = built
    with refused("E-QUARANTINE-MISSING"):
        build(crawl, tmp_path / "again", recipe_with(tmp_path / "none.jsonl"))


def test_a_list_is_traced_and_purged(built, capsys):
    _, data, quarantine = built
    assert main(["data", "trace", "--data", str(data), "--quarantine", str(quarantine)]) == 0
    assert "http://web.example/1" in capsys.readouterr().out
    assert main(["data", "purge", str(data), "--quarantine", str(quarantine), "--reason", "mojibake"]) == 0
    assert "no purged document is left" in capsys.readouterr().out
    left = {row["url"] for _, row in read_documents(data / "corpus")}
    assert left == {url for url, _, _ in PAGES} - {"http://web.example/1"}  # a purge is by the ids of the list
    assert main(["data", "purge", str(data), "--quarantine", str(quarantine)]) == 0  # nothing is left to remove
    assert "nothing is left to remove" in capsys.readouterr().out
    assert main(["data", "trace", "--data", str(data), "--quarantine", str(quarantine)]) == 0
    assert "purged on" in capsys.readouterr().out
