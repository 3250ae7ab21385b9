"""The exposure of a run to a document equals the result of tracing its steps one by one."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.checkpoints import write_checkpoint
from tests.expect import refused

from ingot.cli.terminal import Terminal
from ingot.config import to_toml
from ingot.data.lineage.purge.history import read_purges
from ingot.data.lineage.purge.purge import purge
from ingot.data.lineage.purge.request import PurgeRequest
from ingot.report.lineage.exposure import exposure, runs_on, uses
from ingot.report.lineage.trace import purges_of, trace_documents, trace_step
from ingot.schema.arch import Arch
from ingot.schema.checkpoint import segments_of
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_atomic, write_json
from ingot.trainer.loader.ledger import write_segment
from ingot.trainer.loader.order import Order
from ingot.trainer.resilience.lock import RunLock

BATCH, SEQ_LEN, STEPS, SEED = 4, 32, 30, 7


@pytest.fixture
def run(data):
    """A run beside the data, with checkpoints at steps 10 and 20 of 30."""
    arch = Arch(
        vocab_size=300, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, d_ffn=16, max_seq_len=SEQ_LEN
    )
    config = RunConfig(
        name="demo", model=arch, seed=SEED, data=Data(tokens="../../data/tokens/train"),
        train=Train(steps=STEPS, seq_len=SEQ_LEN, global_batch=BATCH, micro_batch=2),
    )  # fmt: skip
    folder = data.parent / "runs" / "demo"
    write_atomic(folder / "run.toml", to_toml(config))
    for step in (10, 20):
        save(folder, step)
    return folder


def save(run, step, first=1, earlier=()):
    """A checkpoint whose ledger says that the order was followed from `first` on."""
    manifest = read_token_manifest(run.parents[1] / "data/tokens/train")
    order = Order(manifest, SEQ_LEN, SEED)
    ids = np.stack([order.step(one, BATCH) for one in range(first, step + 1)])
    segment = write_segment(RunFolder(run).ledger, first, step, ids)
    ledger = (*segments_of(earlier), segment)
    write_checkpoint(RunFolder(run), step, data_fingerprint=manifest.fingerprint(), ledger=ledger)


def kept(folders):
    return [record["id"] for record in folders.crawl() if not record["drop"]]


def traced(run):
    """Document -> (step, sample) of its uses, by tracing every step."""
    found = {}
    for step in range(1, STEPS + 1):
        for one in trace_step(run, step):
            found.setdefault(one.document_id, []).append((step, one.sample))
    return found


def test_a_run_saw_what_tracing_every_step_finds(data, run, folders):
    expected = traced(run)
    assert len(expected) > 10
    for document in kept(folders)[::3]:
        found = [document]
        used = uses(run, found)
        assert [(use.step, use.sample) for use in used] == expected.get(document, [])
        assert all(use.to_come == (use.step > 20) and use.document == document for use in used)
        seen = exposure(run, found)
        steps = [step for step, _ in expected.get(document, []) if step <= 20]
        assert (seen.first_step, seen.last_step) == (min(steps, default=0), max(steps, default=0))
        assert seen.checkpoints == tuple(s for s in (10, 20) if steps and s >= min(steps))
        assert (seen.trained_steps, seen.unknown_steps, seen.training_now) == (20, 0, False)


def goes_on(run, data, step, before, save_at):
    """The run accepts the tokens that are there now after `step`, and is saved at `save_at`."""
    now = read_token_manifest(data / "tokens/train").fingerprint()
    accepted = RunFolder(run).accepted
    records = json.loads(accepted.read_text()) if accepted.exists() else []
    write_json(accepted, [*records, {"step": step, "changes": {"data.tokens": [before[:12], now[:12]]}}])
    newest = RunFolder(run).checkpoint(step) / "manifest.json"
    save(run, save_at, first=step + 1, earlier=json.loads(newest.read_text())["ledger"])


def test_steps_before_a_purge_can_still_be_traced(data, run, folders):
    """Twice the run goes on with what a purge left: every step is traced_before as it was, but for what is gone."""
    traced_before = {step: trace_step(run, step) for step in range(1, 21)}
    used = sorted({one.document_id for step in traced_before for one in traced_before[step]})
    gone, gone_later, stays = used[0], used[1], used[2]
    seen = exposure(run, [stays])
    fingerprint = read_token_manifest(data / "tokens/train").fingerprint()
    purge(data, PurgeRequest(doc=gone))
    assert exposure(run, [stays]) == seen
    goes_on(run, data, 20, fingerprint, 25)
    traced_before |= {step: trace_step(run, step) for step in range(21, 26)}
    before = exposure(run, [gone_later])
    fingerprint = read_token_manifest(data / "tokens/train").fingerprint()
    outcome = purge(data, PurgeRequest(doc=gone_later), find_runs=lambda ids: [vars(exposure(run, ids))])
    assert outcome.runs[0] == vars(before) and before.trained_steps == 25 and before.unknown_steps == 0
    goes_on(run, data, 25, fingerprint, 30)
    for step, documents in traced_before.items():
        for was, now in zip(documents, trace_step(run, step), strict=True):
            if was.document_id in (gone, gone_later):
                was = replace(was, document_id="0" * 32, url="(purged)", file="", record_id="")
            assert was == now
    expected = [(s, one.sample) for s in traced_before for one in traced_before[s] if one.document_id == stays]
    assert [(use.step, use.sample) for use in uses(run, [stays]) if use.step <= 25] == expected
    assert trace_step(run, 28)[0].in_ledger


def test_steps_on_tokens_that_are_not_known_count_as_seen(data, run, folders):
    document = kept(folders)[0]
    purge(data, PurgeRequest(doc=kept(folders)[1]))
    shutil.rmtree(data / "purges")
    seen = exposure(run, [document])
    assert (seen.unknown_steps, seen.samples, seen.checkpoints) == (20, 0, (10, 20))
    with refused("E-STEP-TOKENS-GONE", step=5):
        trace_step(run, 5)


def test_a_run_that_is_at_work_is_reported(data, run, folders):
    with RunLock(RunFolder(run).lock):
        assert exposure(run, kept(folders)[:1]).training_now
    assert not exposure(run, kept(folders)[:1]).training_now


def test_runs_beside_the_data_are_found(data, run, tmp_path):
    other = tmp_path / "runs" / "other"
    write_atomic(other / "run.toml", (run / "run.toml").read_text().replace("data/tokens", "elsewhere/tokens"))
    write_atomic(tmp_path / "broken" / "run.toml", "x = ")
    assert [found.resolve() for found in runs_on(data)] == [run.resolve()]
    assert len(runs_on(data, [run])) == 1
    with refused("E-RUN-FOLDER", run=str(tmp_path)):
        runs_on(data, [tmp_path])


def test_a_history_is_complete(data, run, folders):
    used = traced(run)
    record = next(r for r in folders.crawl() if r["id"] in used)
    (history,) = trace_documents(data, doc=record["id"][:8], run=run)
    assert history.row["record_id"] == record["record_id"] and history.row["file"] == record["file"]
    assert history.place is not None and history.place.id == record["id"]
    assert [(use.step, use.sample) for use in history.uses] == used[record["id"]]
    dropped = next(record for record in folders.crawl() if record["drop"])
    (history,) = trace_documents(data, url=dropped["url"].upper().replace("HTTPS", "https").replace("/P/", "/p/"))
    assert (history.row["rule"], history.row["value"], history.place) == (*dropped["drop"][1:], None)
    below = trace_documents(data, url="https://a.example/p/", limit=100)
    assert {one.row["id"] for one in below} == {r["id"] for r in folders.crawl() if "//a.example/p/" in r["url"]}
    assert len(trace_documents(data, url="https://a.example/", limit=3)) == 3


def test_lineage_beside_the_shards_is_enough(data, run):
    traced_before = trace_step(run, 3)
    (data / "corpus" / "corpus.json").unlink()
    assert trace_step(run, 3) == traced_before
    for path in (data / "tokens/train").glob("*.lineage.parquet"):
        path.write_bytes(path.read_bytes() + b" ")
    with refused("E-LINEAGE-HASH"):
        trace_step(run, 3)


def test_the_verbs(data, run, folders, capsys, tmp_path):
    import argparse

    from ingot.cli.data.purge import configure_purge, run_purge
    from ingot.cli.data.trace import configure_trace, run_trace

    purge_verb, trace_verb = (configure_purge, run_purge), (configure_trace, run_trace)

    def call(verb, *words, json_mode=True):
        parser = argparse.ArgumentParser()
        configure, run = verb
        configure(parser)
        run(parser.parse_args(words), Terminal(json_mode=json_mode))
        out = capsys.readouterr().out
        return json.loads(out) if json_mode else out

    record = next(r for r in folders.crawl() if not r["drop"] and trace_documents(data, doc=r["id"], run=run)[0].uses)
    text = call(trace_verb, "--doc", record["id"], "--run", str(run), json_mode=False)
    assert record["url"] in text and "checkpoints of steps" in text
    answer = call(trace_verb, "--url", record["url"], "--data", str(data))
    assert answer["documents"][0]["place"]["shard"] and answer["documents"][0]["run"] is None
    dry = call(purge_verb, str(data), "--doc", record["id"], "--dry-run")
    assert dry["record"] is None and dry["runs"][0]["checkpoints"]
    text = call(purge_verb, str(data), "--doc", record["id"], "--reason", "asked", json_mode=False)
    assert "no purged document is left" in text and "--accept-change data.tokens" in text
    assert read_purges(data)[0]["runs"] == dry["runs"]
    answer = call(trace_verb, "--doc", record["id"], "--data", str(data))
    assert answer["documents"] == [] and answer["purges"][0]["reason"] == "asked"
    assert purges_of(data, url=record["url"] + "#x") == read_purges(data)
    with refused("E-RECORD-NOT-FOUND"):
        call(trace_verb, "--doc", "0" * 32, "--data", str(data))
    with refused("E-TRACE-NO-RUN"):
        call(trace_verb, "--step", "3")
    text = call(purge_verb, str(data), "--doc", record["id"], json_mode=False)
    assert "nothing is left to remove since" in text and "scanned" in text
    with refused("E-PURGE-NOTHING"):
        call(purge_verb, str(data), "--doc", "0" * 32, json_mode=False)


def test_a_page_cannot_write_on_the_terminal():
    from ingot.value_names import printable

    assert printable("a\x1b[2Jb\r\u202ec\ud800\td\n") == "a\ufffd[2Jb\ufffd\ufffdc\ufffd\td\n"
