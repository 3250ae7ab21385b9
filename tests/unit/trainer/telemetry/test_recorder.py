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

from ingot.schema.metric_files import TableWriter, lineage_folder, read_lineages, read_segments
from ingot.schema.metrics import last_value, newest_rows, read_series
from ingot.trainer.telemetry import recorder
from ingot.trainer.telemetry.recorder import QUEUE_ROWS, LineageKey, Recorder, next_lineage

WAIT = "perf/wait_seconds"
USUAL = {
    "rank": 0,
    "ranks": 1,
    "lineage": LineageKey(1, 1, 1),
    "attempt": 0,
    "names": [WAIT],
    "run_names": ["train/loss"],
    "extra_names": {},
    "line_steps": 1,
    "keep_steps": 0,
}


@pytest.fixture
def log():
    return []


@pytest.fixture
def start(tmp_path, monkeypatch, log):
    """start() -> a recorder of rank 0 in tmp_path/metrics that writes all the time, and whose events are in `log`."""
    monkeypatch.setattr(recorder, "_FLUSH_SECONDS", 0.002)
    started = []

    def make(**facts) -> Recorder:
        one = Recorder(tmp_path / "metrics", **USUAL | facts, log=lambda kind, **values: log.append((kind, values)))
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
    one = Recorder(metrics, **USUAL | {"run_names": []}, log=print)
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


def test_a_line_may_add_to_the_last_step(start, tmp_path):
    """The row of a step without a line waits for it until the next step."""
    one = start(names=[WAIT, "memory/peak_bytes"])
    one.step(1, {WAIT: 1.0}, is_open=True)
    one.step(2, {WAIT: 2.0}, is_open=True)
    one.amend({WAIT: 2.5, "memory/peak_bytes": 7.0})
    one.went_back(2)
    one.step(2, {WAIT: 3.0}, is_open=True)
    one.close()
    found = read_series(tmp_path / "metrics", 0, WAIT)
    assert [(s.valid, s.first.tolist(), s.mean.tolist()) for s in found] == [
        (True, [1], [1.0]),
        (False, [2], [2.5]),
        (True, [2], [3.0]),
    ]
    assert last_value(tmp_path / "metrics", 0, "memory/peak_bytes", 9) is None  # of a void step


def test_two_attempts_that_are_alive_at_once_write_two_lineages(start, tmp_path):
    """The first one lost its lease and has not noticed: it goes back, and begins a lineage like the second one's."""
    metrics, names = tmp_path / "metrics", {"run_names": []}
    first = start(lineage=next_lineage(metrics, 4, 1), **names)
    for step in range(1, 7):
        first.step(step, {WAIT: 1.0})
    until(lambda: steps_of(metrics))
    second = start(lineage=next_lineage(metrics, 5, 5), **names)
    first.went_back(5)
    for step in range(5, 9):
        first.step(step, {WAIT: 1.0})
        second.step(step, {WAIT: 2.0})
    first.close()
    second.close()
    lineages = [(one.epoch, one.number, one.first_step) for one in read_lineages(metrics)]
    assert lineages == [(4, 1, 1), (4, 2, 5), (5, 2, 5)]
    found = [one for one in read_series(metrics, 0, WAIT) if one.valid]
    assert [(one.first.tolist(), set(one.mean.tolist())) for one in found] == [
        ([1, 2, 3, 4], {1.0}),
        ([5, 6, 7, 8], {2.0}),
    ]


def test_folders_without_an_epoch_are_the_oldest(tmp_path):
    for number, epoch in ((7, 0), (1, 3)):
        lineage_folder(tmp_path, number, 1, epoch).mkdir()
    assert [one.number for one in read_lineages(tmp_path)] == [7, 1]
    assert next_lineage(tmp_path, 2, 40) == (3, 2, 40)  # the record of leases was lost
    assert next_lineage(tmp_path / "none", 2, 1) == (2, 1, 1)


def test_a_start_lists_one_folder_and_thins_later(start, tmp_path, monkeypatch):
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    for number in range(1, 31):
        writer = TableWriter(lineage_folder(metrics, number, 1, 1) / "rank-00000", [WAIT], {"line_steps": 1})
        for step in range(1, 21):
            writer.add(step, 1.0, {WAIT: 1.0})
        writer.close()
    listed, plain = [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or plain(path))
    lineage = next_lineage(metrics, 1, 1)
    assert lineage.number == 31 and listed == [metrics]
    monkeypatch.undo()
    monkeypatch.setattr(recorder, "_FLUSH_SECONDS", 0.002)
    monkeypatch.setattr(recorder, "_THIN_SECONDS", 0.0)
    one = start(lineage=lineage, keep_steps=100, run_names=[])
    one.step(1, {WAIT: 1.0})

    def whole():
        found = read_lineages(metrics)[:30]
        return [bool(read_segments(lineage.table(0))[0]) for lineage in found]

    until(lambda: whole() == [False] * 25 + [True] * 5)


def test_numbers_that_few_steps_have_are_a_table_of_their_own(start, tmp_path):
    one = start(extra_names={"sources": ["data/web/loss", "data/code/loss"], "layers": [], "checks": []})
    for step in range(10, 2001, 10):
        one.extra("sources", step, {"data/web/loss": step / 7} | ({"data/code/loss": 1.0} if step % 20 else {}))
    one.extra("sources", 2000, {"data/web/loss": 0.0})  # a second one of this step
    one.extra("layers", 2000, {"layers/0/grad_norm": 0.0})  # on another rank than the first
    one.step(2000, {WAIT: 0.5})
    one.close()
    metrics = tmp_path / "metrics"
    (series,) = read_series(metrics, None, "data/web/loss", points=200)
    assert series.first.tolist() == list(range(10, 2001, 10)) and series.mean[-1] == 2000 / 7
    assert last_value(metrics, None, "data/web/loss", 1999) == 1990 / 7
    assert newest_rows(metrics)[0].values == {WAIT: 0.5, "data/web/loss": 2000 / 7, "data/code/loss": 1.0}
