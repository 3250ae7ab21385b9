"""The single steps of a data build, and the answers about the size of a run."""

import gzip
import random
import shutil
from pathlib import Path

import pytest
from tests.expect import refused
from tests.unit.api.conftest import crawl_module

import ingot
from ingot.api.building import _found
from ingot.data.build.recipe import load_recipe
from ingot.errors import IngotError
from ingot.schema.run import RunConfig
from ingot.theory.rules import load_run

english = crawl_module().english


def test_read_warc_accounts_for_every_record(crawl_file):
    pairs = list(ingot.read_warc(crawl_file))
    assert len(pairs) == 43
    ((missing, drop),) = [(document, drop) for document, drop in pairs if drop]
    assert (missing.url, drop.rule, drop.value) == ("http://a.example/missing", "read.http_status", "404")
    page = pairs[0][0]
    assert english(0, 24).split("\n")[0] in ingot.extract(page.raw, charset=page.charset)
    with refused("E-INPUT-READ-FAILED"):
        list(ingot.read_warc("nowhere.warc"))


def test_read_wet_gives_text(tmp_path, crawl_file):
    records = ""
    for number, text in enumerate(["The first text.", ""]):
        head = f"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n"
        head += f"WARC-Target-URI: http://a.example/{number}\r\nContent-Type: text/plain\r\n"
        records += f"{head}Content-Length: {len(text)}\r\n\r\n{text}\r\n\r\n"
    path = tmp_path / "crawl.wet.gz"
    path.write_bytes(gzip.compress(records.encode()))
    (first, kept), (_, drop) = ingot.read_wet(path)
    assert (first.text, kept, drop and drop.rule) == ("The first text.", None, "read.empty_body")
    pages = list(ingot.read_wet(str(crawl_file)))
    assert english(1, 24).split("\n")[0] in pages[1][0].text and not pages[1][0].raw


def test_extract():
    page = "<html><body><nav>Home</nav><p>Copper melts at 1,085 degrees, café.</p></body></html>"
    for method in ("accurate", "fast"):
        assert ingot.extract(page, method=method) == "Copper melts at 1,085 degrees, café."
    assert ingot.extract(page.encode("latin-1"), charset="latin-1") == ingot.extract(page)
    assert ingot.extract("") == ""
    with refused("E-EXTRACT-METHOD", method="best"):
        ingot.extract(page, method="best")
    with refused("E-PAGE-LIMIT", page_rule="extract.too_deep"):
        ingot.extract("<div>" * 1100 + "deep")


def test_is_english():
    assert ingot.is_english(english(1))
    assert not ingot.is_english("Der Hund und die Katze gehen heute nicht in den Wald, weil es regnet.")
    assert not ingot.is_english(english(1), threshold=1.1)


def test_passes_quality_gives_the_rule():
    assert ingot.passes_quality(english(1)) and not ingot.passes_quality(english(1)).rule
    verdict = ingot.passes_quality("Too short to keep.")
    assert (bool(verdict), verdict.rule, verdict.value) == (False, "gopher.word_count", "4 < 50")
    assert ingot.passes_quality("Too short to keep.", preset="none")
    with refused("E-QUALITY-PRESET", preset="best"):
        ingot.passes_quality("text", preset="best")


def test_a_path_of_a_partitioned_table_is_not_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = Path("language=en") / "part.jsonl"
    part.parent.mkdir()
    part.write_text('{"body": "text"}\n')
    text = str(part)
    for inputs in (
        part,
        text,
        [part, "text=body"],
        {"a": part},
        {"a": [text, "text=body"]},
        {"a": ["text=body", part]},
    ):
        (found,) = _found(inputs, tmp_path / "out", load_recipe(None, (), ""))
        assert (found.location, found.fields.language) == (text, "")
    missing = Path("text=none") / "part.jsonl"
    with pytest.raises(IngotError) as error:
        _found([part, missing], tmp_path / "out", load_recipe(None, (), ""))
    assert str(missing) in error.value.found


def words(seed: int, count: int = 120) -> list[str]:
    pick = random.Random(seed)
    return [f"word{pick.randrange(10_000)}" for _ in range(count)]


