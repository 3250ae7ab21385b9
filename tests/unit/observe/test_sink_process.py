"""The way of events to a sink: attempts, positions, errors, and rows that a full disk cut."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.expect import refused

from ingot.observe import patience
from ingot.observe.patience import RunEnds
from ingot.observe.sink_process import EventDelivery, make_sink, public_settings
from ingot.observe.sink_state import MOST_TRIED, SinkState, SinkStateFile, read_sink_state
from ingot.observe.sinks.jsonl import JsonlSink
from ingot.plugins.sink import Sink, SinkPlace
from ingot.plugins.sink_options import JsonlOptions
from ingot.schema import events
from ingot.schema.alerting import Alerts, EmailChannel, UrlChannel
from ingot.theory.rules import load_run, recorded_run

from .conftest import run_of
from .planted import PlantedRun, planted


class Recorder(Sink):
    """A sink that keeps its calls. fails: the names of methods that raise."""

    def __init__(self, *fails: str):
        self.calls: list[tuple] = []
        self.fails = fails

    def _call(self, name: str, *facts: Any) -> None:
        if name in self.fails:
            raise OSError(f"no {name}")
        self.calls.append((name, *facts))

    def open(self, run_id: str, attempt: int, config: Mapping[str, Any]) -> None:
        self._call("open", run_id, attempt)

    def scalars(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        self._call("scalars", step, tokens, *values)

    def event(self, kind: str, step: int | None, facts: Mapping[str, Any]) -> None:
        self._call("event", kind, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._call("text", step, name, text)

    def of(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def run(tmp_path):
    """A function that delivers the events of a planted run to a sink, as one process does; and the run's writer."""
    folder = planted(tmp_path)
    folder.sinks.mkdir()
    config, answers = recorded_run(folder.config), []

    def deliver(sink: Sink) -> EventDelivery:
        states = SinkStateFile(folder.sinks / "x.json")
        delivery = EventDelivery(folder, config, sink, states, answers.append, lambda seconds: False)
        while delivery.look():
            pass
        return delivery

    deliver.folder, deliver.answers = folder, answers  # pyright: ignore[reportFunctionMemberAccess]
    return deliver, PlantedRun(folder)


def test_a_sink_gets_everything_once_also_over_processes(run):
    deliver, log = run
    log.start()
    log.line(1)
    log.write(events.SAMPLE, step=1, prompt="Once", text="upon a time")
    first, second = Recorder(), Recorder()
    deliver(first)
    log.line(2)
    deliver(second)
    assert first.of("scalars")[0] == (1, 16, "train/loss", "train/grad_norm", "train/lr")
    assert first.of("text") == [(1, "sample/Once", "upon a time")]
    assert [step for step, *_ in second.of("scalars")] == [2, 2, 2]
    assert first.of("open") == second.of("open")
    assert first.of("event")[2] == (events.RUN_STARTED, None)


def test_each_start_and_each_roll_back_begins_an_attempt(run):
    deliver, log = run
    log.start()
    log.line(1)
    log.start()
    log.line(1)
    sink = Recorder()
    deliver(sink)
    log.write(events.ROLLED_BACK, from_step=1, to_step=0, reason="guard")
    log.line(1)
    later = Recorder()
    deliver(later)
    assert [attempt for _, attempt in sink.of("open")] == [0, 1]
    assert [attempt for _, attempt in later.of("open")] == [2]


def test_a_tracker_that_is_away_gets_everything_later_and_in_order(run):
    """Also from the next process: its position is before the first call that raised."""
    deliver, log = run
    log.start()
    log.line(1)
    log.line(2)
    away = Recorder("scalars")
    delivery = deliver(away)
    assert away.of("scalars") == [] and len(away.of("event")) == 9
    assert (delivery.state.sent, delivery.state.left_out, delivery.is_whole) == (9, 0, False)
    assert [answer for answer in deliver.answers if "raised" in answer] == [{"raised": "OSError: no scalars"}]
    back = Recorder()
    delivery = deliver(back)
    assert [(step, names[0]) for step, _, *names in back.of("scalars")] == [
        (step, name) for step in (1, 2) for name in ("train/loss", "train/bpb", "perf/data_seconds")
    ]
    assert delivery.is_whole and delivery.state.left_out == 0

    class Returns(Recorder):
        def scalars(self, step, tokens, values):
            self.fails = ("scalars",) if len(self.of("tried")) < 9 else ()
            self.calls.append(("tried",))
            super().scalars(step, tokens, values)

    log.line(3)
    log.line(4)
    log.line(5)
    late = Returns()
    delivery = deliver(late)  # two calls of the first line are held when it is back
    assert [step for step, *_ in late.of("scalars")] == [3, 3, 3, 4, 4, 4, 5, 5, 5] and delivery.state.left_out == 0


