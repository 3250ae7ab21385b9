"""The recorder never slows or ends a step, whatever happens to its queue, its disk, its folder or its process."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ingot.schema.metric_files import TableWriter
from ingot.schema.metrics import newest_rows, read_series
from ingot.trainer.telemetry import recorder
from ingot.trainer.telemetry.recorder import QUEUE_ROWS, Recorder

WAIT = "perf/wait_seconds"


@pytest.fixture
def log():
    return []


@pytest.fixture
def start(tmp_path, monkeypatch, log):
    """start() -> a recorder of rank 0 in tmp_path/metrics that writes all the time, and whose events are in `log`."""
    monkeypatch.setattr(recorder, "_FLUSH_SECONDS", 0.002)
    started = []

    def make(**facts) -> Recorder:
        usual = {"rank": 0, "lineage": 1, "attempt": 0, "first_step": 1, "names": [WAIT], "run_names": ["train/loss"]}
        keep = {"line_steps": 1, "keep_steps": 0}
        one = Recorder(
            tmp_path / "metrics", **usual | keep | facts, log=lambda kind, **values: log.append((kind, values))
        )
        started.append(one)
        return one

    yield make
    for one in started:
        one.close()


def steps_of(metrics: Path) -> list[int]:
    return [int(step) for series in read_series(metrics, 0, WAIT, points=10**6) for step in series.first]


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_all_rows_are_written_and_notes_count_for_the_next_step(start, tmp_path, log):
    one = start(names=[WAIT, "checkpoint/stall_seconds"])
    for step in range(1, 101):
        one.step(step, {WAIT: step / 7})
        if step == 50:
            one.note("checkpoint/stall_seconds", 3.0)
    one.run_steps([(99, {"train/loss": 2.0}), (100, {"train/loss": 1.5})])
    one.close()
    (series,) = read_series(tmp_path / "metrics", 0, WAIT)
    assert np.array_equal(series.mean, np.arange(1, 101) / 7)
    (stall,) = read_series(tmp_path / "metrics", 0, "checkpoint/stall_seconds")
    assert (stall.first.tolist(), stall.mean.tolist()) == ([51], [3.0])
    assert newest_rows(tmp_path / "metrics")[0].values["train/loss"] == 1.5
    assert log == []


def hang(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Let the disk hang. Returns the events that it does, and that it hangs no more."""
    hangs, released, plain = threading.Event(), threading.Event(), TableWriter.flush

    def flush(writer):
        hangs.set()
        released.wait(30)
        plain(writer)

    monkeypatch.setattr(TableWriter, "flush", flush)
    return hangs, released


def test_a_full_queue_drops_rows_and_counts_them(start, tmp_path, log, monkeypatch):
    """The disk hangs for a while: training goes on."""
    hangs, released = hang(monkeypatch)
    one = start()
    one.step(1, {WAIT: 0.0})
    hangs.wait(30)
    for step in range(2, QUEUE_ROWS + 12):
        one.step(step, {WAIT: 0.0})
    assert (one._own.waiting, one._own.dropped, log) == (QUEUE_ROWS, 10, [])
    released.set()
    until(lambda: log)
    one.close()
    (kind, facts) = log[0]
    assert kind == "metrics_lost" and facts["rows"] == 10 and not facts["ended"] and "slower" in facts["reason"]
    assert steps_of(tmp_path / "metrics") == list(range(1, QUEUE_ROWS + 2))


def test_a_disk_that_hangs_does_not_keep_the_run_from_its_end(start, log, monkeypatch):
    hangs, released = hang(monkeypatch)
    monkeypatch.setattr(recorder, "_CLOSE_SECONDS", 0.01)
    one = start()
    one.step(1, {WAIT: 0.0})
    hangs.wait(30)
    one.close()
    assert one._thread.is_alive()
    monkeypatch.setattr(TableWriter, "flush", fails)
    released.set()
    one._thread.join(30)
    assert not one._thread.is_alive() and log == []  # the log of the run may be closed


def fails(writer):
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_record_with_one_event(start, log, monkeypatch):
    one = start()
    one.step(1, {WAIT: 0.0})
    until(lambda: one._own.waiting == 0)
    monkeypatch.setattr(os, "write", lambda fd, data: 1)  # of a nearly full disk: a part
    one.step(2, {WAIT: 0.0})
    until(lambda: log)
    monkeypatch.undo()
    for step in range(3, 2 * QUEUE_ROWS):
        one.step(step, {WAIT: 0.0})
    one.close()
    ((kind, facts),) = log
    assert (kind, facts["rank"], facts["ended"]) == ("metrics_lost", 0, True) and "1 of" in facts["reason"]
    assert one._own.waiting == 0


def test_a_folder_that_is_gone_ends_the_record_with_one_event(start, tmp_path, log):
    one = start()
    one.step(1, {WAIT: 0.0})
    until(lambda: steps_of(tmp_path / "metrics"))
    shutil.rmtree(tmp_path / "metrics")
    one.step(2, {WAIT: 0.0})
    until(lambda: log)
    one.step(3, {WAIT: 0.0})
    one.close()
    ((kind, facts),) = log
    assert kind == "metrics_lost" and facts["ended"] and "removed" in facts["reason"]
    assert not (tmp_path / "metrics").exists()


def test_an_event_that_cannot_be_written_is_a_line(start, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(TableWriter, "flush", fails)
    one = start()
    one._log = fails_to_log
    one.step(1, {WAIT: 0.0})
    one._thread.join(30)
    assert "No space left" in capfd.readouterr().err


def fails_to_log(kind, **facts):
    raise OSError(28, "No space left on device")


def handed_over(metrics: Path, count) -> None:
    one = Recorder(
        metrics,
        rank=0,
        lineage=1,
        attempt=0,
        first_step=1,
        names=[WAIT],
        run_names=[],
        line_steps=1,
        keep_steps=0,
        log=print,
    )
    for step in range(1, 10**6):
        one.step(step, {WAIT: time.monotonic()})
        count.value = step
        time.sleep(0.005)


def test_a_killed_process_loses_the_last_second_at_most(tmp_path):
    context = multiprocessing.get_context("fork")
    count = context.Value("q", 0, lock=False)
    process = context.Process(target=handed_over, args=(tmp_path / "metrics", count))
    process.start()
    until(lambda: newest_rows(tmp_path / "metrics"))
    until(lambda: count.value >= newest_rows(tmp_path / "metrics")[0].step + 50)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    process.join()
    (series,) = read_series(tmp_path / "metrics", 0, WAIT)
    assert series.first.tolist() == list(range(1, len(series.first) + 1)) and len(series.first) < count.value
    assert killed - series.mean[-1] < 1.0
