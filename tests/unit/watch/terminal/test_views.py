"""The views of a terminal as text: what a run shows at each size, with and without Unicode."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.report.diagnose.test_slow_runs import ARCH

from ingot.config import to_toml
from ingot.report.render.page import Bar, Bars, HeatMap, HeatRow, TableBlock
from ingot.report.robust import shown_range
from ingot.schema.alert_record import AlertRecord
from ingot.schema.metric_files import TableWriter, lineage_folder
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_atomic
from ingot.trainer.telemetry.usage import KINDS
from ingot.watch.drawn import WatchBand, WatchChart, WatchLine, WatchMark
from ingot.watch.live import LiveRun
from ingot.watch.series import Points
from ingot.watch.terminal.canvas import ASCII, UNICODE, Canvas, glyphs_for
from ingot.watch.terminal.plot import draw_chart
from ingot.watch.terminal.text import lines_of
from ingot.watch.terminal.views import VIEWS, WatchScreen

START = 1_780_000_000.0


def write_run(root, *, name="demo", steps=60, total=100, ended=True):
    """Write a run folder: a spike, a fault after which 10 steps were trained again, an open alert, and two ranks."""
    folder = RunFolder(root)
    train_settings = Train(steps=total, seq_len=32, global_batch=8, micro_batch=8)
    config = RunConfig(name=name, model=ARCH, data=Data(tokens="t"), train=train_settings)
    write_atomic(folder.config, to_toml(config))
    events = [{"kind": "run_started", "time": START, "from_step": 0, "world_size": 2, "device": "cpu", "run": name}]

    def train(first, last, late=0.0):
        for step in range(first, last + 1):
            time, loss = START + late + step, 50.0 if step == 30 else 2.0 + 4.0 * math.exp(-step / 20)
            events.append({"kind": "step", "time": time, "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3})
            if step % 10 == 0:
                events.append({"kind": "progress", "time": time, "step": step, "tokens": step * 1024, "mfu": 0.4,
                               "tokens_per_second": 1000.0 + step, "step_seconds": 1.0, "data_wait_seconds": 0.1,
                               "peak_memory_bytes": 1 << 30, "cost_usd": step / 100, "eta_seconds": 40.0})  # fmt: skip
                spread = {"mean": 0.1, "least": 0.05, "most": 0.2, "rank": 1}
                events.append(
                    {"kind": "waits", "time": time, "step": step, "steps": 10, **dict.fromkeys(KINDS, spread)}
                )

    train(1, 45)
    events.append({"kind": "fault", "time": START + 46, "rank": 1, "cause": "was killed", "step": 45})
    events.append(events[0] | {"time": START + 50, "from_step": 35})
    train(36, steps, late=20)
    if ended:
        events.append(
            {"kind": "finished", "time": START + steps + 21, "step": steps, "tokens": steps * 1024, "seconds": 80.0}
        )
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    alert = AlertRecord(
        id="a", kind="loss", subject="", severity="critical", state="fired", time=START, began=START, step=30,
        evidence="the loss rose to 50", next="ingot explain spike",
    )  # fmt: skip
    folder.alerts.write_text(json.dumps(alert.as_dict()) + "\n")
    folder.metrics.mkdir()
    names = [f"perf/{phase}_seconds" for phase in ("step", "forward", "backward")]
    for rank in (0, 1):
        writer = TableWriter(lineage_folder(folder.metrics, 1, 1) / f"rank-{rank:05}", names, {"line_steps": 10})
        for step in range(1, steps + 1):
            writer.add(step, START + step, dict(zip(names, (1.0, 0.2 + 0.3 * rank, 0.5), strict=True)))
        writer.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("watch") / "demo"
    root.mkdir()
    write_run(root)
    return LiveRun(root).read_all()


def screen(run, view=1, glyphs=UNICODE, width=80, height=24):
    shown = WatchScreen([run], glyphs)
    shown.press(str(view))
    return shown.draw(width, height, START + 100)


def test_every_view_fits_every_screen(run):
    for width, height in ((80, 24), (200, 60), (30, 8), (44, 11), (12, 3)):
        for view in range(1, len(VIEWS) + 1):
            lines = screen(run, view, width=width, height=height).lines()
            assert len(lines) == height and max(map(len, lines)) <= width, (width, height, view)
    assert "too small" in screen(run, width=12, height=30).lines()[0] + screen(run, width=40, height=3).lines()[0]


def test_the_way_out_and_the_names_of_several_runs_are_shown(run, tmp_path):
    for width in (30, 60, 80, 120):
        for view in range(1, len(VIEWS) + 1):
            keys = screen(run, view, width=width).lines()[-1]
            assert keys.rstrip().endswith(" q quit") and all(f"{number}" in keys for number in range(1, 10)), keys
    assert "2 loss" in screen(run, 2, width=60).lines()[-1]
    assert screen(run, width=30, height=8).lines()[1].strip()  # no empty line where a state is cut off
    other = LiveRun(write_run(tmp_path, name="other").root).read_all()
    shown = WatchScreen([run, other], UNICODE).draw(80, 24, START + 100).lines()
    assert "Loss, nats per token  demo  other  training loss" in "\n".join(shown)


def test_the_views_show_what_their_names_promise(run):
    text = {view.title: "\n".join(screen(run, n, height=60).lines()) for n, view in enumerate(VIEWS, 1)}
    assert "demo  finished  step 60 of 100 (60%)" in text["run"] and "the loss rose to 50" in text["run"]
    assert "rank 1 was killed" in text["run"] and "cost $0.60" in text["run"]
    assert "Loss, nats per token" in text["loss"] and UNICODE.mark in text["loss"]
    assert "Gradient norm" in text["gradient"] and "Learning rate" in text["gradient"]
    assert "MFU, %" in text["speed"] and "computing" in text["speed"] and "200.0 ms (rank 1)" in text["speed"]
    assert "forward" in text["ranks"] and "500.0 ms+" in text["ranks"]
    assert "Memory, GiB" in text["memory"] and "Model and settings" in text["data"]
    assert "was killed" in text["saves"] and "Alerts" in text["alerts"] and "Incidents" in text["alerts"]


def test_without_unicode_there_is_only_ascii(run):
    assert glyphs_for("utf-8") is UNICODE and glyphs_for("latin-1") is glyphs_for(None) is ASCII
    for view in range(1, len(VIEWS) + 1):
        text = "\n".join(screen(run, view, ASCII, height=60).lines())
        assert text.isascii() and ("*" in text) == any(word in text for word in ("Loss", "norm", "MFU", "GiB", "USD"))


def test_names_of_a_run_move_no_cursor(tmp_path):
    write_run(tmp_path, name="evil")
    config = RunFolder(tmp_path).config
    config.write_text(config.read_text().replace("evil", "a\\u001b[2J\\u202eb\\u0300漢字" + "x" * 300))
    canvas = screen(LiveRun(tmp_path).read_all())
    text = "".join(canvas.lines())
    assert "\x1b" not in text and "\u202e" not in text and "漢字" in text and "finished" in text
    assert len(canvas.runs(0)[0][1]) <= 80


def test_keys_change_the_view_the_text_and_the_zoom(run):
    shown = WatchScreen([run, run], UNICODE)
    for keys, view in ((("3",), 2), (("right",), 3), (("left", "left", "left", "left"), 8), (("0", "x", ""), 8)):
        assert all(shown.press(key) for key in keys) and shown.view == view
    before = shown.draw(80, 12).lines()
    assert shown.press("down") and shown.draw(80, 12).lines() != before
    assert shown.press("page down") and shown.press("page down") and shown.press("page down")
    shown.draw(80, 12)
    last = shown.scroll
    shown.press("down")
    shown.draw(80, 12)
    assert shown.scroll == last  # the last line stays at the end
    shown.press("home")
    assert not shown.scroll and shown.press("tab") and shown.chosen == 1
    shown.press("2")
    assert shown.press("+") and "step 31" in "\n".join(shown.draw(80, 24).lines())
    assert shown.press("-") and "step 1 " in "\n".join(shown.draw(80, 24).lines())
    assert not shown.press("q")


def test_a_run_without_a_sign_of_life_says_since_when(tmp_path):
    write_run(tmp_path, ended=False)
    run = LiveRun(tmp_path).read_all()
    first, second, *_ = screen(run).lines()
    assert "interrupted" in first and "no sign of life since 20" in second and "(20 s ago)" in second
    run.running = True
    assert "no sign of life" not in "".join(screen(run).lines())  # its next line is not late yet
    late = WatchScreen([run], UNICODE).draw(80, 24, START + 4000)
    assert "no sign of life since 20" in "".join(late.lines())


def chart(**values):
    steps = np.arange(1, 101)
    line = WatchLine(name="loss", style="main", points=Points(steps, np.full(100, 2.0)))
    return replace(
        WatchChart(key="loss", title="Loss", unit="", question="learning", lines=(line,), last=100), **values
    )


def drawn(found, glyphs=ASCII, width=69, height=14):
    canvas = Canvas(width, height, glyphs)
    draw_chart(canvas, found, 0, 0, width, height)
    return canvas.lines()


def test_one_step_of_a_hundred_reaches_the_top(run):
    values = np.full(100, 2.0)
    values[49] = 3.0
    (line,) = chart().lines
    lines = drawn(chart(lines=(replace(line, points=Points(line.points.steps, values)),)))
    assert lines[1].count("*") == 1 and lines[1].split()[0] == "3" and lines[12].startswith("       2 *")
    assert abs(lines[1].index("*") - 9 - 29.5) < 1.5 and lines[-1].split() == ["step", "1", "100"]


def test_what_is_not_finite_is_a_gap_and_a_wide_range_is_logarithmic():
    values = np.full(100, 2.0)
    values[40:60] = np.nan
    (line,) = chart().lines
    gap = drawn(chart(lines=(replace(line, points=Points(line.points.steps, values)),)))
    row = next(text for text in gap[1:] if "*" in text)
    assert 10 <= row.count(" ", 9) <= 14
    values = np.where(np.arange(100) < 99, 1.0, 10_000.0)
    logarithmic = drawn(chart(log=True, lines=(replace(line, points=Points(line.points.steps, values)),)))
    labels = [text[:8].strip() for text in logarithmic[1:] if text[:8].strip()]
    assert labels[0] == "10,000" and labels[2] == "1" and 50 < float(labels[1]) < 200


def test_an_outlier_does_not_flatten_the_others_and_is_named():
    (line,) = chart().lines
    values = np.where(np.arange(100) < 99, np.linspace(8.0, 7.0, 100), 673.0)
    lines = drawn(chart(lines=(replace(line, points=Points(line.points.steps, values)),)))
    labels = [text[:8].strip() for text in lines[1:] if text[:8].strip()]
    assert 7 < float(labels[0]) <= 8 and float(labels[-1]) >= 7
    assert "above, up to 673" in lines[-1]


@pytest.mark.parametrize("high", [45.0, 0.5])
def test_the_plan_is_drawn_where_it_is(high):
    """A run that has a tenth of the planned speed must not seem to have all of it."""
    (line,) = chart().lines
    values = np.linspace(4.0, 4.2, 100)
    band = WatchBand(name="the plan", low=high, high=high)
    lines = drawn(
        chart(from_zero=True, bands=(band,), lines=(replace(line, points=Points(line.points.steps, values)),))
    )
    rows = [number for number, text in enumerate(lines) if "-" in text[9:]]
    assert float(lines[1][:8]) == max(high, 4.2) and "above" not in lines[-1] and "below" not in lines[-1]
    assert rows == [1 if high > 4 else 11] and "*" not in lines[rows[0]]


def test_a_run_that_has_just_begun_and_few_points_are_no_outliers():
    (line,) = chart().lines
    short = replace(line, run=1, points=Points(np.arange(1, 4), np.array([11.0, 10.5, 10.0])))
    dots = replace(line, style="dots", points=Points(np.array([50]), np.array([5.0])))
    long = replace(line, points=Points(line.points.steps, np.linspace(3.1, 3.0, 100)))
    lines = drawn(chart(lines=(long, short, dots)))
    assert lines[1].split()[0] == "11" and "above" not in lines[-1]
    steps = np.arange(40)
    spiked = np.where(steps == 20, 673.0, np.linspace(3.1, 3.0, 40))
    mean = np.where(abs(steps - 20) < 3, 137.0, 3.05)
    lines = replace(line, style="raw", points=Points(steps, spiked)), replace(line, points=Points(steps, mean))
    shown = drawn(chart(lines=lines))
    assert float(shown[1][:8]) < 4 and "above, up to 673" in shown[-1]


def test_a_logarithm_or_a_zero_leaves_nothing_out_that_it_shows():
    (line,) = chart().lines
    values = np.concatenate([np.geomspace(1000.0, 10.0, 6), np.geomspace(10.0, 1.0, 94)])
    wide = replace(line, points=Points(line.points.steps, values))
    lines = drawn(chart(log=True, lines=(wide,)))
    assert [float(lines[row][:8].replace(",", "")) for row in (1, 12)] == [1000, 1] and "above" not in lines[-1]
    near = replace(line, points=Points(line.points.steps, np.where(np.arange(100) < 99, 100.0, 120.0)))
    lines = drawn(chart(from_zero=True, lines=(near,)))
    assert (lines[1].split()[0], lines[12].split()[0]) == ("120", "0") and "above" not in lines[-1]
    assert shown_range([100.0] * 7 + [3000.0], from_zero=True) == (0.0, 100.0)


def test_void_steps_are_pale_and_incidents_are_below():
    (line,) = chart().lines
    void = replace(line, style="void", points=Points(np.arange(1, 51), np.full(50, 3.0)))
    marks = (WatchMark(step=100, last_step=100, severity="bad", text="fault", count=1),)
    lines = drawn(chart(lines=(line, void), marks=marks))
    assert 10 <= lines[1].count(".") <= 16 and "*" not in lines[1]  # of 30 cells, every second one
    canvas = Canvas(69, 14, ASCII)
    draw_chart(canvas, chart(marks=marks), 0, 0, 69, 14)
    assert (68, "^", "red") in canvas.runs(12)


def test_tables_bars_and_heat_maps_fit():
    table = TableBlock(("Step", "Incident"), [("1", "word " * 40), ("2", "short")], right=(0,))
    lines = ["".join(text for text, _ in line) for line in lines_of([table], 40, ASCII)]
    assert max(map(len, lines)) <= 40 and lines[0] == "Step  Incident" and lines[-1] == "   2  short"
    bars = Bars(("a", "b"), [Bar("computing", 0.5, ("1 s",)), Bar("data", 1.5, ("20 s",))])
    assert ["".join(text for text, _ in line) for line in lines_of([bars], 60, ASCII)] == [
        "computing " + "#" * 12 + "." * 12 + "  1 s",
        "data      " + "#" * 24 + " 20 s",
    ]
    heat = HeatMap(
        ("Rank", "waiting for ranks", "data"),
        [HeatRow("0", ("1 s", "2 s"), (3, 0)), HeatRow("1", ("1", "2"), (-1, 1), "slow")],
    )
    found = lines_of([heat], 60, ASCII)
    text = ["".join(own for own, _ in line) for line in found]
    assert text[2].split() == ["Rank", "ranks", "data"] and text[3].split() == ["0", "1", "s+++", "2", "s"]
    assert ("1 s+++", "red") in [(own.strip(), style) for own, style in found[3]]
    narrow = ["".join(own for own, _ in line) for line in lines_of([heat], 14, ASCII)]
    assert max(map(len, narrow)) <= 14
    assert narrow == ["     waiting", "         for", "Rank   ranks", "0     1 s+++", "1       1-  ", "",
                      "Rank data", "0    2 s ", "1      2+"]  # fmt: skip
