"""The process of alerts on a log that grows: it resumes, ends with its launcher, and says what `ingot alerts` shows."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from tests.expect import reported
from tests.unit.observe.conftest import HOSTILE, History, plan_of, run_of
from tests.unit.observe.servers import http_server
from tests.unit.observe.test_rules import FAULT, FINDING, SLOW

from ingot.cli.main import main
from ingot.config import to_dict, to_toml
from ingot.events import NewEvents
from ingot.observe.alerts import kinds, outbox
from ingot.observe.alerts.sink import UNREAD, AlertSink
from ingot.schema import events
from ingot.schema.alert_record import FIRED, RESOLVED, read_records, summarized
from ingot.schema.alerting import Alerts, UrlChannel
from ingot.schema.run import Data
from ingot.schema.run_folder import RunFolder
from ingot.storage import write_json
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.observing import observers_of, observing

ALERTS = Alerts(terminal=True, webhook=UrlChannel(url_env="HOOK"))


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "demo")
    folder.root.mkdir()
    return folder


def begin(folder: RunFolder, alerts: Alerts = ALERTS, **changes) -> History:
    """A run of just now, in the folder, without its first lines."""
    run = run_of(alerts, **changes)
    folder.config.write_text(to_toml(run))
    history = History(run)
    history.time = history.events[0]["time"] = time.time() - 60
    return history


def write(folder: RunFolder, history: History) -> None:
    """Append the events of the history to the log, and forget them."""
    with folder.events.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in history.events)
    history.events.clear()


def sink_of(folder: RunFolder, out: int) -> AlertSink:
    """A sink that has read the log so far."""
    sink = AlertSink(folder.root, out)
    for event in NewEvents(folder.events, without=UNREAD).read():
        sink.event(event)
    sink.idle()
    return sink


@pytest.fixture
def out():
    """The file descriptor of a terminal, and a function that returns its lines so far."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def lines() -> list[str]:
        try:
            return os.read(read, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    yield write, lines
    os.close(read)
    os.close(write)


def received(server) -> list[tuple[str, str]]:
    return [(one["kind"], one["state"]) for _, body, _ in server.got for one in body["alerts"]]


def wait_for(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def process_of(folder: RunFolder, url: str):
    command = [sys.executable, "-m", "ingot.observe.alerts", "--supervised", str(folder.root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, env=os.environ | {"HOOK": url}) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_process_sends_resumes_after_a_kill_and_reports_the_end_of_its_launcher(folder):
    history = begin(folder)
    history.lines(2)
    history.event(events.FINDING, **FINDING)
    write(folder, history)
    with http_server(200) as server:
        secret = f"{server.url}/s3cr3t"
        with process_of(folder, secret) as process:
            wait_for(lambda: folder.alerts_sent.exists() and "webhook" in folder.alerts_sent.read_text())
            assert received(server) == [(kinds.SPIKE, FIRED)]
            process.kill()
        history.event(events.FAULT, **FAULT)  # while nobody looks
        history.line()
        history.event(events.STRAGGLER, **SLOW)
        write(folder, history)
        with process_of(folder, secret) as process:
            lost = [(kinds.RANK_LOST, FIRED), (kinds.RANK_LOST, RESOLVED)]
            wait_for(lambda: received(server)[1:] == [*lost, (kinds.STRAGGLER, FIRED)])
            history.event(events.STRAGGLER, **SLOW | {"ended": True})
            write(folder, history)
            wait_for(lambda: received(server)[4:] == [(kinds.STRAGGLER, RESOLVED)])
            shown, _ = process.communicate(timeout=60)  # its standard input is closed: the launcher is gone
            assert process.returncode == 0
        assert received(server)[5:] == [(kinds.SPIKE, RESOLVED), (kinds.RUN_ENDED, FIRED)]
    assert [one.kind for one in read_records(folder.alerts)] == [kind for kind, _ in received(server)]
    assert len(re.findall(rb"^alert     ", shown, re.MULTILINE)) == 6
    assert b"s3cr3t" not in shown + b"".join(path.read_bytes() for path in folder.root.iterdir())


def test_a_run_that_ends_well_ends_its_process_without_an_alert(folder):
    history = begin(folder)
    history.lines(20)
    history.event(events.FINISHED, step=200, tokens=1, seconds=1.0)
    write(folder, history)
    with http_server(200) as server, process_of(folder, server.url) as process:
        assert process.communicate(timeout=60) == (b"", None) and server.got == []
    assert list(read_records(folder.alerts)) == []


def test_an_alert_that_was_open_at_the_end_is_over_when_the_run_goes_on(folder, out):
    history = begin(folder, Alerts(terminal=True))
    history.lines(2)
    write(folder, history)
    sink = sink_of(folder, out[0])
    sink.close(10, ended=True)
    history.start(from_step=20)
    write(folder, history)
    sink = sink_of(folder, out[0])
    history.line()
    for event in history.events:
        sink.event(event)
    sink.close(10, ended=False)
    assert [one.state for one in read_records(folder.alerts)] == [FIRED, RESOLVED]
    assert [line.split(":")[0] for line in out[1]()] == ["alert     critical", "alert     resolved"]


def test_old_trouble_is_written_and_sent_to_nobody_if_it_is_over(folder, out):
    history = begin(folder, Alerts(terminal=True))
    history.time -= 1e6
    history.events[0]["time"] = history.time
    history.lines(2)
    history.event(events.FAULT, **FAULT)
    history.start(from_step=10)
    history.line()
    history.event(events.STRAGGLER, **SLOW)
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    assert [one.state for one in read_records(folder.alerts)] == [FIRED, RESOLVED, FIRED]
    (line,) = out[1]()
    assert "straggler (rank 1)" in line  # it is not over
    folder.alerts_sent.unlink()
    text = re.sub(r'"time": [\d.]+', f'"time": {time.time()}', folder.alerts.read_text())
    folder.alerts.write_text(text)  # young, so only the mark keeps the next process from sending them
    sink_of(folder, out[0]).close(10, ended=False)
    assert len(out[1]()) == 1


def test_a_drift_of_the_shares_that_the_run_records_is_an_alert(folder, out):
    history = begin(folder, Alerts(terminal=True), data=Data(tokens="t", weights={"web": 1.0, "books": 99.0}))
    for _ in range(3):
        history.event(events.SOURCES, step=1, loss={"web": 2.0}, share={"web": 0.5})
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    assert [(one.kind, one.subject) for one in read_records(folder.alerts)] == [(kinds.MIX_DRIFT, "web")]


def test_time_that_passes_without_an_event_is_an_alert(folder, out, monkeypatch):
    history = begin(folder, Alerts(terminal=True))
    history.lines(2)
    write(folder, history)
    sink = sink_of(folder, out[0])
    clock = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: clock + 601)
    sink.idle()
    for thread in threading.enumerate():
        if thread.name == "alerts-disk":
            thread.join()
    sink.idle()  # which takes in what the disk answered
    monkeypatch.undo()
    assert [one.kind for one in read_records(folder.alerts)] == [kinds.RUN_SILENT]
    sink.close(10, ended=False)
    lines = [line for line in folder.alerts.read_text().splitlines() if '"disk"' in line]
    assert json.loads(lines[0])["free_bytes"] > 0 and str(folder.root) == json.loads(lines[0])["path"]


def test_a_record_that_was_written_and_not_sent_is_sent_by_the_next_process(folder, out):
    history = begin(folder, Alerts(terminal=True))
    history.lines(2)
    history.event(events.FINDING, **FINDING)
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    assert len(out[1]()) == 1 and json.loads(folder.alerts_sent.read_text()) == {"terminal": 1}
    folder.alerts_sent.unlink()  # as if the process had been killed before
    sink_of(folder, out[0]).close(10, ended=False)
    assert len(out[1]()) == 1
    sink_of(folder, out[0]).close(10, ended=False)
    assert out[1]() == [] and len(list(read_records(folder.alerts))) == 1


def test_alerts_are_sent_although_the_disk_takes_nothing(folder, out):
    history = begin(folder, Alerts(terminal=True))
    history.lines(2)
    history.event(events.FINDING, **FINDING)
    history.event(events.STRAGGLER, **SLOW)
    write(folder, history)
    folder.alerts.symlink_to("missing/alerts.jsonl")
    sink_of(folder, out[0]).close(10, ended=False)
    lines = out[1]()
    assert len([line for line in lines if "cannot be written" in line]) == 1 and len(lines) == 3


def test_the_file_of_alerts_is_bounded(folder, out, monkeypatch):
    monkeypatch.setattr(outbox, "_MOST_BYTES", 20_000)
    history = begin(folder, Alerts(terminal=True, most=1000))
    history.lines(2)
    for rank in range(60):
        history.event(events.STRAGGLER, **SLOW | {"rank": rank})
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    assert folder.alerts.stat().st_size <= 20_000
    assert [one.subject for one in read_records(folder.alerts)][-1] == "rank 59"


# -- ingot alerts --


def alerts_of(folder: RunFolder, capsys, *options: str) -> dict:
    assert main(["alerts", str(folder.root), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_replay_with_other_limits_and_a_log_with_damage(folder, capsys):
    history = begin(folder, Alerts())
    history.lines(2)
    history.lines(5, mfu=0.4)
    history.event(events.STRAGGLER, **SLOW | {"host": HOSTILE})
    history.lines(20)
    write(folder, history)
    with folder.events.open("a") as file:
        # of another version, and torn
        file.write(f'{{"kind": "straggler", "time": {history.time}}}\n{{"kind": "progr')
    found = alerts_of(folder, capsys)  # no channel: computed from the log
    assert [one["kind"] for one in found["alerts"]] == [kinds.STRAGGLER, kinds.RUN_ENDED]
    assert (found["replayed"], found["unreadable_events"]) == (True, 1)
    found = alerts_of(folder, capsys, "--replay", "--set", "alerts.mfu_least=0.42")
    (low, *_) = found["alerts"]
    assert (low["kind"], low["limit"], low["over"] is not None) == (kinds.LOW_MFU, 0.42, True)
    assert main(["alerts", str(folder.root)]) == 0
    shown = capsys.readouterr().out
    assert "straggler (rank 1)" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert f"ingot explain slow {folder.root}" in shown
    assert not folder.alerts.exists()


def test_the_plan_of_the_run_is_what_its_speed_is_compared_with(folder, capsys):
    history = begin(folder, Alerts())
    write_json(folder.plan, to_dict(plan_of(history.run, 0.5)))
    history.lines(9)
    history.event(events.FINISHED, step=90, tokens=1, seconds=1.0)
    write(folder, history)
    assert [one["kind"] for one in alerts_of(folder, capsys)["alerts"]] == [kinds.THROUGHPUT]
    folder.plan.write_text("{}")
    assert alerts_of(folder, capsys)["alerts"] == []


def test_alerts_that_were_sent_are_shown_from_their_file(folder, capsys):
    history = begin(folder, Alerts(terminal=True))
    history.lines(2)
    history.event(events.FINDING, **FINDING)
    write(folder, history)
    sink_of(folder, os.open(os.devnull, os.O_WRONLY)).close(10, ended=False)
    folder.events.unlink()
    found = alerts_of(folder, capsys)
    assert (found["replayed"], [one["kind"] for one in found["alerts"]]) == (False, [kinds.SPIKE])
    assert main(["alerts", str(folder.root), "--json", "--set", "alerts.lines=1"]) == 2
    reported(capsys.readouterr().out, "E-ALERTS-SET")


def test_damaged_lines_of_the_file_are_left_out(folder):
    good = {"number": 1, "id": "a", "kind": "spike", "subject": "", "severity": "warning", "state": "fired",
            "time": 1.0, "began": 1.0, "step": 3, "evidence": "e", "next": "n"}  # fmt: skip
    bad = ["{", "[]", "3", json.dumps(good | {"state": "x"}), json.dumps(good | {"time": "x"}), '{"kind": "disk"}']
    lines = [
        *bad,
        json.dumps(good),
        json.dumps(good | {"more": 4}),
        json.dumps(good | {"state": "resolved", "time": 9}),
    ]
    folder.alerts.write_text("\n".join(lines))
    (found,) = summarized(read_records(folder.alerts))
    assert (found.count, found.over, found.last.more) == (6, 9.0, 4)


# -- the launcher --


def test_the_launcher_starts_a_process_only_for_a_channel_and_ends_it(folder):
    history = begin(folder)
    write(folder, history)
    assert observers_of(folder, run_of(), quiet=True) == []
    (alerts,) = observers_of(folder, run_of(Alerts(terminal=True)), quiet=True)
    lines = []
    with PendingSignals() as signals, observing(folder, [alerts], signals, lines.append):
        wait_for(lambda: (folder.root / "logs" / "alerts.log").exists())
    assert lines == [] and [one.kind for one in read_records(folder.alerts)] == [kinds.RUN_ENDED]
