import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.expect import refused

from ingot.data.build import corpus_build as build
from ingot.data.build import duplicates, plugin_code
from ingot.data.build import process_input as process_module
from ingot.data.build.corpus import cut_files, load_corpus, read_documents, read_dropped, verify_corpus
from ingot.data.build.corpus_build import build_corpus
from ingot.data.build.recipe import DataRecipe, load_recipe
from ingot.data.dedup.minhash import DedupRules, jaccard, shingles
from ingot.data.filters.language import LanguageRules
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.data.tasks.run import Inline
from ingot.data.tasks.store import Store
from ingot.errors import RunBusyError
from ingot.schema.corpus import document_id


def inputs_of(crawl):
    return [Input(location=str(path)) for path in crawl]


def outcomes(out):
    kept = {row["url"]: "kept" for _, row in read_documents(out)}
    return kept | {row["url"]: row["rule"] for row in read_dropped(out)}


def tree(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "seconds.json"}


def test_every_page_is_kept_or_dropped_by_its_rule(crawl, tmp_path):
    out = tmp_path / "corpus"
    manifest = build_corpus(inputs_of(crawl), out)
    assert outcomes(out) == {
        "http://a.example/1": "kept",
        "http://a.example/2": "kept",
        "http://a.example/missing": "read.http_status",
        "http://a.example/empty": "extract.empty",
        "http://a.example/short": "gopher.word_count",
        "http://a.example/german": "language.other",
        "http://a.example/1#comments": "url.duplicate",
        "http://b.example/3": "kept",
        "http://A.example:80/2?utm_source=x": "url.duplicate",
        "http://b.example/mirror": "near_duplicates.similar",
        "http://b.example/code": "c4.curly_bracket",
        "http://b.example/spam": "toxicity.words",
        "http://b.example/6": "kept",
    }
    texts = {row["url"]: row["text"] for _, row in read_documents(out)}
    assert "<EMAIL>" in texts["http://a.example/2"]
    assert "@" not in texts["http://a.example/2"]
    counts = [(stage.documents_in, stage.documents_out) for stage in manifest.funnel]
    assert counts[0][0] == 13
    assert counts[-1][1] == 4 == sum(part.documents for part in manifest.parts)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(counts))
    assert all(stage.documents_in - stage.documents_out == sum(stage.dropped.values()) for stage in manifest.funnel)
    assert all(stage.ran for stage in manifest.funnel)
    assert sum(part.text_bytes for part in manifest.parts) == sum(len(text.encode()) for text in texts.values())
    assert not list(tmp_path.glob(".*"))


def test_lineage_of_a_kept_document(crawl, tmp_path):
    inputs = [Input(location=str(crawl[0]), source="guide"), Input(location=str(crawl[1]))]
    build_corpus(inputs, tmp_path / "corpus")
    for source, row in read_documents(tmp_path / "corpus"):
        assert row["id"] == document_id(row["file"], row["record_id"], row["url"])
        assert source == row["source"] == ("guide" if row["file"] == "crawl-0.warc.gz" else "web")
        assert row["language"] == "en"


def test_the_corpus_does_not_depend_on_workers_or_order(crawl, tmp_path):
    build_corpus(inputs_of(crawl), tmp_path / "one")
    with Local(2) as runner:
        build_corpus(inputs_of(crawl)[::-1], tmp_path / "two", runner=runner)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_building_again_does_nothing(crawl, tmp_path, monkeypatch):
    out = tmp_path / "corpus"
    first = build_corpus(inputs_of(crawl), out)
    monkeypatch.setattr(build, "_Build", None)  # would fail if anything was built
    assert build_corpus(inputs_of(crawl), out) == first == load_corpus(out)


def test_another_recipe_replaces_the_corpus(crawl, tmp_path):
    out = tmp_path / "corpus"
    build_corpus(inputs_of(crawl), out)
    build_corpus(inputs_of(crawl), out, load_recipe(None, ["quality.c4.curly_bracket=false"]))
    assert outcomes(out)["http://b.example/code"] == "kept"
    assert not list(tmp_path.glob(".*"))


def test_switched_off_stages_stay_in_the_funnel(crawl, tmp_path):
    recipe = load_recipe(None, [f"{part}.enabled=false" for part in ("language", "dedup", "toxicity", "pii")])
    manifest = build_corpus(inputs_of(crawl), tmp_path / "corpus", recipe)
    off = [stage.name for stage in manifest.funnel if stage.ran == "switched off"]
    always_off = {"purged", "classifier", "contaminated", "substrings", "blocklist"}
    assert set(off) - always_off == {"language", "toxicity", "pii", "duplicates", "near_duplicates"}
    found = outcomes(tmp_path / "corpus")
    assert found["http://b.example/mirror"] == found["http://b.example/spam"] == "kept"


