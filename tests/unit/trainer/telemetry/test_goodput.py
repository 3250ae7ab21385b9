import pytest

import ingot.schema.metrics
from ingot.events import EventLog, read_events
from ingot.schema import events
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.trainer.telemetry.goodput import Goodput

STEP = "perf/step_seconds"


def attempt(metrics, number, first, last, seconds):
    metrics.mkdir(exist_ok=True)
    writer = TableWriter(lineage_folder(metrics, number, first) / "rank-00000", [STEP], {"line_steps": 1})
    for step in range(first, last + 1):
        writer.add(step, 0.0, {STEP: seconds})
    writer.close()


def test_steps_that_count_over_all_time(tmp_path):
    """The first attempt trained 2,000 steps of 2 s, of which the second one trained 500 again."""
    metrics, log = tmp_path / "metrics", EventLog(tmp_path / "events.jsonl")
    log.write(events.RUN_STARTED)
    (began,) = [event["time"] for event in read_events(log.path)]
    attempt(metrics, 1, 1, 2000, 2.0)
    attempt(metrics, 2, 1501, 1800, 1.0)
    goodput = Goodput(metrics, log.path, 1801, began + 8000)
    assert goodput.share(began + 8000) == pytest.approx((1500 * 2.0 + 300 * 1.0) / 8000)
    goodput.add(1810, 15.0)
    goodput.add(1820, 25.0)
    assert goodput.share(began + 8100) == pytest.approx((3300 + 40) / 8100)
    goodput.went_back(1810)
    assert goodput.share(began + 8100) == pytest.approx((3300 + 15) / 8100)
    goodput.went_back(1000)  # before this attempt
    assert goodput.share(began + 8100) == pytest.approx(2000 / 8100)
    assert goodput.share(began - 5) is None


def test_a_new_run_has_none_yet(tmp_path):
    goodput = Goodput(tmp_path / "metrics", tmp_path / "events.jsonl", 1, 100.0)
    goodput.add(10, 5.0)
    assert goodput.share(110.0) == 0.5


def test_a_restart_reads_the_last_line_and_not_all_steps(tmp_path, monkeypatch):
    """30 attempts, each from step 11 on; the line at step 10 counted what their steps follow."""
    metrics, names = tmp_path / "metrics", ["run/trained_seconds"]
    metrics.mkdir()
    for number in range(1, 31):
        first = 1 if number == 1 else 11
        writer = TableWriter(lineage_folder(metrics, number, first, number) / "run", names, {"line_steps": 5})
        for step in range(first, 41):
            writer.add(step, 0.0, {"run/trained_seconds": 2.0 * step} if step % 5 == 0 else {})
        writer.close()
    read, plain = [], ingot.schema.metrics.read_segments
    monkeypatch.setattr(ingot.schema.metrics, "read_segments", lambda table: read.append(table) or plain(table))
    goodput = Goodput(metrics, tmp_path / "events.jsonl", 11, 100.0)
    assert (goodput.trained_seconds, len(read)) == (20.0, 1)
    assert Goodput(metrics, tmp_path / "events.jsonl", 38, 100.0).trained_seconds == 70.0
