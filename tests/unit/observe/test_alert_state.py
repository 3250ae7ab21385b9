"""The state of alerts over several processes: disks that hang or fill, the end of a launcher, a torn file."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
from tests.unit.observe.test_process import begin, folder, out, sink_of, wait_for, write  # noqa: F401
from tests.unit.observe.test_rules import FINDING, SLOW

from ingot.events import NewEvents
from ingot.observe.alerts import disks, kinds
from ingot.observe.alerts import sink as sinks
from ingot.schema import events
from ingot.schema.alert_record import FIRED, RESOLVED, read_records
from ingot.schema.alerting import Alerts

TERMINAL = Alerts(terminal=True)


@pytest.fixture
def disk(monkeypatch):
    """The disk of the run: `free` bytes, once `answers` is set; it is asked all the time."""
    found = SimpleNamespace(free=10**15, error=None, answers=threading.Event())

    def statvfs(path):
        found.answers.wait(20)
        if found.error is not None:
            raise found.error
        return SimpleNamespace(f_bavail=found.free, f_frsize=1, f_blocks=10**15)

    found.answers.set()
    monkeypatch.setattr(disks, "os", SimpleNamespace(statvfs=statvfs))
    monkeypatch.setattr(sinks, "_DISK_SECONDS", 0.0)
    yield found
    found.answers.set()


def records(folder) -> list[tuple[str, str]]:  # noqa: F811
    return [(one.kind, one.state) for one in read_records(folder.alerts)]


def test_a_disk_that_does_not_answer_is_an_alert_and_holds_nothing(folder, out, disk, monkeypatch):  # noqa: F811
    monkeypatch.setattr(disks, "ANSWER_SECONDS", 0.0)
    disk.answers.clear()
    history = begin(folder, TERMINAL)
    history.lines(2)
    write(folder, history)
    sink = sink_of(folder, out[0])
    sink.idle()
    assert records(folder) == [(kinds.DISK_SILENT, FIRED)]
    (fired,) = read_records(folder.alerts)
    assert fired.subject == str(folder.root) and "does not answer" in fired.evidence
    disk.answers.set()
    wait_for(lambda: (sink.idle(), len(records(folder)) == 2)[1])
    assert records(folder)[1] == (kinds.DISK_SILENT, RESOLVED)
    sink.close(10, ended=False)
    again = sink_of(folder, out[0])  # what the file has of disks gives the same once more, and fires nothing
    again.close(10, ended=False)
    assert len(records(folder)) == 2 and len(out[1]()) == 2


def test_a_silent_disk_that_answers_with_an_error_is_another_alert(folder, out, disk, monkeypatch):  # noqa: F811
    monkeypatch.setattr(disks, "ANSWER_SECONDS", 0.0)
    disk.answers.clear()
    history = begin(folder, TERMINAL)
    history.lines(2)
    write(folder, history)
    sink = sink_of(folder, out[0])
    sink.idle()
    disk.error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    disk.answers.set()
    wait_for(lambda: (sink.idle(), len(records(folder)) == 3)[1])
    assert records(folder)[1:] == [(kinds.DISK_SILENT, RESOLVED), (kinds.DISK_ERROR, FIRED)]
    assert '"ESTALE"' in folder.alerts.read_text()  # for a replay
    sink.close(10, ended=False)


def test_an_alert_of_a_disk_keeps_its_id_over_processes_and_is_over_once(folder, out, disk):  # noqa: F811
    history = begin(folder, TERMINAL)
    history.lines(10)  # with a checkpoint, which needs 1,000 bytes
    write(folder, history)
    sink = sink_of(folder, out[0])
    wait_for(lambda: (sink.idle(), '"disk"' in folder.alerts.read_text() if folder.alerts.exists() else False)[1])
    disk.free = 10
    wait_for(lambda: (sink.idle(), records(folder))[1])  # from a measurement that no line has
    sink.close(10, ended=False)
    for _ in range(2):  # the second of them reads the line of the first
        history.lines(5)
        write(folder, history)
        lines = folder.alerts.read_text().count('"disk"')
        sink = sink_of(folder, out[0])
        wait_for(lambda: (sink.idle(), folder.alerts.read_text().count('"disk"') > lines)[1])  # noqa: B023
        assert records(folder) == [(kinds.DISK, FIRED)]
    disk.free = 10**15
    wait_for(lambda: (sink.idle(), len(records(folder)) == 2)[1])
    sink.close(10, ended=False)
    first, last = read_records(folder.alerts)
    assert (last.id, last.state, last.began) == (first.id, RESOLVED, first.began)
    assert first.id == f"disk filling/{folder.root}/100" and len(out[1]()) == 2


def test_the_end_of_a_launcher_ends_the_alerts_that_only_a_running_run_has(folder, out):  # noqa: F811
    history = begin(folder, TERMINAL)
    history.lines(2)
    history.lines(3, mfu=0.3)
    history.event(events.DATA_TROUBLE, rank=0, step=50, path="x", reason="EIO", tries=3, seconds=4.0)
    history.event(events.STRAGGLER, **SLOW)
    history.event(events.QUARANTINED, step=50, shard="web-1", windows=3, found="a hash differs")
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=True)
    ended = {kinds.LOW_MFU, kinds.DATA_TROUBLE, kinds.STRAGGLER}
    found = records(folder)
    assert {kind for kind, state in found if state == RESOLVED} == ended
    assert found[-1] == (kinds.RUN_ENDED, FIRED) and (kinds.DAMAGED_DATA, FIRED) in found
    history.start(from_step=50)
    history.lines(4, mfu=0.3)
    write(folder, history)
    sink = sink_of(folder, out[0])
    before = len(records(folder))
    history.line(mfu=0.3)  # it is as slow as before
    for event in history.events:
        sink.event(event)
    sink.close(10, ended=False)
    low = [one for one in read_records(folder.alerts) if one.kind == kinds.LOW_MFU]
    assert [one.state for one in low] == [FIRED, RESOLVED, FIRED] and low[2].id != low[0].id
    assert {*records(folder)[before:]} == {(kinds.RUN_ENDED, RESOLVED), (kinds.LOW_MFU, FIRED)}


def test_a_torn_line_costs_no_other(folder, out):  # noqa: F811
    history = begin(folder, TERMINAL)
    history.lines(2)
    history.event(events.FINDING, **FINDING)
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    with folder.alerts.open("ab") as file:
        file.write(b'{"number": 2, "id": "straggler/ra')  # of a process that was killed in mid-write
    history.event(events.STRAGGLER, **SLOW)
    write(folder, history)
    sink_of(folder, out[0]).close(10, ended=False)
    assert records(folder) == [(kinds.SPIKE, FIRED), (kinds.STRAGGLER, FIRED)]
    assert len(out[1]()) == 2 and len(NewEvents(folder.events).read()) > 4
