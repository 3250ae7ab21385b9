import json
import re
import shutil

import pytest
from tests.expect import refused

import ingot.data.build.prepare as module
from ingot.data.build import shards
from ingot.data.build.corpus import json_line, jsonl_writer, write_manifest
from ingot.data.build.prepare import prepare, verify
from ingot.data.build.recipe import load_recipe
from ingot.data.sources.input import Input
from ingot.data.tasks.local import Local
from ingot.schema.corpus import CorpusManifest, CorpusPart, document_id
from ingot.storage import exclusive, sha256_file
from ingot.tokenizer.byte_bpe import train_bpe


def inputs_of(crawl):
    return [Input(location=str(path)) for path in crawl]


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_call_makes_everything_and_the_next_one_nothing(crawl, tmp_path):
    out, fractions = tmp_path / "data", []
    first = prepare(inputs_of(crawl), out, vocab_size=300, progress=lambda f, text: fractions.append(f))
    assert first.fresh
    assert first.train.vocab_size == 300
    assert first.train.tokens > 0 < first.heldout.tokens
    assert fractions == sorted(fractions) and fractions[0] >= 0 and fractions[-1] == 1.0
    before = snapshot(out)
    assert sorted(p.name for p in out.iterdir()) == ["corpus", "tokens"]
    second = prepare(inputs_of(crawl), out, vocab_size=300)
    assert not second.fresh
    assert second.train == first.train
    assert snapshot(out) == before


def test_tokens_are_reproducible(crawl, tmp_path):
    here = prepare(inputs_of(crawl), tmp_path / "here", vocab_size=300)
    with Local(2) as runner:
        there = prepare(inputs_of(crawl), tmp_path / "there", vocab_size=300, runner=runner)
    assert here.train.fingerprint() == there.train.fingerprint()
    one, two = snapshot(tmp_path / "here"), snapshot(tmp_path / "there")
    assert {n: b for n, b in one.items() if "seconds" not in n} == {n: b for n, b in two.items() if "seconds" not in n}


def test_a_tokenizer_is_trained_on_a_share_of_a_large_corpus(tmp_path, monkeypatch):
    parts, read, real = [], [], module.read_part
    for number, source in enumerate(["web"] * 5 + ["other"]):
        name = f"{source}-{number:05d}.jsonl.gz"
        with jsonl_writer(tmp_path / name) as write:
            for row in range(40):
                write(json_line({"id": document_id(name, str(row), ""), "text": f"{number} {row:07}"}))
        sha256 = sha256_file(tmp_path / name)
        parts.append(CorpusPart(name=name, source=source, documents=40, text_bytes=400, sha256=sha256))
    write_manifest(tmp_path, CorpusManifest(inputs={}, config_sha256="", parts=tuple(parts), funnel=()))
    assert len(list(module._training_texts(tmp_path))) == 240
    monkeypatch.setattr(module, "_TRAINING_BYTES", 600)
    monkeypatch.setattr(module, "_READ_TIMES", 2)
    monkeypatch.setattr(module, "read_part", lambda path, sha256: read.append(path.name[:-9]) or real(path, sha256))
    few = list(module._training_texts(tmp_path))
    assert read == ["web-00000", "web-00002", "web-00004", "other-00005"]
    assert 30 <= len(few) <= 90  # 60 of 160
    assert few == list(module._training_texts(tmp_path))


def test_what_is_interrupted_among_the_tokens_goes_on_there(crawl, tmp_path, monkeypatch):
    out, trained, encoded = tmp_path / "data", [], []
    real, real_run = module.train_bpe, shards.run_all
    monkeypatch.setattr(module, "train_bpe", lambda *given: trained.append(1) or real(*given))

    def stop_after_first(tasks, store, *rest):
        encoded.append(sum(not store.finished(task) for task in tasks))
        if len(encoded) > 1:
            return real_run(tasks, store, *rest)
        real_run(tasks[:1], store, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "run_all", stop_after_first)
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs_of(crawl), out, vocab_size=300)
    prepare(inputs_of(crawl), out, vocab_size=300)
    assert trained == [1]
    assert encoded[:2] == [2, 1]
    prepare(inputs_of(crawl), tmp_path / "fresh", vocab_size=300)
    assert {n: b for n, b in snapshot(out).items() if "seconds" not in n} == {
        n: b for n, b in snapshot(tmp_path / "fresh").items() if "seconds" not in n
    }


def test_finished_tokens_are_never_pulled_away_from_under_a_run(crawl, tmp_path):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    before = snapshot(out)
    for change in (
        {"recipe": load_recipe(None, ["quality.c4.enabled=false"])},
        {"vocab_size": 310},
        {"seed": 5},
    ):
        with refused("E-TOKENS-FINISHED"):
            prepare(inputs_of(crawl), out, **({"vocab_size": 300} | change))
        assert snapshot(out) == before


