import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from ingot.observe.scalars import NAMED_SCALARS, ONLY_SENT, OVER_RANKS, SCALARS
from ingot.schema import metric_files
from ingot.schema.metric_files import (
    MISSING,
    SEGMENT_ROWS,
    OpenSegment,
    TableWriter,
    is_missing,
    lineage_folder,
    read_lineages,
    read_segments,
)
from ingot.schema.metrics import METRICS, TRAFFIC_AXES, metric_of, newest_rows, read_series

LOSS, NORM = "train/loss", "train/grad_norm"
MANUAL = Path(__file__).parents[3] / "docs/observe/metrics.md"


def write(
    metrics, number=1, first=1, last=100, *, rank=None, names=(LOSS, NORM), value=float, every=1, keep=0, time=1e9
):
    """Write the steps first..last of a lineage: value(step), measured every `every` steps."""
    metrics.mkdir(exist_ok=True)
    table = lineage_folder(metrics, number, first) / ("run" if rank is None else f"rank-{rank:05}")
    writer = TableWriter(table, names, {"line_steps": every}, keep)
    for step in range(first, last + 1):
        writer.add(step, time + step, {name: value(step) for name in names if step % every == 0})
    writer.close()
    return table


def only(found):
    (series,) = found
    return series


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    """A run of a million steps, whose rows are those of 16 segments, linked; only the folder listing is as long."""
    metrics = tmp_path_factory.mktemp("million") / "metrics"
    metrics.mkdir()
    table = lineage_folder(metrics, 1, 1) / "run"
    writer = TableWriter(table, [LOSS], {"line_steps": 1})
    steps = np.arange(1, 1_000_001)
    rows = np.zeros(len(steps), metric_files.row_type(0, 1))
    rows["step"], rows["time"], rows["values"][:, 0] = steps, steps, np.sin(steps / 1e4)
    rows["values"][777_776, 0] = 9.0
    for row in rows[:SEGMENT_ROWS]:
        writer.add(int(row["step"]), float(row["time"]), {LOSS: float(row["values"][0])})
    writer.close()
    header = next(iter(table.glob("0-*"))).read_bytes().partition(b"\n")[0]
    for level in range(metric_files.LEVELS):
        if level:
            groups = len(rows) // 16
            values = rows[: groups * 16]["values"].reshape(groups, 16, -1)
            own = np.zeros(groups, metric_files.row_type(1, 1))
            steps = rows["step"] if level == 1 else rows["first"]
            lasts = rows["step"] if level == 1 else rows["last"]
            own["first"], own["last"] = steps[: groups * 16 : 16], lasts[15 : groups * 16 : 16]
            own["values"][:, 0, 0] = 16**level
            at = (0, 0, 0) if level == 1 else (1, 2, 3)
            own["values"][:, 0, 1] = values[:, :, at[0]].mean(1)
            own["values"][:, 0, 2] = values[:, :, at[1]].min(1)
            own["values"][:, 0, 3] = values[:, :, at[2]].max(1)
            rows = own
        for at in range(0, len(rows), SEGMENT_ROWS):
            first = rows[at]["step" if level == 0 else "first"]
            head = json.dumps(json.loads(header) | {"level": level}).encode()
            (table / f"{level}-{first:08}.rows").write_bytes(head + b"\n" + rows[at : at + SEGMENT_ROWS].tobytes())
    return metrics


def test_a_million_steps_open_with_a_few_rows(million, monkeypatch):
    read = []
    plain = OpenSegment.read

    def counted(self, first, last):
        rows = plain(self, first, last)
        read.append(rows.nbytes)
        return rows

    monkeypatch.setattr(OpenSegment, "read", counted)
    found = only(read_series(million, None, LOSS))
    assert sum(read) < 1 << 20
    assert 900 <= len(found.first) <= 1000 and found.first[0] == 1 and found.last[-1] == 1_000_000
    assert found.most.max() == 9.0 and np.all(found.first[1:] == found.last[:-1] + 1)
    read.clear()
    near = only(read_series(million, None, LOSS, 777_700, 777_800))
    assert sum(read) < 1 << 18
    assert near.first.tolist() == near.last.tolist() == list(range(777_700, 777_801))
    assert near.mean[77] == 9.0 and near.mean[0] == np.sin(777_700 / 1e4)