def test_a_call_that_is_at_fault_costs_itself_alone(run):
    deliver, log = run

    class Refuses(Recorder):
        def scalars(self, step, tokens, values):
            if "train/bpb" in values and step < 3:
                raise OSError("refused")
            if step == 3:
                raise ValueError("no such value")
            super().scalars(step, tokens, values)

    log.start()
    for step in (1, 2, 3, 4):
        log.line(step)
    sink = Refuses()
    delivery = deliver(sink)
    assert [step for step, *_ in sink.of("scalars")] == [1, 1, 2, 2, 4, 4, 4]
    assert (delivery.state.left_out, delivery.is_whole) == (5, True)
    assert [kind for kind, _ in sink.of("event")][-3:] == [events.STEP, events.PROGRESS, events.WAITS]


def test_the_end_of_the_run_leaves_what_raises_to_the_next_start(run):
    deliver, log = run
    log.start()
    log.line(1)
    states = SinkStateFile(deliver.folder.sinks / "x.json")
    config = recorded_run(deliver.folder.config)
    ending = EventDelivery(deliver.folder, config, Recorder("scalars"), states, deliver.answers.append, lambda _: True)
    with pytest.raises(RunEnds):
        ending.look()
    ending.close(1.0)
    sink = Recorder()
    assert deliver(sink).state.left_out == 0 and len(sink.of("scalars")) == 3


def test_trackers_do_not_get_the_settings_of_sinks_and_channels():
    tables = {"mlflow": {"tracking_uri": "postgresql://user:password@host"}}
    alerts = Alerts(mfu_least=0.2, webhook=UrlChannel(url_env="PASSWORD"), email=EmailChannel(port=25))
    given = public_settings(replace(run_of(alerts), sinks=tables))
    assert "train.steps" in given and not any("password" in str(value).lower() for value in given.values())
    assert given["alerts.mfu_least"] == 0.2  # rules of trackers compare with the limits
    assert not any(name.startswith(("sinks", "alerts.webhook", "alerts.email", "alerts.terminal")) for name in given)


def test_an_event_that_is_not_as_it_should_be_costs_its_numbers_alone(run):
    deliver, log = run
    log.start()
    log.write(events.METRICS, step=1, by="mine", values={"huge": 10**400, "bad": []})
    log.write(events.PROGRESS, step=1, tokens=float("inf"))
    log.line(2)
    sink = Recorder()
    delivery = deliver(sink)
    assert {step for step, *_ in sink.of("scalars")} == {2} and delivery.state.left_out >= 1
    assert [kind for kind, _ in sink.of("event")][3:5] == [events.METRICS, events.PROGRESS]


def test_an_open_that_raises_loses_no_event(run):
    deliver, log = run
    log.start()
    log.line(1)
    with pytest.raises(OSError, match="no open"):
        deliver(Recorder("open"))
    sink = Recorder()
    deliver(sink)
    assert len(sink.of("event")) == 6


def test_a_call_that_ends_three_processes_is_left_out(run):
    deliver, log = run
    log.start()
    log.line(1)

    class Ends(Recorder):
        def scalars(self, step, tokens, values):
            raise KeyboardInterrupt  # which nothing catches, as SIGKILL

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            deliver(Ends())
    sink = Recorder()
    delivery = deliver(sink)
    assert [names[-1] for _, _, *names in sink.of("scalars")] == [
        "perf/tokens_per_second",
        "perf/computing_seconds_most",
    ]
    assert [kind for kind, _ in sink.of("event")] == [events.STEP, events.PROGRESS, events.WAITS]
    assert (delivery.state.sent, delivery.state.left_out) == (8, 1)


def test_a_call_that_ends_processes_is_left_out_while_an_earlier_one_is_held(run):
    deliver, log = run
    log.start()
    log.write(events.SAMPLE, step=1, prompt="Once", text="upon a time")
    for step in (1, 2, 3, 4):
        log.line(step)

    class Ends(Recorder):
        def scalars(self, step, tokens, values):
            if step in (2, 3) and "train/loss" in values:
                raise SystemExit
            super().scalars(step, tokens, values)

    for _ in range(6):
        with pytest.raises(SystemExit):
            deliver(Ends("text"))
    for _ in range(2):  # the second one begins with the held call, too, and counts nothing twice
        sink = Ends("text")
        delivery = deliver(sink)
        assert [step for step, *_ in sink.of("scalars")] == [1, 1, 1, 2, 2, 3, 3, 4, 4, 4]
        assert (delivery.state.left_out, delivery.is_whole) == (2, False)
    assert deliver(Ends()).is_whole


