"""Alerts as a reader of a run's events: `AlertSink` takes them one by one, and the time when none comes."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.config import from_dict
from ingot.errors import IngotError
from ingot.observe.alerts.channels import ALERTMANAGER_SECONDS, channels_of
from ingot.observe.alerts.disks import DISK_EVENT, DiskLooks
from ingot.observe.alerts.outbox import Outbox, is_news, read_lines, said_on
from ingot.observe.alerts.rules import AlertRules
from ingot.schema import events
from ingot.schema.alert_record import FIRED, RESOLVED, AlertRecord, record_of, summarized
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run

UNREAD = (
    events.STEP,
    events.EXPERTS,
    events.GRADIENT_RANGE,
    events.MEASURED,
    events.SAMPLE,
)  # kinds that the rules do not need
_DISK_SECONDS, _DISK_LINE_SECONDS = 60.0, 600.0  # between two looks at a disk, and two lines about it
_OUT = 1


def read_plan(folder: RunFolder) -> Plan | None:
    """Return the plan of a run; None if it has none that can be read."""
    try:
        return from_dict(Plan, json.loads(folder.plan.read_bytes()))
    except (OSError, ValueError, RecursionError, IngotError):
        return None


class AlertSink:
    """The alerts of the run in the folder `run`, while it runs. out: the file descriptor of lines for people.

    Its caller gives it the whole log from the first event on, also when the run goes on: what fired before, by
    alerts.jsonl, does not fire again. `idle` is called when all events were given, and then once in a second or so.
    """

    def __init__(self, run: Path, out: int = _OUT):
        self._folder = RunFolder(run)
        self._config: RunConfig = recorded_run(self._folder.config)
        self._rules = AlertRules(self._config, read_plan(self._folder), str(run))
        lines = read_lines(self._folder.alerts)
        self._disk_lines = [line for line in lines if line.get("kind") == DISK_EVENT]
        known = []
        for line in lines:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                known.append(record_of(line))
        self._fired_before = Counter((record.id, record.state) for record in known)
        self._known = summarized(known)
        self._outbox = Outbox(self._folder, channels_of(self._config, self._folder, out), lines, said_on(out))
        self._caught_up = False
        self._old: list[AlertRecord] = []  # what fires while events of earlier are read
        disks = [Path(disk) for disk in self._config.checkpoint.disks if "{" not in disk]
        self._disks, self._answers = DiskLooks([self._folder.root, *disks]), dict[str, str]()
        self._arrived = self._asked_disk = time.monotonic()
        self._sent_again = self._disk_line = float("-inf")

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in the next event of the log."""
        self._arrived = time.monotonic()
        while not self._caught_up and self._disk_lines and _earlier(self._disk_lines[0], event):
            self._take(self._rules.take(self._disk_lines.pop(0)))
        self._take(self._rules.take(event))

    def idle(self) -> None:
        """Take in that time passes without an event. The clock of the run is that of its log."""
        if not self._caught_up:
            self._catch_up()
        now = time.monotonic()
        if self._rules.last_time is None:
            return
        at = self._rules.last_time + (now - self._arrived)
        self._take(self._rules.tick(at))
        if now - self._asked_disk >= _DISK_SECONDS:
            self._asked_disk = now
            self._disks.ask()
        self._take_disks(at, now)
        if now - self._sent_again >= ALERTMANAGER_SECONDS:
            self._sent_again = now
            self._outbox.send_again(self._rules.open)

    def close(self, seconds: float, *, ended: bool) -> None:
        """Send what waits, for at most `seconds`. ended: the launcher is gone, so the run has ended, well or not."""
        if not self._caught_up:
            self._catch_up()
        if ended and self._rules.last_time is not None:
            self._take(self._rules.end(self._rules.last_time + (time.monotonic() - self._arrived)))
        self._outbox.close(seconds)

    def _take(self, records: list[AlertRecord]) -> None:
        for record in records:
            key = record.id, record.state
            if self._fired_before[key] > 0:
                self._fired_before[key] -= 1
            elif self._caught_up:
                self._outbox.add(record)
            else:
                self._old.append(record)

    def _catch_up(self) -> None:
        """Go on with the alerts of before: open ones stay open under their ids, and what was missed is written, and
        sent if it is news or not over."""
        self._caught_up = True
        begun = {own.last.id for own in self._known}
        earlier = {(own.last.kind, own.last.subject): own.last for own in self._known if own.over is None}
        still_open = {record.id for record in self._rules.open}
        for record in self._old:
            key = record.kind, record.subject
            if (known := earlier.get(key)) is not None:  # it may be known from another measurement
                own, record = record, replace(record, id=known.id, began=known.began, since=known.since)
                if record.state == RESOLVED:
                    del earlier[key]
                elif own.id != known.id and own.severity == known.severity:
                    continue
                else:
                    earlier[key] = record
            is_begin = record.state == FIRED
            # An end is news if its begin was sent.
            send = is_news(record) or record.id in still_open if is_begin else record.id in begun
            begun |= {record.id} if send else set()
            self._outbox.add(record, send=send)
        fired = {record.id for record in self._old if record.state == FIRED}
        over = {own.last.id for own in self._known if own.over is not None} - fired
        for record in self._rules.open:
            if record.id in over:  # the end of a launcher, which no log shows, ended it
                self._rules.forget(record)
        for record in earlier.values():
            self._rules.adopt(record)
        self._old.clear()
        self._fired_before.clear()
        self._known.clear()

    def _take_disks(self, at: float, now: float) -> None:
        """Take in what disks have answered. A line of it is written every ten minutes, and when a disk begins or ceases
        to answer, or to answer with an error, so that a replay has it."""
        is_due, written = now - self._disk_line >= _DISK_LINE_SECONDS, False
        for answer in self._disks.answers():
            event, path = answer | {"time": at}, answer["path"]
            kind = "silent" if "silent_seconds" in answer else answer.get("error", "")
            self._take(self._rules.take(event))
            if is_due or kind != self._answers.get(path, ""):
                self._outbox.write(event)
                written = True
            self._answers[path] = kind
        if is_due and written:
            self._disk_line = now


def _earlier(line: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    try:
        return line["time"] <= event["time"]
    except (KeyError, TypeError):
        return True
