"""The alerts that the log of a run gives, computed anew: nothing is sent, and nothing is written."""

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.config import load
from ingot.events import NewEvents
from ingot.observe.alerts.disks import DISK_EVENT
from ingot.observe.alerts.outbox import read_lines
from ingot.observe.alerts.rules import AlertRules
from ingot.observe.alerts.run_state import time_of
from ingot.observe.alerts.sink import UNREAD, read_plan
from ingot.schema.alert_record import AlertRecord
from ingot.schema.run import RunConfig
from ingot.schema.run_folder import RunFolder
from ingot.theory.rules import recorded_run

_MOST_BYTES = 16 << 20  # of the log, read at a time


@dataclass(kw_only=True)
class Replay:
    """The records of a replay, and the number of events that lacked what their kind has."""

    records: list[AlertRecord] = field(default_factory=list)
    unreadable: int = 0


def replay(folder: RunFolder, overrides: Sequence[str] = (), *, running: bool) -> Replay:
    """Return what would have fired. overrides: other settings, as "alerts.mfu_least=0.4". running: the run goes on, so
    the time since its last event counts. Raises ConfigError."""
    run = load(RunConfig, folder.config, overrides) if overrides else recorded_run(folder.config)
    rules, found = AlertRules(run, read_plan(folder), str(folder.root)), Replay()
    for event in _in_order(folder):
        found.records += rules.take(event)
    if rules.last_time is not None:
        found.records += rules.tick(time.time()) if running else rules.end(rules.last_time)
    found.unreadable = rules.unreadable
    return found


def _in_order(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the events of a log, and what was measured of disks meanwhile, by their time."""
    disks = [line for line in read_lines(folder.alerts) if line.get("kind") == DISK_EVENT and time_of(line) is not None]
    yield from heapq.merge(_events(folder), disks, key=lambda event: time_of(event) or 0.0)


def _events(folder: RunFolder) -> Iterator[dict[str, Any]]:
    log, before = NewEvents(folder.events, without=UNREAD, most_bytes=_MOST_BYTES), -1
    while log.position > before:
        before = log.position
        yield from log.read()
