"""The rules of alerts: a state machine that takes events and the time, and returns records of what fired and is over.

It reads no file and no clock, so that a log gives the same alerts while it grows and afterwards. `step` events, most of
a log, change nothing here and need not be parsed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ingot.observe.alerts import kinds
from ingot.observe.alerts.disks import DISK_EVENT
from ingot.observe.alerts.incidents import End, Incidents, Instant, Sign
from ingot.observe.alerts.limits import LimitRules
from ingot.observe.alerts.run_state import RunState, finite, time_of
from ingot.observe.alerts.verdicts import Verdict, VerdictRules
from ingot.schema import events
from ingot.schema.alert_record import AlertRecord
from ingot.schema.plan import Plan
from ingot.schema.run import RunConfig

# Kinds of events that the launcher writes, or the first ranks of it.
_FIRST_KINDS = {
    *(events.RUN_STARTED, events.RANK_STARTED, events.FLEET_CHECK, events.NODE, events.LAYOUT),
    *(events.LEASE_RECORDED, events.LEASE_NOT_RECORDED, events.CHECKPOINT_FETCHED),
}
_BROKEN = (AttributeError, KeyError, TypeError, ValueError, OverflowError, IndexError)


class AlertRules:
    """The alerts of a run. run_dir: for commands. unreadable: the number of events that lacked what their kind has."""

    def __init__(self, run: RunConfig, plan: Plan | None, run_dir: str):
        self._state = RunState(run)
        self._verdicts = VerdictRules(run, self._state)
        self._limits = LimitRules(run, plan, self._state)
        self._incidents = Incidents(run_dir, run.alerts)
        self.unreadable = 0

    @property
    def open(self) -> list[AlertRecord]:
        """The alerts that fired and are not over."""
        return self._incidents.open

    @property
    def last_time(self) -> float | None:
        """Unix seconds of the newest event; None before the first."""
        return self._state.last_time

    def adopt(self, record: AlertRecord) -> None:
        """Take in an alert that fired earlier and is not over: it ends as others do. If these rules have it, too, it
        keeps its earlier id."""
        self._incidents.adopt(record, self._state.now)

    def forget(self, record: AlertRecord) -> None:
        """Take in that an alert which these rules have was over before, by what its record shows."""
        self._incidents.forget(record)

    def take(self, event: Mapping[str, Any]) -> list[AlertRecord]:
        """Take in the next event of the log. Events that cannot be read are counted and have no effect."""
        if (time := time_of(event)) is None:
            self.unreadable += 1
            return []
        kind = event["kind"]
        if kind == DISK_EVENT:
            return self._disk(event, time)
        # Between two launchers, nobody trained and nobody was silent.
        records = [] if kind in _FIRST_KINDS and not event.get("attempt") else self.tick(time)
        self._state.pass_to(time, kind)
        try:
            self._state.take(event)
            verdicts = [*self._verdicts.of(event), *self._limits.of(event)]
        except _BROKEN:
            self.unreadable += 1
            return records
        records += self._record(verdicts, self._state.now)
        if kind == events.PROGRESS:
            records += self._incidents.quiet(self._state.now)
        if self._incidents.is_open(kinds.RUN_SILENT):
            records += self._incidents.end(End(kinds.RUN_SILENT, why="events come again"), self._state.now)
        if events.ends_run(kind, event):
            why = "the run has finished" if kind == events.FINISHED else "the run was stopped"
            but = {kinds.OVER_BUDGET, kinds.GUARD_STOPPED, kinds.NOT_STORED}
            records += self._incidents.end_all(self._state.now, why, but=frozenset(but))
        return records

    def tick(self, time: float) -> list[AlertRecord]:
        """Let time pass to `time` (Unix seconds) without an event."""
        return self._record(self._limits.ages(time), self._state.at(time))

    def end(self, time: float) -> list[AlertRecord]:
        """Report that the launcher has ended. A run that neither finished nor stopped on request ended in a fault."""
        if not self._state.alive:
            return []
        now = self._state.at(time)
        lasting = frozenset(kind for kind, own in kinds.KINDS.items() if not own.of_a_running_run)
        records = self._incidents.end_all(now, "the run ended", but=lasting)
        evidence = f"the run ended at step {self._state.step:,}, neither finished nor stopped on request"
        return records + self._record([Sign(kind=kinds.RUN_ENDED, evidence=evidence, since=self._state.step)], now)

    def _disk(self, event: Mapping[str, Any], time: float) -> list[AlertRecord]:
        path, now = str(event.get("path", "")), self._state.at(time)
        if (silent := finite(event.get("silent_seconds"))) is not None:
            return self._record(self._limits.silent_disk(path, silent), now)
        if isinstance(error := event.get("error"), str):
            return self._record(self._limits.broken_disk(path, error, str(event.get("words"))), now)
        if (free := finite(event.get("free_bytes"))) is None:
            self.unreadable += 1
            return []
        return self._record(self._limits.disk(path, free, now.elapsed), now)

    def _record(self, verdicts: Iterable[Verdict], now: Instant) -> list[AlertRecord]:
        records = []
        for one in verdicts:
            records += self._incidents.add(one, now) if isinstance(one, Sign) else self._incidents.end(one, now)
        return records
