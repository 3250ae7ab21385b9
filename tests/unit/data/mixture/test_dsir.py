"""DSIR: documents similar to the target are chosen, by the weights of the paper, in any order of the documents."""

import argparse
import io
import itertools
import json
import math
import random
import re
import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.cli.data import mix
from ingot.cli.terminal import Terminal
from ingot.config import to_dict
from ingot.data.build.corpus import json_line, jsonl_writer, load_corpus, read_documents, read_jsonl, verify_corpus
from ingot.data.build.corpus_build import build_corpus
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.data.lineage.records import find
from ingot.data.mixture.dsir import DsirRules, Features, gumbel, importance, select
from ingot.data.sources.input import Input
from ingot.schema.corpus import CorpusManifest, CorpusPart, FunnelStage, document_id
from ingot.schema.tokens import read_token_manifest
from ingot.storage import sha256_file, write_json
from ingot.tokenizer.byte_bpe import train_bpe

_LAW = ["court", "judge", "appeal", "statute", "plaintiff", "ruling", "evidence", "hearing", "clause"]
_FOOD = ["onion", "butter", "oven", "recipe", "garlic", "simmer", "flour", "pepper", "dough"]
_BOTH = ["the", "of", "and", "to", "in", "it", "is", "was", "for", "on"]


def text(kind: list[str], seed: int) -> str:
    pick = random.Random(seed)
    return " ".join(pick.choices(kind + _BOTH, k=pick.randint(50, 90))) + "."


@pytest.fixture
def corpus(tmp_path):
    """200 documents of two sources; every fourth of `web` is about the law, all of `kitchen` is about food."""
    folder, parts = tmp_path / "data/corpus", []
    folder.mkdir(parents=True)
    for source in ("kitchen", "web"):
        rows = []
        for number in range(100):
            kind = _LAW if source == "web" and number % 4 == 0 else _FOOD
            about = "law" if kind is _LAW else "food"
            identity = document_id("f", f"{source}-{number}", "")
            row = {"id": identity, "url": "", "source": source, "file": "f", "record_id": about}
            rows.append(row | {"language": "en", "text": text(kind, len(rows) + 1000 * len(parts))})
        path = folder / f"{source}-00000.jsonl.gz"
        with jsonl_writer(path) as write:
            for row in rows:
                write(json_line(row))
        size = sum(len(row["text"]) for row in rows)
        parts.append(
            CorpusPart(name=path.name, source=source, documents=100, text_bytes=size, sha256=sha256_file(path))
        )
    funnel = (FunnelStage(name="read", ran="", documents_in=200, documents_out=200),)
    write_json(
        folder / "corpus.json",
        to_dict(CorpusManifest(inputs={"f": "0"}, config_sha256="0", parts=tuple(parts), funnel=funnel)),
    )
    return folder


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "law.jsonl"
    path.write_text("".join(json.dumps({"text": text(_LAW, 5000 + n)}) + "\n" for n in range(20)))
    return path


def test_documents_like_the_target_are_chosen(corpus, target, tmp_path):
    chosen = select(corpus, [target], 25, tmp_path / "out")
    about = [row["record_id"] for _, row in read_documents(tmp_path / "out/corpus")]
    assert len(about) == 25 and about.count("law") >= 24
    assert chosen.weights.get("web", 0) > 0.9
    kitchen, web = chosen.sources
    assert (kitchen.documents, web.documents, kitchen.chosen + web.chosen) == (100, 100, 25)
    assert web.mean_log_weight > kitchen.mean_log_weight


def test_what_is_written(corpus, target, tmp_path):
    out = tmp_path / "out"
    selection = select(corpus, [target], 25, out)
    rows = list(read_jsonl(out / "importance.jsonl.gz"))
    assert [row["id"] for row in rows] == [row["id"] for _, row in read_documents(corpus)]
    chosen = {row["id"] for row in rows if row["chosen"]}
    assert chosen == {row["id"] for _, row in read_documents(out / "corpus")}
    before = {row["id"]: row for _, row in read_documents(corpus)}
    assert all(before[row["id"]] == row for _, row in read_documents(out / "corpus"))
    manifest = verify_corpus(out / "corpus")
    assert manifest.funnel[-1].name == "dsir" and manifest.funnel[-1].dropped == {"dsir.not_chosen": 175}
    assert sum(part.documents for part in manifest.parts) == 25 and manifest.inputs == {"f": "0"}
    assert manifest.config_sha256 != load_corpus(corpus).config_sha256
    assert json.loads((out / "dsir.json").read_text())["target"] == {str(target): sha256_file(target)}
    assert selection.chosen == 25 and sorted(p.name for p in out.iterdir()) == [
        "corpus",
        "dsir.json",
        "importance.jsonl.gz",
    ]


def test_the_chosen_have_their_lineage(tmp_path, crawl):
    """A page of a build is traced in, and purged from, what was chosen of it."""
    data, out = tmp_path / "data", tmp_path / "chosen"
    manifest = build_corpus([Input(location=str(path)) for path in crawl], data / "corpus")
    kept = [row["id"] for _, row in read_documents(data / "corpus")]
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("country work and music of the night\n")
    select(data / "corpus", [wanted], len(kept) - 1, out, DsirRules(min_words=1))
    verify_corpus(out / "corpus")
    chosen = [row["id"] for _, row in read_documents(out / "corpus")]
    assert len(chosen) == len(kept) - 1 and len(manifest.parts) == 2
    for one in kept:
        rows = find(out, doc=one)
        assert [row["id"] for row in rows] == [one] * (one in chosen)
        for row in rows:
            assert list(read_jsonl(out / "corpus" / row["part"]))[row["row"]]["id"] == one
    assert purge(out, PurgeRequest(doc=chosen[0])).proof
    assert [row["id"] for _, row in read_documents(out / "corpus")] == chosen[1:]


