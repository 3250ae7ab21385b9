"""The charts and chapters of runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.watched import HOSTILE, WatchedRun

from ingot.planner.run.hyperparameters import size_in_laws
from ingot.planner.run.scaling import BESIROGLU
from ingot.report.facts import gather
from ingot.report.render.page import Bars, Chart, Charts, Folded, HeatMap, LabeledValues, Sample, TableBlock, Text
from ingot.report.write import build_page
from ingot.units import format_count
from ingot.watch import kinds
from ingot.watch.chapters import chapters, head
from ingot.watch.charts import chart, chart_keys
from ingot.watch.drawn import QUESTIONS
from ingot.watch.kinds import moving_mean
from ingot.watch.live import LiveRun
from ingot.watch.series import Points
from ingot.watch.web.as_json import chapters_json, chart_json, encoded


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> LiveRun:
    return LiveRun(WatchedRun().write(tmp_path_factory.mktemp("watch") / "run")).read_all()


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> LiveRun:
    written = WatchedRun(name="other", back=None, slow=None, level=2.0, metrics=False)
    return LiveRun(written.write(tmp_path_factory.mktemp("watch") / "other")).read_all()


def test_charts_are_those_that_have_numbers(run):
    keys = chart_keys([run])
    assert keys == ["loss", "heldout", "grad_norm", "lr", "speed", "mfu", "step_time", "uses", "traffic", "memory",
                    "cost", "own:noise/tokens"]  # fmt: skip
    for key in keys:
        found = chart([run], key)
        assert found is not None and found.lines and found.question in QUESTIONS
        assert all(len(line.points.steps) == len(line.points.values) > 0 for line in found.lines), key
    assert chart([run], "nonsense") is None
    assert chart([run], "own:nobody/nothing").lines == ()


def test_the_loss_has_void_steps_incidents_and_held_out_text(run):
    found = chart([run], "loss")
    styles = [line.style for line in found.lines]
    assert styles == ["void", "raw", "main", "dots"]
    void = found.lines[0].points.steps
    assert (void[0], void[-1]) == (201, 250)
    marks = {mark.step: mark for mark in found.marks}
    assert "rank 1 was killed (SIGKILL)" in marks[250].text
    assert marks[250].severity == "bad"
    assert "rank 2 on node-7" in marks[400].text


def test_the_loss_of_a_fit_is_drawn_where_the_fit_has_runs_and_else_why_it_is_not(run, other, monkeypatch):
    tokens, parameters = run.lines.newest("tokens"), size_in_laws(run.data.run.model)
    small = chart([run], "loss")
    assert small.note.startswith(f"no expected loss for {format_count(parameters)} parameters: the fit of Besiroglu")
    assert "57.3M to 16.2B" in small.note and chart_json(small)["note"] == small.note
    assert chart([run, other], "loss").note == small.note and not chart([run], "lr").note
    monkeypatch.setattr(kinds, "_FIT", replace(BESIROGLU, parameters=(1, 1e9), tokens=(tokens / 2, 1e15)))
    known = chart([run], "loss")
    (line,) = [one for one in known.lines if one.style == "expected"]
    steps, counts = run.lines.points("tokens", 1, None)
    assert line.points.steps.tolist() == steps[counts >= tokens / 2].tolist() and known.note == ""
    assert line.points.values[-1] == pytest.approx(BESIROGLU.loss(parameters, tokens))
    monkeypatch.setattr(kinds, "_FIT", replace(BESIROGLU, parameters=(1, 1e9), tokens=(2 * tokens, 1e15)))
    early = chart([run], "loss")
    assert f"for {format_count(tokens)} tokens" in early.note and "expected" not in [one.style for one in early.lines]


@pytest.mark.parametrize(("count", "window"), [(0, 5), (1, 5), (2, 5), (4, 5), (5, 5), (6, 5), (57, 11), (64, 7)])
def test_a_mean_over_a_window_has_only_the_values_of_the_window(count, window):
    values = np.random.default_rng(count).normal(size=count)
    if count > 20:
        values[20] = 1e20
    expected = []
    for i in range(count):
        half = min(window // 2, i, count - 1 - i)
        expected.append(values[i - half : i + half + 1].mean())
    found = moving_mean(Points(np.arange(count), values), window)
    assert found.values == pytest.approx(np.array(expected), rel=1e-9)


def test_the_plan_is_a_band(run):
    (band,) = chart([run], "step_time").bands
    assert (band.low, band.high) == (0.08, 0.13)
    (speed,) = chart([run], "speed").bands
    assert speed.low == pytest.approx(4096 / 0.13) and speed.high == pytest.approx(4096 / 0.08)
    (mfu,) = chart([run], "mfu").bands
    assert mfu.low == mfu.high == pytest.approx(42.0)


def test_a_zoomed_chart_has_every_point_of_its_steps(run):
    found = chart([run], "loss", 301, 340)
    raw = next(line for line in found.lines if line.style == "raw")
    assert raw.points.steps.tolist() == list(range(301, 341))
    assert raw.points.values.tolist() == [WatchedRun().loss(step) for step in range(301, 341)]


def test_narrow_charts_have_few_points_and_all_extremes(run):
    wide, narrow = (next(line for line in chart([run], "loss", pixels=pixels).lines if line.style == "raw").points
                    for pixels in (4000, 20))  # fmt: skip
    assert len(wide.steps) == 400 and len(narrow.steps) <= 50
    assert narrow.values.max() == wide.values.max() and narrow.values.min() == wide.values.min()


def test_parts_of_a_step_are_at_the_same_steps(run):
    lines = chart([run], "uses", pixels=100).lines
    assert len({tuple(line.points.steps.tolist()) for line in lines}) == 1
    total = sum(line.points.values for line in lines)
    assert total == pytest.approx(np.full(len(total), 0.1))


def test_communication_has_a_line_for_each_part_that_takes_time(run, other):
    for runs in ([run], [run, other]):
        lines = {line.name: line.points.values.mean() for line in chart(runs, "traffic").lines}
        assert lines == {
            "dp_shard, exposed": pytest.approx(0.015), "dp_shard, hidden": pytest.approx(0.03, rel=0.1),
            "all ranks, exposed": pytest.approx(0.015),
        }  # fmt: skip


def test_several_runs_are_one_chart(run, other):
    found = chart([run, other], "loss")
    assert {line.run for line in found.lines} == {0, 1}
    assert [band.run for band in chart([run, other], "mfu").bands] == [0, 1]
    three = chart([run, other, other], "loss")
    assert "raw" not in {line.style for line in three.lines}
    assert [line.run for line in three.lines if line.style == "main"] == [0, 1, 2]


def test_incidents_close_to_each_other_are_one_mark(run):
    marks = chart([run], "loss", pixels=50).marks
    assert sum(mark.count for mark in marks) == sum(1 <= one.step <= 400 for one in run.data.incidents)
    assert len(marks) < len(run.data.incidents)


def test_every_question_has_a_chapter_and_every_block_is_drawn(run):
    found = chapters(run)
    assert {chapter.question for chapter in found} == set(QUESTIONS)
    anchors = [chapter.section.anchor for chapter in found]
    assert len(set(anchors)) == len(anchors)
    assert {"ranks", "alerts", "incidents", "cost", "prediction", "samples", "checkpoints"} <= set(anchors)
    blocks = [block for chapter in found for block in chapter.section.blocks]
    assert all(
        isinstance(block, Text | LabeledValues | TableBlock | Bars | HeatMap | Sample | Folded) for block in blocks
    )
    assert json.loads(encoded(chapters_json(found)))


# Chapters of the report alone: charts, which the page draws itself; and files that a page does not read again.
OF_THE_REPORT = {"training", "chapters", "data", "provenance"}


def test_the_page_and_the_report_have_the_same_chapters_with_the_same_figures(run):
    page = {one.section.anchor: one.section for one in chapters(run)}
    report = {one.anchor: one for one in build_page(gather(run.folder.root), "ingot train").sections}
    assert page.keys() == report.keys() - OF_THE_REPORT
    assert {"step", "settings", "machine", "incidents", "alerts", "cost", "ranks"} <= page.keys()
    for anchor in page.keys() - {"checkpoints"}:  # a report also looks for the one from which the run would resume
        own = [block for block in report[anchor].blocks if not isinstance(block, Chart | Charts | Folded)]
        assert all(block in page[anchor].blocks for block in own), anchor
    axes = next(one for one in report["step"].blocks if isinstance(one, Bars) and one.header[0] == "Axis")
    assert ("dp_shard, hidden", "30%") in [(row.label, row.values[1]) for row in axes.rows]


def test_a_slow_rank_is_seen_in_the_map(run):
    (ranks,) = (chapter.section for chapter in chapters(run) if chapter.section.anchor == "ranks")
    heat = next(block for block in ranks.blocks if isinstance(block, HeatMap))
    rows = {row.label: row for row in heat.rows}
    column = heat.header.index("backward") - 1
    assert rows["2"].levels[column] == 3 and rows["2"].note.startswith("slow, 2.1")
    assert rows["1"].levels[column] == 0 and not rows["1"].note


def test_figures_of_the_head(run):
    found = {figure.label: figure for figure in head(run).figures}
    assert found["Loss"].value == f"{WatchedRun().loss(400):.4f}"
    assert found["Faults"].note == "1 recovered"
    assert found["Alerts"].value == "1 open" and found["Alerts"].good is False
    assert found["Goodput"].value == "93.0%"


def test_numbers_that_are_not_finite_are_null_for_browsers(run):
    found = chart([run], "loss")
    line = replace(found.lines[1], points=found.lines[1].points._replace(values=np.full(400, np.inf)))
    text = encoded(chart_json(replace(found, lines=(line,))))
    assert json.loads(text)["lines"][0]["y"] == [None] * 400
    assert json.loads(encoded({"a": [float("nan"), {"b": float("-inf")}]})) == {"a": [None, {"b": None}]}


def test_texts_of_a_run_stay_texts(tmp_path):
    hostile = LiveRun(WatchedRun(hostile=True).write(tmp_path / "run")).read_all()
    sent = json.loads(encoded(chapters_json(chapters(hostile))))
    samples = next(chapter for chapter in sent if chapter["anchor"] == "samples")
    shown = next(block for block in samples["blocks"] if block["kind"] == "sample")
    assert (shown["prompt"], shown["text"]) == (f"Once{HOSTILE}", f" upon a time{HOSTILE}")  # not cut, not escaped
    assert any(HOSTILE in mark.text for mark in chart([hostile], "loss").marks)
    assert f"own:noise/tokens{HOSTILE}" in chart_keys([hostile])
