"""The sink for Prometheus: its port, its textfile, its labels, and the scrape that its end waits for."""

import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.observe.sinks.prometheus import PrometheusSink
from ingot.plugins.sink import SinkPlace
from ingot.plugins.sink_options import PrometheusOptions
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

from .planted import PlantedRun, free_port, write_ranks

parser = pytest.importorskip("prometheus_client.parser", reason="pip install -c constraints.txt '.[prometheus]'")


def sink(root: Path, **options) -> PrometheusSink:
    made = PrometheusSink(SinkPlace(run=root, own=root), PrometheusOptions(address="127.0.0.1", **options))
    limits = {"alerts.mfu_least": 0.35, "alerts.budget_usd": 0.0}
    made.open("x-1", 2, {"name": "x", "train.steps": 10, "data.weights.web": 3.0, "data.weights.code": 1.0, **limits})
    now = time.time()
    for rank in range(8):
        made.event(events.RANK_STARTED, None, {"time": now, "rank": rank, "host": f"node{rank // 4}"})
    made.event(events.RUN_STARTED, None, {"time": now, "world_size": 8})
    made.scalars(
        3, 48, {"train/loss": float("nan"), "eval/web/bpb": 1.5, "callbacks/own/x": 7.0, "layers/3/grad_norm": 0.5}
    )
    write_ranks(RunFolder(root), 9)  # one of an attempt that had more
    made.event(events.PROGRESS, 3, {"time": now})
    made.event(events.FAULT, 3, {"time": now})
    return made


def samples(text: str) -> dict[tuple, float]:
    """(name, values of labels besides the run's) -> value."""
    found = [own for family in parser.text_string_to_metric_families(text) for own in family.samples]
    assert {(own.labels["run"], own.labels["run_id"]) for own in found} == {("x", "x-1")}
    return {(own.name, *(v for k, v in sorted(own.labels.items()) if "run" not in k)): own.value for own in found}


def test_ranks_sources_callbacks_and_counts_are_scraped(tmp_path):
    made = sink(tmp_path, port=(port := free_port()))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        found = samples(answer.read().decode())
    assert [key[2] for key in found if key[0] == "ingot_rank_info"] == [str(rank) for rank in range(8)]
    assert ("ingot_rank_info", "node1", "7") in found
    for name in ("step_seconds", "wait_seconds", "data_wait_seconds", "computing_seconds", "memory_peak_bytes"):
        assert [found[f"ingot_rank_{name}", str(rank)] for rank in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["ingot_rank_step", "7"] == 3.0 and ("ingot_rank_step", "8") not in found
    assert found["ingot_train_loss",] != found["ingot_train_loss",]
    assert found["ingot_eval_source_bpb", "web"] == 1.5 and found["ingot_callback", "own", "x"] == 7.0
    assert found["ingot_layer_grad_norm", "3"] == 0.5
    assert found["ingot_events_total", "fault"] == 1.0 and found["ingot_events_total", "restart"] == 0.0
    assert (found["ingot_run_attempt",], found["ingot_run_ended",]) == (2.0, 0.0)
    assert found["ingot_limit_mfu_least",] == 0.35 and found["ingot_limit_budget_usd",] == 0.0
    assert ("ingot_limit_goodput_least",) not in found  # of a setting that the run has not
    assert found["ingot_data_source_weight", "web"] == 0.75 and found["ingot_data_source_weight", "code"] == 0.25
    seen = threading.Event()
    closing = threading.Thread(target=lambda: (made.close(30.0), seen.set()))
    made.event(events.FINISHED, 10, {"time": time.time()})
    closing.start()
    assert not seen.wait(0.2)  # the end of the run has to be scraped
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert samples(answer.read().decode())["ingot_run_ended",] == 1.0
    assert seen.wait(20.0)


def test_the_free_space_is_that_of_the_disk_of_the_run(tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize, f_blocks = 3, 4096, 100

    monkeypatch.setattr(os, "statvfs", lambda path: Full if path == tmp_path else None)
    made, free = sink(tmp_path, port=0, textfile="ingot.prom"), ("ingot_disk_free_bytes",)
    deadline = time.monotonic() + 30
    while free not in (found := samples((tmp_path / "ingot.prom").read_text())):
        assert time.monotonic() < deadline  # the disk is asked in a thread
        time.sleep(0.01)
        made._write()
    made.close(30.0)
    assert found[free] == 3 * 4096


def test_a_process_that_begins_in_the_middle_of_an_attempt_has_what_the_rules_need(tmp_path):
    """The counters have neither what was counted before, nor what is old."""
    log = PlantedRun(RunFolder(tmp_path), world_size=8)
    log.start()
    log.write(events.FINISHED, step=2, seconds=1.0)
    log.start()
    log.line(3)
    log.write(events.FAULT, step=3)
    made = PrometheusSink(SinkPlace(run=tmp_path, own=tmp_path), PrometheusOptions(port=0, textfile="ingot.prom"))
    made.open("x-1", 0, {"name": "x", "train.steps": 10})
    for age in (1e6, 901.0, 10.0):
        made.event(events.RESTART, None, {"time": time.time() - age})
    made.event(events.PROGRESS, 1, {"time": time.time() - 3600})  # of before what the log has
    for event in read_events(tmp_path / "events.jsonl", events.FINISHED):  # of the attempt before
        made.event(events.FINISHED, 2, event)
    made.close(30.0)
    found = samples((tmp_path / "ingot.prom").read_text())
    assert found["ingot_run_ended",] == 0.0 and found["ingot_run_progress_timestamp_seconds",] > time.time() - 600
    assert found["ingot_run_step",] == 3.0 and found["ingot_train_bpb",] == 1.0
    assert len([key for key in found if key[0] == "ingot_rank_info"]) == 8
    assert found["ingot_events_total", "restart"] == 1.0 and found["ingot_events_total", "fault"] == 0.0


def test_a_textfile_that_cannot_be_written_counts_no_event_twice(tmp_path):
    made = sink(tmp_path, port=0, textfile="ingot.prom")
    (tmp_path / "ingot.prom").unlink()
    (tmp_path / "ingot.prom").mkdir()
    made._written_at = float("-inf")
    with pytest.raises(OSError):
        made.event(events.FAULT, 3, {"time": time.time()})
    (tmp_path / "ingot.prom").rmdir()
    made.event(events.FAULT, 3, {"time": time.time()})
    made.close(30.0)
    assert samples((tmp_path / "ingot.prom").read_text())["ingot_events_total", "fault"] == 2.0


def test_the_textfile_has_the_same_metrics(tmp_path):
    made = sink(tmp_path, port=0, textfile="ingot.prom")
    made.event(events.STOPPED, 3, {"time": time.time()})
    made.close(30.0)
    found = samples((tmp_path / "ingot.prom").read_text())
    assert found["ingot_run_ended",] == 1.0 and found["ingot_events_total", "fault"] == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ingot.prom", "metrics"]
