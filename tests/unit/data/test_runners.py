"""The same build by every runner: the same bytes. And what only a whole build shows of rules by source and indexes."""

import pytest
from tests.expect import named, refused

from ingot.data.build.corpus import read_documents, read_dropped
from ingot.data.build.corpus_build import build_corpus
from ingot.data.build.duplicates import index_corpus
from ingot.data.build.prepare import prepare
from ingot.data.build.recipe import load_recipe
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.data.tasks.run import Inline


def inputs_of(crawl, source="web"):
    return [Input(location=str(path), source=source) for path in crawl]


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "seconds.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def substrings():
    return load_recipe(None, ["substrings.enabled=true", "substrings.words=12"])


@pytest.fixture
def undisturbed(crawl, tmp_path, substrings):
    prepare(inputs_of(crawl), tmp_path / "inline", substrings, vocab_size=300, runner=Inline())
    return snapshot(tmp_path / "inline")


@pytest.mark.parametrize("workers", [1, 2])
def test_local_processes_give_the_same_bytes(crawl, tmp_path, substrings, undisturbed, workers):
    with Local(workers) as runner:
        prepare(inputs_of(crawl), tmp_path / "local", substrings, vocab_size=300, runner=runner)
    assert snapshot(tmp_path / "local") == undisturbed


@pytest.mark.nightly  # tests/unit/data/tasks/test_ray.py has tasks on such a cluster
def test_a_ray_cluster_of_two_nodes_gives_the_same_bytes(crawl, tmp_path, substrings, undisturbed):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from ingot.data.tasks.ray import Ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with Ray(cluster.address) as runner:
            prepare(inputs_of(crawl), tmp_path / "ray", substrings, vocab_size=300, runner=runner)
    finally:
        cluster.shutdown()
    assert snapshot(tmp_path / "ray") == undisturbed


def test_rules_may_differ_by_source(crawl, tmp_path):
    recipe = load_recipe(None, ["source.code.preset=none", "source.code.language.enabled=false"])
    inputs = [*inputs_of(crawl[:1]), *inputs_of(crawl[1:], "code")]
    manifest = build_corpus(inputs, tmp_path / "corpus", recipe)
    kept = {row["url"] for _, row in read_documents(tmp_path / "corpus")}
    dropped = {row["url"]: row["rule"] for row in read_dropped(tmp_path / "corpus")}
    assert "http://b.example/code" in kept  # it holds a curly bracket
    assert dropped["http://a.example/short"] == "gopher.word_count"
    assert "; of code: switched off" in next(stage.ran for stage in manifest.funnel if stage.name == "c4")


def test_a_section_that_cannot_differ_by_source_is_refused():
    with refused("E-RECIPE-SOURCE-KEY", source="code", key="dedup"):
        load_recipe(None, ["source.code.dedup.jaccard=0.9"])


@pytest.mark.parametrize(
    ("setting", "key"), [("source.code.quality.gophr=1", "quality.gophr"), ("preset=webb", "preset")]
)
def test_unknown_keys_and_presets_are_refused(setting, key):
    with refused("E-CONFIG-SETTINGS", keys=[key]) as error:
        load_recipe(None, [setting])
    assert error.value.facts["problems"][0].partition(": ")[0].endswith(setting.partition("=")[0])  # the whole key


def test_a_later_build_drops_what_an_earlier_one_kept(crawl, tmp_path):
    build_corpus(inputs_of(crawl[:1]), tmp_path / "first")
    kept = index_corpus(tmp_path / "first", tmp_path / "index", lambda done, documents: None)
    assert kept == 2
    later = tmp_path / "later"
    build_corpus(inputs_of(crawl[1:]), later, against=tmp_path / "index")
    dropped = {row["url"]: row for row in read_dropped(later)}
    ids = {row["url"]: row["id"] for _, row in read_documents(tmp_path / "first")}
    twin = dropped["http://b.example/mirror"]
    assert twin["rule"] == "near_duplicates.similar"
    assert twin["value"].endswith(ids["http://a.example/1"])
    alone = build_corpus(inputs_of(crawl[1:]), tmp_path / "alone")
    assert sum(part.documents for part in alone.parts) == 1 + len(list(read_documents(later)))
    with refused("E-DEDUP-RULES-DIFFER", folder=str(tmp_path / "index")) as caught:
        build_corpus(
            inputs_of(crawl[1:]), tmp_path / "other", load_recipe(None, ["dedup.ngram=4"]), against=tmp_path / "index"
        )
    assert len(caught.value.facts["settings"]) == 1 and named(caught.value.facts["settings"], "ngram", 5, 4)
