"""Logs as no run should write them, read for a page: all of it is JSON for browsers, and no warning is printed."""

import json

import pytest
from tests.unit.observe.test_hostile_logs import hostile_log
from tests.watched import HOSTILE, WatchedRun

from ingot.schema.run_folder import RunFolder
from ingot.watch.chapters import chapters, head
from ingot.watch.charts import chart, chart_keys
from ingot.watch.live import LiveRun
from ingot.watch.web.as_json import chapters_json, chart_json, encoded, head_json


def read(values) -> str:
    def no_number(text: str):
        raise ValueError(text)

    text = encoded(values).decode()
    json.loads(text, parse_constant=no_number)
    return text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1000, pytest.param(200_000, marks=pytest.mark.nightly)])
def test_a_hostile_log_is_shown_as_far_as_it_can_be_read(tmp_path, count):
    folder = RunFolder(WatchedRun(hostile=True, ended=50, back=None).write(tmp_path / "run"))
    with folder.events.open("ab") as file:
        file.writelines(piece for piece, _ in hostile_log(count))
    (alert, *_) = WatchedRun(hostile=True).alerts()
    with folder.alerts.open("w") as file:
        file.writelines(
            json.dumps(alert.as_dict() | {"id": f"a{n}", "subject": HOSTILE}) + "\n" for n in range(count * 5)
        )
    run = LiveRun(folder.root).read_all()
    assert run.last_step == count and run.clock_jumps > count / 20
    assert count / 4 < run.data.unreadable_events
    assert len(run.alerts) + run.alerts_left_out == count * 5 and len(run.alerts) <= 2000
    read(head_json(head(run)))
    assert len(read(chapters_json(chapters(run)))) < 1_000_000
    keys = chart_keys([run])
    assert {"loss", "grad_norm"} < {*keys}
    assert all(len(read(chart_json(chart([run], key)))) < 300_000 for key in keys)