def test_interrupted_builds_continue(crawl, tmp_path, monkeypatch):
    out, processed = tmp_path / "corpus", []
    real = build.run_all

    def stop_after_first(tasks, *rest):
        if tasks[0].function is process_module.process_input:
            real(tasks[:1], *rest)
            raise KeyboardInterrupt
        return real(tasks, *rest)

    monkeypatch.setattr(build, "run_all", stop_after_first)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(inputs_of(crawl), out)
    assert not out.exists()

    def count(tasks, store, *rest):
        if tasks[0].function is process_module.process_input:
            processed.append(sum(not store.finished(task) for task in tasks))
        return real(tasks, store, *rest)

    monkeypatch.setattr(build, "run_all", count)
    build_corpus(inputs_of(crawl), out)
    assert processed == [1]  # the other file was there
    monkeypatch.setattr(build, "run_all", real)
    build_corpus(inputs_of(crawl), tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_an_unfinished_build_of_another_version_starts_again_with_a_notice(crawl, tmp_path, capsys):
    store = tmp_path / ".corpus.work" / "store"
    (store / "done" / "ab" / "abc").mkdir(parents=True)
    (store / "done" / "ab" / "abc" / "done.json").write_text('{"function": "ingot.data.curate:curate", "result": 1}')
    build_corpus(inputs_of(crawl), tmp_path / "corpus")
    assert "another version of ingot" in capsys.readouterr().err
    build_corpus(inputs_of(crawl), tmp_path / "fresh")
    assert tree(tmp_path / "corpus") == tree(tmp_path / "fresh")
    assert capsys.readouterr().err == ""


def _build(crawl, out):
    build_corpus(inputs_of(crawl), out)


def test_a_killed_build_leaves_nothing_half_written(crawl, tmp_path):
    out = tmp_path / "corpus"
    context = multiprocessing.get_context("fork")
    for delay in (0.0, 0.02, 0.05, 0.1):
        process = context.Process(target=_build, args=(crawl, out))
        process.start()
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        if out.exists():
            verify_corpus(out)
    build_corpus(inputs_of(crawl), out)
    build_corpus(inputs_of(crawl), tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_everything_filtered_out_says_by_what(crawl, tmp_path):
    out = tmp_path / "corpus"
    recipe = replace(DataRecipe(), language=LanguageRules(keep=("fr",)))
    for _ in range(2):  # also when it is there already
        with refused("E-CORPUS-EMPTY", records=13) as error:
            build_corpus(inputs_of(crawl), out, recipe)
        assert error.value.facts["dropped_by"][0] == "language.other"
    assert len(list(read_dropped(out))) == 13


def test_garbage_is_named_and_other_files_are_kept(crawl, tmp_path):
    garbage = tmp_path / "garbage.warc.gz"
    garbage.write_bytes(b"this is no crawl file at all\n" * 50)
    with Local(2) as runner:
        build_corpus([*inputs_of(crawl), Input(location=str(garbage))], tmp_path / "corpus", runner=runner)
    found = outcomes(tmp_path / "corpus")
    assert sum(outcome == "kept" for outcome in found.values()) == 4
    assert found[""] == "read.bad_input"
    (warning,) = cut_files(tmp_path / "corpus")
    assert warning.startswith("left out: ") and "garbage.warc.gz" in warning
    with refused("E-INPUT-UNREADABLE", inputs=["garbage.warc.gz"]):
        build_corpus([Input(location=str(garbage))], tmp_path / "alone")


def test_rules_for_a_source_without_inputs_are_refused(crawl, tmp_path):
    recipe = load_recipe(None, ["source.wbe.preset=none"])
    with refused("E-RECIPE-SOURCE", source="wbe", sources=["web"]):
        build_corpus(inputs_of(crawl), tmp_path / "corpus", recipe)


def test_stop_words_are_asked_of_english_pages_only(crawl, tmp_path):
    recipe = load_recipe(None, ['language.keep=["en", "de"]', "quality.gopher_repetition.enabled=false"])
    build_corpus(inputs_of(crawl), tmp_path / "corpus", recipe)
    assert outcomes(tmp_path / "corpus")["http://a.example/german"] != "gopher.stop_words"


@pytest.mark.parametrize(
    ("change", "code", "facts"),
    [
        (lambda inputs: [], "E-INPUT-NONE", {}),
        (lambda inputs: [*inputs, Input(location="absent.warc")], "E-INPUT-MISSING", {"path": "absent.warc"}),
        (lambda inputs: [*inputs, inputs[0]], "E-INPUT-NAME", {"count": 2}),
        (lambda inputs: [replace(inputs[0], source="../x")], "E-SOURCE-NAME", {"source": "../x"}),
        (lambda inputs: [replace(inputs[0], source="dropped")], "E-SOURCE-NAME", {"source": "dropped"}),
    ],
)
def test_bad_inputs(crawl, tmp_path, change, code, facts):
    with refused(code, **facts):
        build_corpus(change(inputs_of(crawl)), tmp_path / "corpus")


def test_a_folder_of_the_users_is_not_touched(crawl, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with refused("E-CORPUS-FOLDER", path=str(tmp_path / "mine")):
        build_corpus(inputs_of(crawl), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_no_space_is_found_before_work_starts(crawl, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    with refused("E-DISK-SPACE", purpose="building the corpus", path=str(tmp_path), free_bytes=1000):
        build_corpus(inputs_of(crawl), tmp_path / "corpus")
    assert not list(tmp_path.glob("*corpus*"))


def test_two_builds_at_once(crawl, tmp_path):
    out = tmp_path / "corpus"
    with build._work_folder(out), pytest.raises(RunBusyError):
        build_corpus(inputs_of(crawl), out)
    build_corpus(inputs_of(crawl), out)


def test_planted_records_are_kept_or_dropped_by_their_rules(test_data, tmp_path):
    """Every kind of truth_warc.jsonl, on the four shared crawl files."""
    out = tmp_path / "corpus"
    crawl = sorted((test_data / "warc").glob("shared-0000?.warc.gz"))
    with Local(2) as runner:
        manifest = build_corpus(inputs_of(crawl), out, runner=runner)
    kept = {row["record_id"]: row for _, row in read_documents(out)}
    dropped = {row["id"]: row["rule"] for row in read_dropped(out)}
    assert manifest.funnel[0].documents_in == len(kept) + len(dropped) == 1089
    truth = [json.loads(line) for line in (test_data / "truth_warc.jsonl").read_text().splitlines()]
    clusters: dict[int, list[str]] = {}
    expected = {
        "low_quality": ("gopher", "gopher_repetition", "c4", "fineweb", "language"),
        "lang": ("language",),
        "charset": ("language",),
        "status_404": ("read",),
        "status_301": ("read",),
        "not_html": ("read",),
        "empty_body": ("read",),
        "deep_nesting": ("extract",),
    }
    urls = [row["url"] for row in kept.values()]
    english = 0
    for one in truth:
        rule = dropped.get(document_id(f"shared-0000{one['file']}.warc.gz", one["record_id"], one["url"]), "")
        if one["kind"] in expected and one.get("lang") != "en":
            assert rule.split(".")[0] in expected[one["kind"]], one
        if one["kind"] == "url_dup":
            assert sum(url in (one["url"], one["of"]) for url in urls) <= 1, one
        if one["kind"] in ("nd_base", "exact_text_copy") or one.get("jaccard5_to_base", 0) >= 0.8:
            clusters.setdefault(one["cluster"], []).append(one["record_id"])
        if one["kind"] == "pii" and one["record_id"] in kept:
            english += 1
            assert not any(value in kept[one["record_id"]]["text"] for value in one["pii"].values()), one
        if one["kind"] == "pii_trap" and one["record_id"] in kept:
            assert one["keep"] in kept[one["record_id"]]["text"]
    assert english >= 35  # of 40 planted pages
    assert len(clusters) >= 60
    for cluster, members in clusters.items():
        assert sum(record in kept for record in members) <= 1, cluster
    sets = [shingles(row["text"]) for row in kept.values()]
    assert max(jaccard_of(sets, 300)) < 1  # and no text is there twice
    assert DedupRules().ran in [stage.ran for stage in manifest.funnel]


def jaccard_of(sets, count):
    import numpy as np

    unique = [np.unique(s) for s in sets[:count]]
    return [jaccard(a, b) for i, a in enumerate(unique) for b in unique[:i] if len(a) == len(b)] or [0.0]


def test_a_store_that_was_removed_by_half_does_not_count(crawl, tmp_path, monkeypatch):
    """Killed while the finished build's scratch files are removed."""
    out, real = tmp_path / "corpus", shutil.rmtree

    def killed(path, *args, **kwargs):
        if Path(path).name == ".corpus.work":
            for facts in Path(path).rglob("done.json"):
                facts.unlink()
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            build_corpus(inputs_of(crawl), out)
    before = tree(out)
    build_corpus(inputs_of(crawl), out)
    assert tree(out) == before
    assert not list(tmp_path.glob(".*"))


def test_an_input_that_changes_while_it_is_read_is_refused_and_then_read_again(crawl, tmp_path, monkeypatch):
    out, real = tmp_path / "corpus", build.run_all

    def changed(tasks, *rest):
        if tasks[0].function is process_module.process_input:
            shutil.copy(crawl[1], crawl[0])
        return real(tasks, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(build, "run_all", changed)
        with refused("E-INPUT-CHANGED", path=str(crawl[0])):
            build_corpus(inputs_of(crawl), out)
    build_corpus(inputs_of(crawl), out)
    build_corpus(inputs_of(crawl), tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_the_files_of_a_recipe_are_hashed_once(crawl, tmp_path, monkeypatch):
    calls, real = [], build.fingerprint
    monkeypatch.setattr(build, "fingerprint", lambda recipe: calls.append(1) or real(recipe))
    build_corpus(inputs_of(crawl), tmp_path / "corpus")
    few = len(calls)
    copies = [Input(location=str(shutil.copy(crawl[0], tmp_path / f"more-{n}.warc.gz"))) for n in range(3)]
    calls.clear()
    build_corpus([*inputs_of(crawl), *copies], tmp_path / "larger")
    assert len(calls) == few


def test_a_server_is_asked_again_when_a_build_goes_on(tmp_path, monkeypatch):
    asked = []
    version = {"bytes": 7, "etag": "a", "last_modified": ""}
    monkeypatch.setattr(build, "identity", lambda one, cache, rules: asked.append(one.name) or {"name": "x", **version})
    inputs = [Input(location="https://a.example/x.warc.gz")]

    def identify():
        store = Store(tmp_path / "store")
        return build.corpus_identity(inputs, DataRecipe(), None, store, Inline(), lambda fraction, text: None)

    first = identify()
    assert identify() == first
    version["etag"] = "b"
    assert identify()[0].inputs != first[0].inputs
    assert len(asked) == 3
    version["common_crawl"] = "CC-MAIN-2025-05/x"  # such files never change
    identify()
    identify()
    assert len(asked) == 4


def test_the_result_does_not_depend_on_what_waits_in_memory(crawl, tmp_path, monkeypatch):
    build_corpus(inputs_of(crawl), tmp_path / "one")
    monkeypatch.setattr(process_module, "_ROWS_IN_MEMORY", 2)
    build_corpus(inputs_of(crawl), tmp_path / "two")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    monkeypatch.setattr(
        process_module, "_URLS_IN_MEMORY", 1
    )  # duplicates within a file are found with those of other files
    build_corpus(inputs_of(crawl), tmp_path / "three")
    assert outcomes(tmp_path / "one") == outcomes(tmp_path / "three")
    kept = [list(read_documents(tmp_path / name)) for name in ("one", "three")]
    assert kept[0] == kept[1]


def test_decisions_are_the_same_however_many_are_in_memory_at_once(crawl, tmp_path, monkeypatch):
    recipe = load_recipe(None, ["substrings.enabled=true"])
    build_corpus(inputs_of(crawl), tmp_path / "one", recipe)
    monkeypatch.setattr(duplicates, "_DECISIONS_AT_ONCE", 1)
    monkeypatch.setattr(duplicates, "_SIGNATURES_AT_ONCE", 2)
    build_corpus(inputs_of(crawl), tmp_path / "two", recipe)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_build_that_goes_on_with_other_libraries_begins_again(crawl, tmp_path, monkeypatch):
    processed, real = [], build.run_all

    def stop(tasks, store, *rest):
        if tasks[0].function is duplicates.find_same_urls:
            raise KeyboardInterrupt
        if tasks[0].function is process_module.process_input:
            processed.append(sum(not store.finished(task) for task in tasks))
        return real(tasks, store, *rest)

    monkeypatch.setattr(build, "run_all", stop)
    for version in ("1", "1", "2"):
        monkeypatch.setattr(plugin_code, "_libraries", lambda version=version: {"resiliparse": version})
        with pytest.raises(KeyboardInterrupt):
            build_corpus(inputs_of(crawl), tmp_path / "corpus")
    assert processed == [2, 0, 2]