def test_a_given_tokenizer_is_used(crawl, tmp_path):
    trained = prepare(inputs_of(crawl), tmp_path / "a", vocab_size=300).tokenizer
    again = prepare(inputs_of(crawl), tmp_path / "b", tokenizer=trained)
    assert again.tokenizer.read_bytes() == trained.read_bytes()
    assert trained.exists()


def test_verify_finds_folders_and_damage(crawl, tmp_path):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    assert [one.kind for one in verify(out)] == ["corpus", "tokens", "tokens"]
    assert [one.kind for one in verify(out / "corpus")] == ["corpus"]
    assert [one.kind for one in verify(out / "tokens" / "train")] == ["tokens"]
    shard = next((out / "tokens" / "train").glob("*.tokens"))
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with refused("E-SHARD-HASH", path=str(shard), block=0):
        verify(out)
    with refused("E-DATA-FOLDER", path=str(tmp_path / "absent")):
        verify(tmp_path / "absent")


def test_a_truncated_file_is_named_with_its_offset(crawl, tmp_path):
    crawl[1].write_bytes(crawl[1].read_bytes()[:-40])
    for _ in range(2):  # a finished folder repeats the warning
        prepared = prepare(inputs_of(crawl), tmp_path / "data", vocab_size=300)
        assert len(prepared.warnings) == 1
        assert re.fullmatch(r"crawl-1.warc.gz is cut at offset \d+; its whole records were kept", prepared.warnings[0])


@pytest.mark.parametrize(
    ("options", "code", "facts"),
    [
        ({"tokenizer": "nope.json"}, "E-TOKENIZER-UNREADABLE", {}),
        ({"tokenizer": "t.json", "eot": "<none>"}, "E-TOKENIZER-EOT", {"eot": "<none>"}),
        ({"eot": "x"}, "E-EOT-ALONE", {"eot": "x"}),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_before_the_corpus_is_built(crawl, tmp_path, options, code, facts):
    train_bpe(["the cat sat on the mat " * 30], 270, tmp_path / "t.json")
    if "tokenizer" in options:
        options = options | {"tokenizer": tmp_path / options["tokenizer"]}
        facts = facts | {"path": str(options["tokenizer"])}
    with refused(code, **facts):
        prepare(inputs_of(crawl), tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_verify_reports_the_damage_of_corpus_and_tokens_at_once(crawl, tmp_path):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    gone = [*(out / "corpus").glob("web-*"), *(out / "tokens").rglob("*.tokens")]
    assert len(gone) >= 4
    for path in gone:
        path.unlink()
    with refused("E-DATA-DAMAGED", places=len(gone)) as error:
        verify(out)
    missing = {"corpus": "E-CORPUS-FILE-MISSING", "tokens": "E-SHARD-MISSING"}
    assert {(place["code"], place["path"]) for place in error.value.facts["damage"]} == {
        (missing[path.relative_to(out).parts[0]], str(path)) for path in gone
    }


@pytest.mark.parametrize("name", ["tokens/tokenizer.json", "corpus/corpus.json"])
def test_verify_knows_what_the_tokens_were_made_with(crawl, tmp_path, name):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    (out / name).write_text((out / name).read_text() + " ")
    with refused("E-DATA-DAMAGED", places=2, codes=["E-TOKENS-ORIGIN"]) as error:  # one error for both token folders
        verify(out)
    assert [place["path"] for place in error.value.facts["damage"]] == [str(out / name)] * 2
    with refused("E-TOKENS-ORIGIN", path=str(out / name)):
        verify(out / "tokens" / "heldout")


def test_a_damaged_corpus_can_be_built_again_under_its_tokens(crawl, tmp_path):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    before = snapshot(out)
    part = next((out / "corpus").glob("web-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with refused("E-CORPUS-FILE-DAMAGED", path=str(part)) as error:
        prepare(inputs_of(crawl), out, vocab_size=300)
    assert error.value.fix.startswith("remove the corpus folder")
    shutil.rmtree(out / "corpus")
    prepare(inputs_of(crawl), out, vocab_size=300)
    assert {name: data for name, data in snapshot(out).items() if "seconds" not in name} == {
        name: data for name, data in before.items() if "seconds" not in name
    }


def test_two_at_once_in_one_folder_are_refused(crawl, tmp_path):
    out = tmp_path / "data"
    prepare(inputs_of(crawl), out, vocab_size=300)
    before = snapshot(out)
    with exclusive(out, "testing"), refused("E-FOLDER-BUSY", folder=str(out)):
        prepare(inputs_of(crawl), out, vocab_size=300)
    assert snapshot(out) == before


def test_lineage_from_tokens_to_corpus(crawl, tmp_path):
    out = tmp_path / "data"
    prepared = prepare(inputs_of(crawl), out, vocab_size=300)
    assert prepared.train.corpus_sha256 == sha256_file(out / "corpus" / "corpus.json")
    assert json.loads((out / "corpus" / "corpus.json").read_text())["inputs"] == prepared.corpus.inputs