def test_a_deduper_finds_copies_and_near_copies():
    deduper = ingot.Deduper()
    one, two = words(1), words(2)
    assert deduper.add(" ".join(one)) is None and deduper.add(" ".join(two)) is None and len(deduper) == 2
    exact = deduper.add("\n".join(two))
    assert exact is not None and (exact.index, exact.similarity, exact.exact) == (1, 1.0, True)
    near = deduper.add(" ".join([*one[:-1], "other"]))
    # 116 shingles of 5 words each; the last word is in one of them.
    assert near is not None and (near.index, near.exact) == (0, False) and near.similarity == 115 / 117
    half = " ".join([*one[:60], *words(3, 60)])
    assert deduper.find(half) is None and len(deduper) == 2
    assert deduper.add(half) is None and len(deduper) == 3
    assert deduper.add("") is None and deduper.add(" \n") is not None  # all empty texts are equal


def test_a_deduper_is_as_exact_as_its_threshold():
    """From a chain of texts that differ more and more from the first, exactly those above the threshold are copies."""
    base = words(5, 204)
    texts = [" ".join([*base[:-changed], *words(changed, changed)]) if changed else " ".join(base)
             for changed in range(0, 60, 4)]  # fmt: skip
    for threshold, num_perm in ((0.8, 128), (0.6, 128), (0.9, 64), (1.0, 8), (0.7, 7)):
        found = ingot.Deduper(threshold, num_perm)
        answers = [found.find(text) if number else found.add(text) for number, text in enumerate(texts)]
        for changed, answer in zip(range(4, 60, 4), answers[1:], strict=True):
            similar = (200 - changed) / (200 + changed) >= threshold
            assert (answer is not None) == similar, (threshold, num_perm, changed)
    again = [ingot.Deduper(0.8).add(text) for text in texts]
    assert again == [None] * len(texts)


def test_options_of_a_deduper_are_checked():
    for options in ({"threshold": 0.0}, {"threshold": 80}, {"num_perm": 0}):
        with refused("E-DEDUP-OPTION", **options):
            ingot.Deduper(**options)
    for threshold, num_perm, fix in (
        (0.02, 128, "num_perm = 140"),
        (0.5, 4, "num_perm = 5"),
        (1e-300, 128, "threshold"),
    ):
        with refused("E-DEDUP-OPTION", threshold=threshold, num_perm=num_perm) as error:
            ingot.Deduper(threshold, num_perm)
        assert fix in error.value.fix
    assert ingot.Deduper(0.02, 140).rules.rows == ingot.Deduper(0.5, 5).rules.rows == 1


def test_texts_become_the_shards_that_training_reads(golden, tmp_path, command):
    texts = {"a": [english(n) for n in range(30)], "b/c": [english(n) for n in range(50, 60)]}
    tokenizer = golden / "data" / "tokens" / "tokenizer.json"
    train, heldout = ingot.tokenize_to_shards(texts, tokenizer, tmp_path / "own")
    assert train.sources == heldout.sources == ("a", "b/c")
    assert sum(shard.documents for shard in (*train.shards, *heldout.shards)) == 40
    corpus = ingot.Corpus(tmp_path / "own")
    assert corpus.sources == {"a": 30, "b/c": 10} and [row["text"] for row in corpus.documents("a")] == texts["a"]
    assert corpus.tokens == {"train": train, "heldout": heldout}
    assert command("data", "verify", tmp_path / "own")[0] == 0
    assert len(ingot.TokenDataset(tmp_path / "own", seq_len=16, global_batch=2)) > 10

    again, _ = ingot.tokenize_to_shards({name: iter(own) for name, own in texts.items()}, tokenizer, tmp_path / "own")
    assert again == train
    other, _ = ingot.tokenize_to_shards(iter(texts["a"]), tokenizer, tmp_path / "plain")
    assert other.sources == ("text",)
    with refused("E-TOKENS-FINISHED"):
        ingot.tokenize_to_shards(texts["a"], tokenizer, tmp_path / "own")
    assert ingot.Corpus(tmp_path / "own").sources == {"a": 30, "b/c": 10}, "a refused call changes nothing"
    with refused("E-SOURCE-SMALL"):
        ingot.tokenize_to_shards(["only one"], tokenizer, tmp_path / "one")