def test_buckets_have_the_mean_and_the_range_of_all_rows(tmp_path):
    """The metric is measured at every tenth step; what is not a whole bucket at the end is there, too."""
    last = 2 * SEGMENT_ROWS + 300
    write(tmp_path / "metrics", last=last, every=10, value=lambda step: step * 1.5)
    found = only(read_series(tmp_path / "metrics", None, NORM, points=10))
    measured = np.arange(10, last + 1, 10) * 1.5
    assert len(found.first) <= 10 and found.first[0] == 1 and found.last[-1] >= last - 9
    assert (found.least.min(), found.most.max()) == (measured[0], measured[-1])
    counts = [
        ((measured / 1.5 >= a) & (measured / 1.5 <= b)).sum() for a, b in zip(found.first, found.last, strict=True)
    ]
    assert (found.mean * counts).sum() == pytest.approx(measured.sum(), rel=1e-12)


def test_a_computed_nan_is_a_value_and_a_missing_one_is_not(tmp_path):
    write(tmp_path / "metrics", last=64, names=[LOSS], value=lambda step: math.nan if step == 20 else 1.0)
    exact = only(read_series(tmp_path / "metrics", None, LOSS))
    assert len(exact.mean) == 64 and np.flatnonzero(np.isnan(exact.mean)).tolist() == [19]
    thin = only(read_series(tmp_path / "metrics", None, LOSS, points=4))
    assert np.isnan(thin.mean).tolist() == [False, True, False, False]
    assert thin.least.tolist() == thin.most.tolist() == [1.0] * 4
    assert is_missing(np.array([MISSING, math.nan, -math.nan, 0.0])).tolist() == [True, False, False, False]


def test_attempts_and_roll_backs_keep_their_steps(tmp_path):
    metrics = tmp_path / "metrics"
    write(metrics, 1, 1, 120, value=lambda step: 1.0)
    write(metrics, 2, 101, 160, value=lambda step: 2.0, time=5e8)  # its clock was set back by years
    write(metrics, 3, 81, 90, names=["train/lr", LOSS], value=lambda step: 3.0)
    found = read_series(metrics, None, LOSS)
    assert [(s.lineage, s.valid, s.first[0], s.last[-1], s.mean[0]) for s in found] == [
        (1, True, 1, 80, 1.0),
        (1, False, 81, 120, 1.0),
        (2, False, 101, 160, 2.0),
        (3, True, 81, 90, 3.0),
    ]
    assert [s.lineage for s in read_series(metrics, None, "train/lr")] == [3]
    assert [s.lineage for s in read_series(metrics, None, NORM, 130, 140)] == [2]
    assert read_series(metrics, None, "train/unknown") == read_series(metrics, 4, LOSS) == []


def test_old_rows_are_removed_and_their_buckets_stay(tmp_path):
    last = 3 * SEGMENT_ROWS + 10
    table = write(tmp_path / "metrics", last=last, keep=SEGMENT_ROWS, names=[LOSS])
    assert [len(level) for level in read_segments(table)] == [2, 1, 1, 1]
    found = only(read_series(tmp_path / "metrics", None, LOSS, points=10**6))
    assert found.first[0] == 1 and found.last[-1] == last
    assert np.all(found.first[1:] == found.last[:-1] + 1)
    assert set((found.last - found.first).tolist()) == {0, 15}
    assert found.mean[0] == np.arange(1, 17).mean()


def test_a_torn_row_is_left_out(tmp_path):
    table = write(tmp_path / "metrics", last=10, names=[LOSS], rank=0)
    (segment,) = read_segments(table)[0]
    whole = segment.path.read_bytes()
    for cut in (1, 23):
        segment.path.write_bytes(whole[:-cut])
        assert only(read_series(tmp_path / "metrics", 0, LOSS)).last[-1] == 9
        assert newest_rows(tmp_path / "metrics")[0].step == 9
    segment.path.write_bytes(whole + bytes(24))  # a machine lost its power: the file has zeros where rows should be
    assert only(read_series(tmp_path / "metrics", 0, LOSS)).last.tolist() == list(range(1, 11))
    assert newest_rows(tmp_path / "metrics")[0].values == {LOSS: 10.0}


def header(**changes):
    facts = {"format": 1, "level": 0, "names": [LOSS], "line_steps": 10} | changes
    return json.dumps(facts).encode() + b"\n"


