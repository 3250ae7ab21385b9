"""The runs of earlier versions in tests/golden/old, in everything that shows a run: watch, alerts, compare, report,
status and sinks."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.events import read_events
from ingot.observe.alerts.replay import replay
from ingot.observe.scalars import SCALARS
from ingot.observe.sink_process import EventDelivery
from ingot.observe.sink_state import SinkStateFile
from ingot.plugins.sink import Sink
from ingot.report.compare.align import compare_runs
from ingot.report.status import read_status
from ingot.report.write import write_report
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run
from ingot.watch.chapters import chapters, head
from ingot.watch.charts import chart, chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.terminal.canvas import UNICODE
from ingot.watch.terminal.views import VIEWS, WatchScreen

GOLDEN = Path(__file__).parents[2] / "golden/old"
OLD = ("experts", "first", "layouts")


class KeptNumbers(Sink):
    """A sink that keeps the numbers that it gets, with their step."""

    def __init__(self):
        self.sent = []

    def open(self, run_id, attempt, config):
        assert attempt == 0 and config["train.steps"] == 6

    def scalars(self, step, tokens, values):
        self.sent.append((step, dict(values)))


@pytest.fixture
def old(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("name", OLD)
def test_the_log_of_an_earlier_version_is_shown_whole(name, old, tmp_path):
    folder = RunFolder(old / name)
    losses = {event["step"]: event["loss"] for event in read_events(folder.events, events.STEP)}
    step = max(losses)
    live = LiveRun(folder.root).read_all()
    assert (live.last_step, live.data.unreadable_events, live.problems, live.log_problem) == (step, 0, {}, "")
    keys = chart_keys([live])
    assert {"loss", "grad_norm", "lr", "speed", "step_time"} <= set(keys)
    assert ("loads" in keys) == (name == "experts")
    charts = {key: found for key in keys if (found := chart([live], key)) is not None}
    assert charts["loss"].lines[0].points.values.tolist() == list(losses.values())
    assert charts.keys() == set(keys) and all(found.lines for found in charts.values())
    assert head(live).step == step and chapters(live)
    screen = WatchScreen([live], UNICODE)
    for number in range(1, len(VIEWS) + 1):
        screen.press(str(number))
        assert name in "\n".join(screen.draw(80, 24).lines())

    found = replay(folder, running=False)
    assert (found.unreadable, found.records) == (0, [])
    assert read_status(folder.root).losses == tuple(losses.values())
    report = write_report(folder.root, out=tmp_path)
    assert f"{losses[step]:.3f}" in report.markdown.read_text()

    sink, states = KeptNumbers(), SinkStateFile(tmp_path / "x.json")
    delivery = EventDelivery(folder, recorded_run(folder.config), sink, states, [].append, lambda seconds: False)
    while delivery.look():
        pass
    assert {at: values["train/loss"] for at, values in sink.sent if "train/loss" in values} == losses
    assert delivery.is_whole and delivery.state.left_out == 0
    assert {own for _, values in sink.sent for own in values} <= SCALARS.keys()


def test_logs_of_earlier_versions_are_compared(old):
    found = compare_runs([old / name for name in OLD])
    assert [one.run.step for one in found.aligned] == [
        max(event["step"] for event in read_events(old / name / "events.jsonl", events.STEP)) for name in OLD
    ]
    json.dumps(found.as_dict())
    assert found.points[-1].metric("train/loss") is not None