def test_the_same_seed_chooses_the_same_and_another_one_others(corpus, target, tmp_path):
    def chosen(name, **rules):
        select(corpus, [target], 50, tmp_path / name, DsirRules(**rules))
        return [row["id"] for _, row in read_documents(tmp_path / name / "corpus")]

    assert chosen("one") == chosen("two") != chosen("three", seed=5)


def test_weights_are_those_of_the_paper():
    """Counted word by word in plain Python: sum of log p_target - log p_raw over unigrams and bigrams."""
    rules = DsirRules(buckets=50, smoothing=0.5, min_words=0)
    raw = {"a": "Yes, yes! No?", "b": "the law the law", "c": ""}
    target = "the law of the land"

    def bag(document: str) -> Counter:
        words = [zlib.crc32(w.encode()) for w in re.findall(r"\w+|[^\w\s]+", document.lower())]
        pairs = [(a * 0x9E3779B97F4A7C15 + b * 0xBF58476D1CE4E5B9) % 2**64 >> 32 for a, b in itertools.pairwise(words)]
        return Counter(value % 50 for value in words + pairs)

    def log_p(counts: Counter) -> list[float]:
        return [math.log((counts[n] + 0.5) / (sum(counts.values()) + 25)) for n in range(50)]

    whole = sum((bag(document) for document in raw.values()), Counter())
    ratio = np.subtract(log_p(bag(target)), log_p(whole))
    wanted = [sum(count * ratio[n] for n, count in bag(document).items()) for document in raw.values()]
    counts = np.bincount(Features(50)(target), minlength=50)
    found = importance(raw.items(), counts, 1, rules, io.BytesIO())
    assert np.allclose(found.log_weights, wanted) and found.log_weights[2] == 0
    keys = [w + gumbel(rules.seed, identity) for w, identity in zip(wanted, raw, strict=True)]
    assert found.chosen.tolist() == [key == max(keys) for key in keys]


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.integers(0, 5))
def test_order_and_neighbours_do_not_change_a_weight(texts, seed):
    named = [(str(number), one) for number, one in enumerate(texts)]
    shuffled = random.Random(seed).sample(named, len(named))
    target = np.ones(100)
    one = importance(named, target, 1, DsirRules(buckets=100, min_words=0), io.BytesIO())
    other = importance(shuffled, target, 1, DsirRules(buckets=100, min_words=0), io.BytesIO())
    by_name = dict(zip((name for name, _ in shuffled), other.log_weights.tolist(), strict=True))
    assert np.allclose(one.log_weights, [by_name[name] for name, _ in named])


def test_short_documents_are_not_chosen_for_being_short():
    documents = [(str(n), text(_FOOD, n)) for n in range(20)] + [("short", "court"), ("empty", "")]
    target = np.bincount(Features(10_000)(" ".join(text(_LAW, n) for n in range(50))), minlength=10_000)
    for keep in (1, 20):
        chosen = importance(documents, target, keep, DsirRules(), io.BytesIO()).chosen
        assert not chosen[20:].any() and chosen.sum() == keep
    with refused("E-DSIR-KEEP", keep=21, documents=20, min_words=50):
        importance(documents, target, 21, DsirRules(), io.BytesIO())


def test_noise_is_gumbel():
    drawn = np.array([gumbel(1, str(number)) for number in range(20_000)])
    assert drawn.mean() == pytest.approx(0.5772, abs=0.03) and drawn.var() == pytest.approx(math.pi**2 / 6, rel=0.05)


def test_it_samples_in_proportion_to_the_weights():
    """Top 1 with Gumbel noise takes a document as often as its weight says."""
    logs = np.log([0.6, 0.3, 0.1])
    taken = Counter(int(np.argmax(logs + [gumbel(seed, name) for name in "abc"])) for seed in range(4000))
    assert [taken[n] / 4000 for n in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_what_makes_no_sense_is_refused(corpus, target, tmp_path):
    with refused("E-DSIR-KEEP", keep=201, documents=200):
        select(corpus, [target], 201, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty.txt").write_text("\n")
    with refused("E-DSIR-TARGET"):
        select(corpus, [tmp_path / "empty.txt"], 2, tmp_path / "out")
    with refused("E-DSIR-SETTING", name="buckets"):
        select(corpus, [target], 2, tmp_path / "out", DsirRules(buckets=1))
    (tmp_path / "there").mkdir()
    with refused("E-DSIR-EXISTS", path=str(tmp_path / "there")):
        select(corpus, [target], 2, tmp_path / "there")


def test_the_verb_chooses(corpus, target, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    mix.configure_mix(parser)

    def run(*words: object) -> None:
        mix.run_mix(parser.parse_args([str(word) for word in words]), Terminal(json_mode=True))

    with refused("E-DSIR-OPTIONS", missing=["keep"]):
        run(corpus.parent, "--dsir", target, "--out", tmp_path / "out")
    tokenizer = train_bpe((row["text"] for _, row in read_documents(corpus)), 280, tmp_path / "tokenizer.json")
    capsys.readouterr()
    run(corpus.parent, "--dsir", target, "--keep", 150, "--out", tmp_path / "out", "--tokenizer", tokenizer)
    found = json.loads(capsys.readouterr().out)
    assert found["selection"]["chosen"] == 150 and len(list(read_documents(tmp_path / "out/corpus"))) == 150
    assert read_token_manifest(tmp_path / "out/tokens/train").tokens == found["train_tokens"] > 1000
