"""A step is traced to exactly the documents that its tokens came from, or not at all."""

import gzip
import io
import json

import numpy as np
import pytest
from tests.checkpoints import write_checkpoint
from tests.expect import refused

from ingot.config import to_dict, to_toml
from ingot.data.build.shards import build_shards
from ingot.report.lineage.trace import trace_step
from ingot.schema.arch import Arch
from ingot.schema.corpus import CorpusManifest, CorpusPart, document_id
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.storage import sha256_file, write_atomic, write_json
from ingot.tokenizer.byte_bpe import train_bpe
from ingot.tokenizer.encoder import load_encoder
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader

BATCH, SEQ_LEN = 4, 32
COUNTS = {"web": 60, "books": 30}


@pytest.fixture(scope="module")
def texts():
    rng, found = np.random.default_rng(0), {}
    for source, count in COUNTS.items():
        for number in range(count):
            words = rng.choice(["river", "stone", "cloud", "bridge", "lamp"], rng.integers(5, 40))
            identity = document_id(f"{source}.warc", str(number), f"https://{source}/{number}")
            found[identity] = (source, number, " ".join(words))
    return found


@pytest.fixture
def run(tmp_path, texts):
    """A run folder beside OUT/corpus and OUT/tokens, as `data build` and `train` leave them."""
    corpus = tmp_path / "data/corpus"
    corpus.mkdir(parents=True)
    parts = []
    for source, count in COUNTS.items():
        name = f"{source}-00000.jsonl.gz"
        with io.StringIO() as file:
            for identity, (origin, number, text) in texts.items():
                row = {"id": identity, "url": f"https://{source}/{number}", "source": source, "file": f"{source}.warc"}
                if origin == source:
                    file.write(json.dumps(row | {"record_id": str(number), "language": "en", "text": text}) + "\n")
            # Without the time: it would be in the fingerprint of the data, and so in the order of the samples.
            (corpus / name).write_bytes(gzip.compress(file.getvalue().encode(), mtime=0))
        sha256 = sha256_file(corpus / name)
        parts.append(CorpusPart(name=name, source=source, documents=count, text_bytes=1, sha256=sha256))
    manifest = CorpusManifest(inputs={}, config_sha256="", parts=tuple(parts), funnel=())
    write_json(corpus / "corpus.json", to_dict(manifest))
    tokenizer = train_bpe((t for _, _, t in texts.values()), 280, tmp_path / "tokenizer.json")
    build_shards(corpus, load_encoder(tokenizer), tmp_path / "data/tokens", tokenizer=tokenizer, block_bytes=4096)
    arch = Arch(
        vocab_size=280, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ffn=16, max_seq_len=SEQ_LEN
    )
    config = RunConfig(
        name="traced",
        model=arch,
        data=Data(tokens="../data/tokens/train"),
        train=Train(steps=20, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=2),
    )
    write_atomic(tmp_path / "run/run.toml", to_toml(config))
    return tmp_path / "run"


def checkpoint(run, ids, *, fingerprint=""):
    """A checkpoint at step 8 whose ledger says that `ids` were consumed in steps 1..8."""
    manifest = read_token_manifest(run.parent / "data/tokens/train")
    segment = write_segment(RunFolder(run).ledger, 1, 8, ids)
    fingerprint = fingerprint or manifest.fingerprint()
    write_checkpoint(RunFolder(run), 8, data_fingerprint=fingerprint, ledger=(segment,))


def order_of(run):
    return Order(read_token_manifest(run.parent / "data/tokens/train"), SEQ_LEN, 1234)


def test_a_step_is_traced_to_the_text_that_was_trained_on(run, texts):
    encoder = load_encoder(run.parent / "tokenizer.json")
    reader = TokenReader(run.parent / "data/tokens/train", SEQ_LEN)
    for step in (1, 7, 20):
        windows = reader.read(order_of(run).step(step, BATCH))
        traced = trace_step(run, step)
        assert sorted({t.sample for t in traced}) == list(range(BATCH))
        for sample in range(BATCH):
            at = 0
            for part in (t for t in traced if t.sample == sample):
                tokens = windows[sample, at : at + part.tokens_in_sample]
                source, number, text = texts[part.document_id]
                assert encoder.decode(tokens[tokens != encoder.eot_id]) in text
                assert (part.source, part.url) == (source, f"https://{source}/{number}")
                assert (part.file, part.record_id, part.step) == (f"{source}.warc", str(number), step)
                at += part.tokens_in_sample
            assert at == SEQ_LEN + 1


def test_the_ledger_has_to_agree(run):
    ids = order_of(run).samples(0, 8 * BATCH).reshape(8, BATCH)
    checkpoint(run, ids)
    assert trace_step(run, 5)
    assert trace_step(run, 9)  # not yet covered
    wrong = ids.copy()
    wrong[4] = wrong[4][::-1]
    checkpoint(run, wrong)
    assert trace_step(run, 4)
    with refused("E-LEDGER-ORDER", step=5):
        trace_step(run, 5)


def test_tokens_of_another_build_are_refused(run):
    checkpoint(run, np.zeros((8, BATCH), np.int64), fingerprint="other")
    with refused("E-STEP-TOKENS-GONE", step=1):
        trace_step(run, 1)


def without_lineage(run):
    """Tokens as builds made them before there was lineage: a trace has to find the corpus."""
    folder = run.parent / "data/tokens/train"
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        (folder / f"{shard['name']}.lineage.parquet").unlink()
        del shard["lineage_sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_another_corpus_is_refused(run):
    without_lineage(run)
    path = run.parent / "data/corpus/corpus.json"
    path.write_text(path.read_text() + " ")
    with refused("E-CORPUS-OTHER", path=str(path)):
        trace_step(run, 1)


def test_a_missing_corpus_is_named(run):
    without_lineage(run)
    (run.parent / "data/corpus").rename(run.parent / "elsewhere")
    with refused("E-CORPUS-MISSING"):
        trace_step(run, 1)


def test_a_damaged_document_index_is_refused(run):
    paths = list((run.parent / "data/tokens/train").glob("*.documents"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with refused("E-SHARD-HASH") as caught:
        trace_step(run, 1)
    assert caught.value.facts["path"] in map(str, paths)


@pytest.mark.parametrize("step", [0, -1, 21])
def test_a_step_that_the_run_does_not_have_is_refused(run, step):
    with refused("E-STEP-RANGE", step=step):
        trace_step(run, step)


def test_steps_before_a_change_of_the_mixture_are_traced_with_the_old_one(run):
    """The run file has the new weights; what was accepted says since when."""
    manifest = read_token_manifest(run.parent / "data/tokens/train")
    first, then = {"web": 1.0}, {"web": 1.0, "books": 3.0}
    text = (run / "run.toml").read_text()
    write_atomic(run / "run.toml", text + "\n[data.weights]\nweb = 1.0\nbooks = 3.0\n")
    change = {"step": 4, "config_sha256": "", "data_fingerprint": "", "changes": {"data.weights": [first, then]}}
    write_json(RunFolder(run).accepted, [change])
    order = Order(manifest, SEQ_LEN, 1234, then, earlier=[(4 * BATCH, first)])
    checkpoint(run, order.samples(0, 8 * BATCH).reshape(8, BATCH))
    assert {t.source for step in range(1, 5) for t in trace_step(run, step)} == {"web"}
    late = [t for step in range(5, 9) for t in trace_step(run, step)]
    assert {t.source for t in late} == {"web", "books"} and all(t.in_ledger for t in late)
    RunFolder(run).accepted.unlink()
    with refused("E-LEDGER-ORDER", step=2):
        trace_step(run, 2)