@pytest.mark.parametrize("kind", ["files", "another corpus", "damaged", "link"])
def test_a_corpus_folder_of_the_user_is_not_replaced(golden, tmp_path, kind):
    corpus = tmp_path / "out" / "corpus"
    tokenizer = golden / "data" / "tokens" / "tokenizer.json"
    if kind == "link":
        ingot.tokenize_to_shards([english(n) for n in range(4)], tokenizer, tmp_path / "own")
        corpus.parent.mkdir()
        corpus.symlink_to(tmp_path / "own" / "corpus")
    elif kind == "another corpus":
        shutil.copytree(golden / "data" / "corpus", corpus)
    else:
        corpus.mkdir(parents=True)
        (corpus / ("notes.txt" if kind == "files" else "corpus.json")).write_text("mine")
    before = {path: path.read_bytes() for path in corpus.iterdir()}

    def texts():
        pytest.fail("no text is read before the refusal")
        yield ""

    with refused("E-TEXTS-FOLDER", path=str(corpus)):
        ingot.tokenize_to_shards(texts(), tokenizer, tmp_path / "out")
    assert {path: path.read_bytes() for path in corpus.iterdir()} == before
    assert [path.name for path in corpus.parent.iterdir()] == ["corpus"]


def test_memory_per_gpu(golden):
    found = ingot.memory_per_gpu("llama3-8b", cluster="8xh100", pinned={"tp": 8}, tokens="1T", seq=4096)
    best = ingot.plan("llama3-8b", cluster="8xh100", pinned={"tp": 8}, tokens="1T", seq=4096, top=1).best
    assert found.run == best.run and found.run.parallel.tp == 8
    assert found.total_bytes == pytest.approx(best.plan.total_memory_bytes) and found.fits == best.fits
    assert found.bytes_by_kind.keys() == found.formulas.keys() >= {"weights", "optimizer", "activations"}
    run = golden / "dense-1-rank" / "run.toml"
    small = ingot.memory_per_gpu(run=run, cluster="8xh100", overrides=("train.micro_batch=2",))
    assert small.run.train.micro_batch == 2 and small.total_bytes < 2**33 < small.available_bytes
    assert ingot.memory_per_gpu(run=small.run, cluster="8xh100") == small
    assert not ingot.memory_per_gpu(params="70b", cluster="h100").fits
    with refused("E-MEMORY-SUBJECT"):
        ingot.memory_per_gpu("llama3-8b", run=run)


def test_chinchilla_optimal():
    by_size = ingot.chinchilla_optimal(params="70b")
    assert (by_size.parameters, by_size.tokens) == (70e9, 1.4e12) and by_size.flops == pytest.approx(5.88e23)
    for same in (ingot.chinchilla_optimal(tokens="1.4T"), ingot.chinchilla_optimal(flops="5.88e23flop")):
        assert same.parameters == pytest.approx(70e9) and same.tokens == pytest.approx(1.4e12)
    assert ingot.chinchilla_optimal(flops=5.88e23).flops == pytest.approx(5.88e23)
    for wrong in ({}, {"params": "7b", "tokens": "1T"}, {"flops": "$2M"}):
        with refused("E-OPTIMUM-SUBJECT"):
            ingot.chinchilla_optimal(**wrong)


def test_recommend_config(golden, tmp_path):
    options = {"tokens": golden / "data", "cluster": "8xh100", "seq": 16, "name": "mine"}
    config = ingot.recommend_config("tiny", **options, relative_to=tmp_path)
    assert isinstance(config, RunConfig) and (config.name, config.train.seq_len) == ("mine", 16)
    plans = ingot.plan("tiny", **options, top=1, relative_to=tmp_path)
    plans.write(tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml") == config == plans.best.run
    with refused("E-RECOMMEND-FIT", cluster="h100"):
        ingot.recommend_config(params="70b", tokens="1T", cluster="h100")