HOSTILE = {
    "empty": b"",
    "no end of the line": b"{" * (3 << 20),
    "no JSON": b"\xff\xfe\n" + bytes(100),
    "a list": b"[]\n",
    "too deep": b"[" * 100_000 + b"\n",
    "another format": header(format=2),
    "another level": header(level=1),
    "no names": header(names=[]),
    "names twice": header(names=[LOSS, LOSS]),
    "too many names": header(names=[f"train/n{n}" for n in range(10_001)]),
    "a path as a name": header(names=["../../etc/passwd"]),
    "markup as a name": header(names=["train/<script>"]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_damaged_header_hides_only_its_file(tmp_path, content):
    table = write(tmp_path / "metrics", last=SEGMENT_ROWS + 5, names=[LOSS], rank=0)
    segment = read_segments(table)[0][1]
    segment.path.write_bytes(content + bytes(4800))
    assert only(read_series(tmp_path / "metrics", 0, LOSS, points=10**6)).last[-1] == SEGMENT_ROWS
    assert newest_rows(tmp_path / "metrics")[0].step == SEGMENT_ROWS


def test_what_is_no_file_is_not_opened(tmp_path):
    table = write(tmp_path / "metrics", last=SEGMENT_ROWS + 5, names=[LOSS], rank=0)
    segment = read_segments(table)[0][1].path
    segment.unlink()
    os.mkfifo(segment)  # to open it would wait for a writer
    (table / "0-00009000.rows").symlink_to("/dev/zero")
    (table / "9-00009000.rows").touch()
    (tmp_path / "metrics" / "notes.txt").touch()
    assert newest_rows(tmp_path / "metrics")[0].step == SEGMENT_ROWS


def test_the_newest_rows_have_the_newest_values_of_log_lines(tmp_path):
    metrics = tmp_path / "metrics"
    write(metrics, 1, 1, 50, rank=2)
    for rank in range(2):
        write(metrics, 2, 41, 58, rank=rank, names=["memory/peak_bytes"], every=10)
    write(metrics, 2, 41, 50, value=lambda step: -step, every=10)
    assert newest_rows(metrics) == {
        0: (58, 1e9 + 58, {"memory/peak_bytes": 50.0, LOSS: -50.0, NORM: -50.0}),
        1: (58, 1e9 + 58, {"memory/peak_bytes": 50.0}),
    }
    assert newest_rows(tmp_path / "none") == {} and read_lineages(tmp_path / "none") == []


def test_a_writer_refuses_what_it_cannot_keep(tmp_path):
    writer = TableWriter(tmp_path / "000001-step-00000001" / "run", [LOSS], {})
    writer.add(5, 0.0, {})
    with pytest.raises(ValueError, match="new lineage"):
        writer.add(5, 0.0, {})
    with pytest.raises(ValueError, match="name of a metric"):
        TableWriter(tmp_path, ["Loss"], {})
    writer.flush()
    (tmp_path / "000001-step-00000001" / "run" / "0-00000005.rows").unlink()
    writer.add(6, 0.0, {})
    with pytest.raises(OSError, match="removed while"):
        writer.flush()
    with pytest.raises(FileNotFoundError):
        TableWriter(tmp_path / "gone" / "000001-step-00000001" / "run", [LOSS], {}).add(1, 0.0, {})


def test_the_manual_has_every_name():
    _, table, _ = re.split(r"<!-- (?:names: .*|end of names) -->\n", MANUAL.read_text())
    assert table == table_of_names()


def table_of_names():
    """All names with their units: the recorded ones, and those that sinks alone get."""
    recorded = [(one.name, one.unit, one.owner, one.at, sent(one), one.meaning) for one in METRICS]
    known = {one.name for one in METRICS}
    others = {**ONLY_SENT, **{name: own for name, own in NAMED_SCALARS.items() if name not in known}}
    rows = recorded + [(name, own.unit, "run", "event", "yes", own.meaning) for name, own in others.items()]
    lines = [f"| `{name}` | {unit or '-'} | {' | '.join(facts)} |" for name, unit, *facts in rows]
    return "\n".join(["| name | unit | of | at | sinks | meaning |", "|---|---|---|---|---|---|", *lines, ""])


def sent(metric):
    """Return what sinks get of a recorded metric."""
    if metric.owner == "rank":
        return OVER_RANKS.get(metric.name, "Prometheus")
    return "yes" if metric.name in SCALARS or metric.name in NAMED_SCALARS else "no"


def test_no_number_has_two_names_units_or_meanings():
    """A number that is recorded and sent has one entry, and both lists have one language of units."""
    recorded = {metric.name: metric for metric in METRICS}
    assert not recorded.keys() & ONLY_SENT.keys()
    for name, own in SCALARS.items():
        pattern = re.sub(f"/({'|'.join(TRAFFIC_AXES)})/", "/{axis}/", name)
        if pattern in recorded:
            assert own.unit == recorded[pattern].unit, name
            assert own.meaning.startswith(recorded[pattern].meaning.split("{axis}")[0]), name
    assert {own.unit for own in (*SCALARS.values(), *NAMED_SCALARS.values())} <= {one.unit for one in METRICS} | {
        "nats"
    }


def test_every_metric_has_one_meaning():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric_files._NAME.fullmatch(metric.name.replace("{", "").replace("}", "")), metric
        assert metric.meaning and metric_of(re.sub(r"\{\w+\}", "x-1.y", metric.name)) is metric
    assert metric_of("train/unknown") is None
