"""From a corpus to shards: whole, shuffled, split for good, the same on any number of workers."""

import fcntl
import gzip
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.expect import refused

from ingot.config import to_dict
from ingot.data.build import shards as module
from ingot.data.build import tokenize
from ingot.data.build.corpus import load_corpus
from ingot.data.build.shards import build_shards
from ingot.data.lineage.records import read_lineage
from ingot.data.lineage.verify import verify_tokens
from ingot.data.tasks.local import Local
from ingot.schema.corpus import CorpusManifest, CorpusPart, document_id
from ingot.schema.tokens import DOCUMENT_DTYPE, read_token_manifest
from ingot.storage import sha256_file, write_json
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder

WORDS = ["the", "shop", "sells", "bread", "and", "thé", "while", "rain", "falls", "on", "seven", "roofs"]


def text_of(source, number):
    rng = np.random.default_rng([number, len(source)])
    return f"{source} {number}: " + " ".join(rng.choice(WORDS, rng.integers(5, 60))) + "\n"


def write_corpus(folder, documents):
    """`documents`: source -> how many. Returns (folder, id -> text)."""
    folder.mkdir(parents=True)
    parts, texts = [], {}
    for source, count in documents.items():
        name = f"part-{len(parts)}.jsonl.gz"
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            for number in range(count):
                identity, text = document_id(source, str(number), "u"), text_of(source, number)
                texts[identity] = text
                row = {"id": identity, "url": f"https://{source}.example/{number}", "source": source, "text": text}
                file.write(json.dumps(row | {"file": source, "record_id": str(number), "language": "en"}) + "\n")
        size = sum(len(text_of(source, n).encode()) for n in range(count))
        sha256 = sha256_file(folder / name)
        parts.append(CorpusPart(name=name, source=source, documents=count, text_bytes=size, sha256=sha256))
    write_json(
        folder / "corpus.json", to_dict(CorpusManifest(inputs={}, config_sha256="", parts=tuple(parts), funnel=()))
    )
    return folder, texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_bpe([text_of("web", n) for n in range(50)], 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return load_encoder(tokenizer)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", {"web": 300, "books": 40})


@pytest.fixture
def build(encoder, tokenizer, tmp_path):
    def run(corpus, out="tokens", **options):
        options = {"tokenizer": tokenizer, "seed": 3, "shard_bytes": 8192, "block_bytes": 4096} | options
        return build_shards(corpus, encoder, tmp_path / out, **options)

    return run


def documents_in(folder, encoder):
    """id -> text, read back through the document index, which the lineage repeats."""
    manifest, found = read_token_manifest(folder), {}
    for shard in manifest.shards:
        tokens = np.fromfile(folder / f"{shard.name}.tokens", f"<{manifest.dtype[0]}{int(manifest.dtype[4:]) // 8}")
        index = np.fromfile(folder / f"{shard.name}.documents", DOCUMENT_DTYPE)
        for start, length, identity in index:
            assert tokens[start + length - 1] == manifest.eot_id
            found[bytes(identity).hex()] = encoder.decode(tokens[start : start + length - 1])
        rows = read_lineage(folder / f"{shard.name}.lineage.parquet")
        lineage = [(row["start"], row["tokens"], bytes.fromhex(row["id"])) for row in rows]
        assert lineage == index.tolist()
    return found


def bytes_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_document_is_in_exactly_one_split_and_reads_back(corpus, build, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "_GATHER_DOCUMENTS", 16)  # several batches for each shard
    folder, texts = corpus
    train, heldout = build(folder)
    kept = documents_in(tmp_path / "tokens/train", encoder)
    out = documents_in(tmp_path / "tokens/heldout", encoder)
    assert not kept.keys() & out.keys()
    assert kept | out == texts
    assert (train.split, heldout.split) == ("train", "heldout")
    assert train.text_bytes + heldout.text_bytes == sum(len(t.encode()) for t in texts.values())
    assert set(heldout.sources) == set(train.sources) == {"books", "web"}
    assert len(train.shards) > 3
    assert max(s.tokens for s in train.shards) * 2 <= 8192
    assert all(s.name.startswith(s.source) for s in train.shards)
    assert verify_tokens(tmp_path / "tokens/train").documents == len(kept)
    assert (tmp_path / "tokens/tokenizer.json").exists()
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == ["heldout", "tokenizer.json", "train"]


def test_documents_are_shuffled(corpus, build, encoder, tmp_path):
    folder, _ = corpus
    build(folder)
    order = [text for text in documents_in(tmp_path / "tokens/train", encoder).values() if text.startswith("web")]
    numbers = [int(text.split()[1][:-1]) for text in order]
    assert abs(np.corrcoef(numbers, np.arange(len(numbers)))[0, 1]) < 0.2
    build(folder, out="other", seed=4)
    assert list(documents_in(tmp_path / "other/train", encoder).values()) != order


def test_the_result_does_not_depend_on_the_number_of_workers(corpus, build, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 2000)  # several batches
    folder, _ = corpus
    build(folder, out="one")
    with Local(2) as runner:
        build(folder, out="two", runner=runner)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_a_source_of_many_parts_needs_few_open_files(build, encoder, tmp_path):
    folder, texts = write_corpus(tmp_path / "corpus", {"web": 4})
    parts = list(load_corpus(folder).parts)
    for number in range(1, 60):
        name = f"part-{number}.jsonl.gz"
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            identity = document_id("web", str(number), "many")
            texts[identity] = text_of("web", number)
            file.write(json.dumps({"id": identity, "source": "web", "text": texts[identity]}) + "\n")
        sha256 = sha256_file(folder / name)
        parts.append(CorpusPart(name=name, source="web", documents=1, text_bytes=9, sha256=sha256))
    manifest = CorpusManifest(inputs={}, config_sha256="", parts=tuple(parts), funnel=())
    write_json(folder / "corpus.json", to_dict(manifest))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 30, hard))
    try:
        build(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = documents_in(tmp_path / "tokens/train", encoder) | documents_in(tmp_path / "tokens/heldout", encoder)
    assert found == texts


def test_a_document_keeps_its_split_when_the_corpus_grows(build, encoder, tmp_path):
    small, _ = write_corpus(tmp_path / "small", {"web": 300})
    large, _ = write_corpus(tmp_path / "large", {"web": 600, "books": 9})
    build(small, out="a", heldout_fraction=0.1)
    build(large, out="b", heldout_fraction=0.1)
    first = documents_in(tmp_path / "a/heldout", encoder)
    second = documents_in(tmp_path / "b/heldout", encoder)
    assert abs(len(second) - 0.1 * 609) < 3 * (609 * 0.1 * 0.9) ** 0.5  # three standard deviations
    assert first.keys() == {
        i for i, text in second.items() if text.startswith("web") and int(text.split()[1][:-1]) < 300
    }


def test_building_again_changes_nothing_and_other_options_are_refused(corpus, build, tmp_path):
    folder, _ = corpus
    manifests = build(folder)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert build(folder) == manifests
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    with refused("E-TOKENS-FINISHED", setting="seed", found=3, expected=4):
        build(folder, seed=4)
    with refused("E-TOKENS-FINISHED", setting="heldout_fraction"):
        build(folder, heldout_fraction=0.5)


def test_what_was_never_finished_is_built_again(corpus, build, tmp_path):
    folder, _ = corpus
    build(folder)
    whole = bytes_of(tmp_path / "tokens")
    (tmp_path / "tokens/heldout/manifest.json").unlink()
    (tmp_path / "tokens/.building").mkdir()
    (tmp_path / "tokens/.building/train").mkdir()
    (tmp_path / "tokens/.building/train/web-00000.tokens").write_bytes(b"half")
    build(folder)
    assert bytes_of(tmp_path / "tokens") == whole
    (tmp_path / "tokens/heldout/manifest.json").unlink()
    with refused("E-TOKENS-FINISHED", setting="seed"):  # the other half is finished
        build(folder, seed=4)


def test_nothing_is_left_of_a_build_that_stopped_after_its_last_shard(corpus, build, tmp_path):
    folder, _ = corpus
    build(folder)
    before = bytes_of(tmp_path / "tokens")
    for left in (".building/store", ".removed/store"):
        (tmp_path / "tokens" / left).mkdir(parents=True)
        (tmp_path / "tokens" / left / "driver").touch()
    build(folder)
    assert bytes_of(tmp_path / "tokens") == before
    assert not list((tmp_path / "tokens").glob(".*"))


def test_a_store_that_was_removed_by_half_does_not_count(corpus, build, tmp_path, monkeypatch):
    folder, _ = corpus
    real = shutil.rmtree

    def killed(path, *args, **kwargs):
        if stores := list(path.glob("store")) if path.parent.name == "tokens" else []:
            for facts in stores[0].rglob("done.json"):
                facts.unlink()
            raise KeyboardInterrupt
        real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            build(folder)
    shutil.rmtree(tmp_path / "tokens/train")
    build(folder)
    build(folder, out="fresh")
    assert bytes_of(tmp_path / "tokens") == bytes_of(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("documents", "fine"), [({"web": 1}, False), ({"web": 50, "books": 1}, False), ({"web": 2}, True)]
)
def test_every_source_needs_two_documents(build, tmp_path, documents, fine):
    folder, _ = write_corpus(tmp_path / "corpus", documents)
    if fine:
        assert [sum(s.documents for s in m.shards) for m in build(folder)] == [1, 1]
        return
    with refused("E-SOURCE-SMALL", documents=1):
        build(folder)
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == [".building", "tokenizer.json"]


def test_an_empty_corpus_is_an_error(build, tmp_path):
    with refused("E-CORPUS-EMPTY", path=str(tmp_path / "corpus")):
        build(write_corpus(tmp_path / "corpus", {})[0])


def test_what_is_no_corpus_is_an_error(build, tmp_path):
    with refused("E-CORPUS-MISSING", path=str(tmp_path)):
        build(tmp_path)


def test_a_damaged_corpus_leaves_nothing_half_written(corpus, build, tmp_path):
    folder, _ = corpus
    part = folder / "part-1.jsonl.gz"
    part.write_bytes(part.read_bytes()[:-20])
    with refused("E-CORPUS-HASH", path=str(part)):
        build(folder)
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == [".building", "tokenizer.json"]


def test_dtype_follows_the_vocabulary(corpus, build, encoder, tmp_path, monkeypatch):
    folder, texts = corpus
    assert build(folder)[0].dtype == "uint16"
    train, _ = build(folder, out="wide", dtype="uint32")
    assert train.dtype == "uint32"
    assert len(documents_in(tmp_path / "wide/train", encoder)) + 10 > len(texts) * 0.9
    assert verify_tokens(tmp_path / "wide/train").bytes == 4 * train.tokens
    assert module._dtype("auto", 65_536) == "uint16"
    assert module._dtype("auto", 65_537) == "uint32"
    with refused("E-TOKENS-DTYPE", vocab_size=65_537):
        module._dtype("uint16", 65_537)
    with refused("E-TOKENS-DTYPE", dtype="int8"):
        module._dtype("int8", 100)


@pytest.mark.parametrize(
    "options", [{"heldout_fraction": 0.0}, {"heldout_fraction": 1.0}, {"block_bytes": 1000}, {"shard_bytes": 10}]
)
def test_options_that_make_no_sense_are_refused(corpus, build, options):
    with refused("E-TOKENS-OPTION", option=next(iter(options))):
        build(corpus[0], **options)


def test_a_full_disk_is_noticed_before_anything_is_written(corpus, build, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 10})())
    with refused("E-DISK-SPACE", purpose="tokenizing the corpus", free_bytes=10):
        build(corpus[0])
    assert not (tmp_path / "tokens").exists()


def test_two_builds_at_once_in_one_folder_are_refused(corpus, build, tmp_path):
    (tmp_path / "tokens").mkdir()
    lock = os.open(tmp_path / "tokens", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with refused("E-FOLDER-BUSY", folder=str(tmp_path / "tokens")):
            build(corpus[0])
    finally:
        os.close(lock)


def test_progress_goes_up_to_one(corpus, build):
    seen = []
    build(corpus[0], progress=lambda fraction, text: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
