"""Closed lineages are thinned like the one that is written, whatever a killed process left in them."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from ingot.schema.metric_files import LEVELS, TableWriter, lineage_folder, read_lineages, read_segments
from ingot.schema.metric_thinning import thin_closed, thin_lineages
from ingot.schema.metrics import read_series

LOSS = "train/loss"


def write(metrics, number=1, first=1, last=100, table="run"):
    metrics.mkdir(exist_ok=True)
    writer = TableWriter(lineage_folder(metrics, number, first, epoch=1) / table, [LOSS], {"line_steps": 1})
    for step in range(first, last + 1):
        writer.add(step, float(step), {LOSS: step * 1.5})
    writer.close()
    return lineage_folder(metrics, number, first, epoch=1) / table


def levels_of(table):
    return [len(level) for level in read_segments(table)]


def covered(metrics, first, last):
    """Assert that every step is in the series once, with the values that were written."""
    (found,) = read_series(metrics, None, LOSS, points=10**6)
    assert found.first[0] == first and found.last[-1] == last
    assert np.all(found.first[1:] == found.last[:-1] + 1)
    assert found.mean == pytest.approx((found.first + found.last) / 2 * 1.5)
    assert (found.least.min(), found.most.max()) == (first * 1.5, last * 1.5)
    return (found.last - found.first + 1).tolist()


def test_what_is_not_in_a_bucket_is_added_before_rows_are_removed(tmp_path):
    table = write(tmp_path / "metrics")
    with next(table.glob("0-*")).open("ab") as file:
        file.write(b"torn")
    with next(table.glob("1-*")).open("ab") as file:
        file.write(b"torn")
    assert thin_closed(table, 49, 50) == 100 and levels_of(table) == [1, 1, 0, 0]
    assert thin_closed(table, 50, 50) == 100 and levels_of(table) == [0, 1, 0, 0]
    assert covered(tmp_path / "metrics", 1, 100) == [16] * 6 + [4]
    assert thin_closed(table, 50, 50) == 100  # what was thinned stays as it is
    assert covered(tmp_path / "metrics", 1, 100) == [16] * 6 + [4]
    assert thin_closed(table, 10**9, 50) == 100 and levels_of(table) == [0, 0, 0, 1]
    assert covered(tmp_path / "metrics", 1, 100) == [100]


def test_a_killed_process_wrote_rows_and_not_their_buckets(tmp_path):
    table = write(tmp_path / "metrics")
    (above,) = table.glob("1-*")
    header, _, rows = above.read_bytes().partition(b"\n")
    above.write_bytes(header + b"\n" + rows[: 2 * len(rows) // 6])
    thin_closed(table, 50, 50)
    assert covered(tmp_path / "metrics", 1, 100) == [16] * 6 + [4]


def test_an_interrupted_thinning_loses_and_repeats_nothing(tmp_path, monkeypatch):
    table = write(tmp_path / "metrics")
    plain = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: plain(fd, data[:-7]))  # the disk is full
    with pytest.raises(OSError, match="could be written"):
        thin_closed(table, 50, 50)
    assert levels_of(table) == [1, 1, 0, 0]
    monkeypatch.undo()
    thin_closed(table, 50, 50)
    assert covered(tmp_path / "metrics", 1, 100) == [16] * 6 + [4]


def test_the_age_of_a_lineage_is_all_that_was_trained_since(tmp_path):
    """Four attempts, each of which trained the same hundred steps: of the newest 150 steps each has a row."""
    metrics = tmp_path / "metrics"
    for number in range(1, 4):
        for table in ("run", "rank-00000", "rank-00001", "rank-00007"):
            write(metrics, number, table=table)
    current = write(metrics, 4, last=20)
    for _ in thin_lineages(metrics, (1, 4), 20, rank=0, ranks=2, keep_steps=150):
        pass
    left = {
        lineage.number: [levels_of(path)[0] for path in sorted(lineage.folder.iterdir())]
        for lineage in read_lineages(metrics)
    }
    assert left == {1: [0, 1, 0, 0], 2: [1] * 4, 3: [1] * 4, 4: [1]}  # rank 1 thins its own table
    assert levels_of(current) == [1, 1, 0, 0]
    for _ in thin_lineages(metrics, (1, 4), 20, rank=1, ranks=2, keep_steps=150):
        pass
    assert levels_of(metrics / "000001-epoch-000001-step-00000001" / "rank-00001")[0] == 0
    assert list(thin_lineages(metrics, (1, 4), 20, rank=0, ranks=2, keep_steps=0)) == []


def test_a_lineage_that_cannot_be_thinned_stops_no_other(tmp_path):
    metrics = tmp_path / "metrics"
    tables = [write(metrics, number) for number in (1, 2)]
    (above,) = tables[1].glob("1-*")
    above.write_bytes(b"no header\n")
    for _ in thin_lineages(metrics, (1, 3), 500, rank=0, ranks=1, keep_steps=50):
        pass
    assert levels_of(tables[0])[0] == 0 and levels_of(tables[1])[0] == 1 and LEVELS == 4


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "le', bytes(600)], ids=["empty", "torn", "zeros"])
@pytest.mark.parametrize("name", ["0-00000101.rows", "1-00000001.rows", "1-00000097.rows"])
def test_a_segment_without_a_header_counts_as_absent(tmp_path, name, content):
    """A process was killed, or the power failed, between the creation of a file and its first bytes."""
    table = write(tmp_path / "metrics")
    (table / name).write_bytes(content)
    thin_closed(table, 50, 50)
    assert levels_of(table) == [0, 1, 0, 0]
    assert covered(tmp_path / "metrics", 1, 100) == [16] * 6 + [4]


def test_buckets_are_on_the_disk_before_rows_are_removed(tmp_path, monkeypatch):
    table = write(tmp_path / "metrics")
    done = []
    sync, unlink, replace = os.fsync, Path.unlink, Path.replace

    def note(kind, call):
        return lambda *args, **named: (done.append(kind(*args)), call(*args, **named))[1]

    monkeypatch.setattr(os, "fsync", note(lambda fd: "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file", sync))
    monkeypatch.setattr(Path, "unlink", note(lambda path: f"remove {path.name}", unlink))
    monkeypatch.setattr(Path, "replace", note(lambda path, new: f"name {new.name}", replace))
    thin_closed(table, 50, 50)
    assert done == ["file", "remove 0-00000001.rows"]  # the bucket of the last rows, in a file that was there
    done.clear()
    thin_closed(table, 10**9, 50)
    added = ["file", "name 2-00000001.rows", "folder", "remove 1-00000001.rows"]
    assert done == [*added, "file", "name 3-00000001.rows", "folder", "remove 2-00000001.rows"]