def test_a_kill_loses_no_call_that_is_held(run):
    deliver, log = run
    log.start()
    for step in (1, 2):
        log.write(events.SAMPLE, step=step, prompt="Once", text="upon a time")

    class Ends(Recorder):
        def text(self, step, name, text):
            if step == 1:
                raise SystemExit if self.of("text") else OSError("no text")
            super().text(step, name, text)

    with pytest.raises(SystemExit):
        deliver(Ends())
    sink = Recorder()
    assert deliver(sink).state.left_out == 0 and [step for step, *_ in sink.of("text")] == [1, 2]


def test_a_call_that_is_held_for_long_is_left_out_unless_no_other_call_shows_a_fault(run, monkeypatch):
    deliver, log = run
    monkeypatch.setattr(patience, "_HELD_SECONDS", 0.0)

    class TextAlone(Sink):
        def text(self, step, name, text):
            raise OSError("no text")

    log.start()
    log.write(events.SAMPLE, step=1, prompt="Once", text="upon a time")
    log.line(1)
    assert not deliver(TextAlone(None, None)).is_whole  # pyright: ignore[reportArgumentType]
    delivery = deliver(Recorder("text"))
    assert delivery.is_whole and delivery.state.left_out == 1


def test_a_state_of_another_version_keeps_its_place(tmp_path):
    (tmp_path / "x.json").write_text('{"position": 7, "begun": 2, "sent": 5, "left_out": 1, "tries": 1}')
    state = read_sink_state(tmp_path / "x.json")
    assert (state.position, state.begun, state.sent, state.tried) == (7, 2, 5, [])


def test_the_file_of_a_state_has_room_for_all_of_it(tmp_path):
    most = 10**13
    tried = [[most, 9, 4]] * MOST_TRIED
    state = SinkState(position=most, begun=most, done=9, sent=most, left_out=most, tried=tried)
    SinkStateFile(tmp_path / "x.json").write(state)
    assert read_sink_state(tmp_path / "x.json") == state


def test_a_state_that_is_damaged_begins_anew(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"position": "no')
    assert read_sink_state(path).position == read_sink_state(tmp_path / "none.json").position == 0


def test_rows_of_json(tmp_path):
    place = SinkPlace(run=tmp_path, own=tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"attempt": 0, "st')  # of a killed process
    sink = JsonlSink(place, JsonlOptions())
    sink.open("x", 1, {})
    sink.scalars(3, 48, {"train/loss": float("nan"), "train/lr": 1e-3})
    sink.text(3, "sample/Once", "upon\na time")
    _torn, *rows = path.read_text().splitlines()
    assert [json.loads(row) for row in rows] == [
        {"run": "x", "attempt": 1, "step": 3, "tokens": 48, "train/loss": "nan", "train/lr": 1e-3},
        {"run": "x", "attempt": 1, "step": 3, "name": "sample/Once", "text": "upon\na time"},
    ]


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path, monkeypatch):
    sink = JsonlSink(SinkPlace(run=tmp_path, own=tmp_path), JsonlOptions())
    sink.scalars(1, 16, {"x": 1.0})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    file = sink._file

    class Full:
        seek, truncate = file.seek, file.truncate
        write = staticmethod(lambda line: os.write(file.fileno(), line[:5]))

    monkeypatch.setattr(sink, "_file", Full)
    with pytest.raises(OSError, match="only 5 of"):
        sink.scalars(2, 32, {"x": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_the_run_file_names_sinks_and_their_settings(tmp_path):
    (tmp_path / "a").mkdir()
    good = planted(tmp_path / "a", "[sinks.jsonl]\nfile = 'rows.jsonl'\nclose_seconds = 3\n")
    run = load_run(good.config)
    sink, limits = make_sink(good, run, "jsonl")
    assert isinstance(sink, JsonlSink) and limits.close_seconds == 3.0 and (good.root / "rows.jsonl").exists()
    assert run.training_sha256() == load_run(good.config, ["sinks.jsonl.file='other.jsonl'"]).training_sha256()
    wrong = ["sinks.jsonl.files", "sinks.jsonl.timeout_seconds", "sinks.wand", "sinks.prometheus.port"]
    bad = "[sinks.jsonl]\nfiles = 'x'\ntimeout_seconds = 0\n[sinks.wand]\n[sinks.prometheus]\nport = 0\n"
    with refused("E-CONFIG-SETTINGS", keys=wrong):
        load_run(planted(tmp_path, bad).config)
