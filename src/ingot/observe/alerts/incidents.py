"""The alerts that are open, those that were sent, and those that are only counted: signs in, records for people out.

An alert that goes on is sent again after `repeat_seconds`. Of one kind, at most `most` records of new alerts are sent
in that time; the others are counted in the next one. However many signs come, memory and records stay bounded.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, replace

from ingot.observe.alerts.kinds import KINDS
from ingot.schema.alert_record import CRITICAL, FIRED, RESOLVED, AlertRecord, Severity
from ingot.schema.alerting import Alerts
from ingot.units import format_seconds, format_usd
from ingot.value_names import printable

_ADOPTED_QUIET_STEPS = 1000
_MOST_OPEN = 64  # alerts of a kind that are followed one by one
_LONGEST_SUBJECT, _LONGEST_EVIDENCE = 100, 500


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A sign of trouble. Fields as of AlertRecord. quiet_steps: the alert is over when so many steps have passed
    without another sign; 0: something else ends it. lost: the share of the job's time that is lost while it lasts.
    command: in place of that of the kind. goes_on: it is the same trouble as the sign before, and not one more."""

    kind: str
    evidence: str
    subject: str = ""
    since: int | None = None
    began: float | None = None
    value: float | None = None
    limit: float | None = None
    quiet_steps: int = 0
    lost: float = 0.0
    severity: Severity | None = None
    command: str = ""
    goes_on: bool = False


@dataclass(frozen=True)
class End:
    """The end of the alerts of a kind. subject: of one; None: of all of this kind. why: in words."""

    kind: str
    subject: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Instant:
    """When something was seen. time: Unix seconds, by the log. elapsed: seconds that have passed since the first event;
    a clock that is set back stops it. step: the newest step. usd_per_hour: the price of the job, 0 if unknown."""

    time: float
    elapsed: float
    step: int
    usd_per_hour: float = 0.0


@dataclass
class _Open:
    record: AlertRecord
    quiet_steps: int
    last_step: int
    sent_at: float | None  # elapsed; None: it was only counted
    began_at: float
    more: int = 0


class Incidents:
    """The alerts of a run. run: its folder, for commands."""

    def __init__(self, run: str, alerts: Alerts):
        self._run, self._alerts = run, alerts
        self._open: dict[tuple[str, str], _Open] = {}
        self._sent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=alerts.most))
        self._counted: dict[str, int] = defaultdict(int)
        self._number: dict[str, int] = defaultdict(int)  # of open alerts

    @property
    def open(self) -> list[AlertRecord]:
        """The newest record of each alert that was sent and is not over."""
        return [one.record for one in self._open.values() if one.sent_at is not None]

    def is_open(self, kind: str) -> bool:
        return self._number[kind] > 0

    def adopt(self, record: AlertRecord, now: Instant) -> None:
        """Take in an alert that fired earlier and is not over. It is over after some steps, if nothing else ends it. If
        it is open here, it has that id and that begin from now on."""
        key = record.kind, record.subject
        if (known := self._open.get(key)) is not None:
            last = record if known.sent_at is None else known.record
            known.record = replace(last, id=record.id, began=record.began, since=record.since)
            known.sent_at = now.elapsed if known.sent_at is None else known.sent_at
        elif record.kind in KINDS and key not in self._open and self._number[record.kind] < _MOST_OPEN:
            self._number[record.kind] += 1
            self._open[key] = _Open(record, _ADOPTED_QUIET_STEPS, now.step, now.elapsed, now.elapsed)

    def forget(self, record: AlertRecord) -> None:
        """Forget an alert, without a record of its end."""
        key = record.kind, record.subject
        if key in self._open:
            del self._open[key]
            self._number[record.kind] -= 1

    def add(self, sign: Sign, now: Instant) -> list[AlertRecord]:
        """Take in a sign; return the record to send, or []."""
        subject = printable(sign.subject)[:_LONGEST_SUBJECT].replace("\n", " ")
        key = sign.kind, subject
        if (known := self._open.get(key)) is None:
            return self._begin(key, sign, now)
        known.last_step = now.step
        grown = sign.severity == CRITICAL and known.record.severity != CRITICAL
        if known.sent_at is None and not grown and not self._has_room(sign.kind, now):
            self._counted[sign.kind] += not sign.goes_on
            return []
        if known.sent_at is not None and not grown and now.elapsed - known.sent_at < self._alerts.repeat_seconds:
            known.more += not sign.goes_on
            return []
        again = self._record(sign, subject, now)
        again = replace(again, id=known.record.id, began=known.record.began, since=known.record.since)
        if known.sent_at is None:  # it was one too many at first, and goes on
            self._sent[sign.kind].append(now.elapsed)
            known.more = self._counted.pop(sign.kind, 0)
        return [self._send(known, replace(again, more=known.more), now)]

    def end(self, end: End, now: Instant) -> list[AlertRecord]:
        """Take in the end of alerts; return a record for each that was sent."""
        keys = [key for key in self._open if key[0] == end.kind and end.subject in (None, key[1])]
        return [record for key in keys for record in self._close(key, now, end.why)]

    def end_all(self, now: Instant, why: str, *, but: frozenset[str] = frozenset()) -> list[AlertRecord]:
        """End all alerts but those of the kinds `but`."""
        keys = [key for key in self._open if key[0] not in but]
        return [record for key in keys for record in self._close(key, now, why)]

    def quiet(self, now: Instant) -> list[AlertRecord]:
        """End the alerts whose steps without another sign have passed. To be called when steps are logged."""
        keys = [
            key for key, one in self._open.items() if one.quiet_steps and now.step - one.last_step >= one.quiet_steps
        ]
        return [
            record
            for key in keys
            for record in self._close(key, now, f"no sign for {self._open[key].quiet_steps:,} steps")
        ]

    def _begin(self, key: tuple[str, str], sign: Sign, now: Instant) -> list[AlertRecord]:
        if self._number[sign.kind] >= _MOST_OPEN:
            self._counted[sign.kind] += 1
            return []
        self._number[sign.kind] += 1
        record = self._record(sign, key[1], now)
        known = self._open[key] = _Open(record, sign.quiet_steps, now.step, None, now.elapsed)
        if not self._has_room(sign.kind, now):
            self._counted[sign.kind] += 1
            return []
        self._sent[sign.kind].append(now.elapsed)
        return [self._send(known, replace(record, more=self._counted.pop(sign.kind, 0)), now)]

    def _has_room(self, kind: str, now: Instant) -> bool:
        """Return whether fewer alerts of a kind than may be sent in `repeat_seconds` were."""
        sent = self._sent[kind]
        return len(sent) < (sent.maxlen or 0) or now.elapsed - sent[0] >= self._alerts.repeat_seconds

    def _send(self, known: _Open, record: AlertRecord, now: Instant) -> AlertRecord:
        known.record, known.sent_at, known.more = record, now.elapsed, 0
        return record

    def _close(self, key: tuple[str, str], now: Instant, why: str) -> list[AlertRecord]:
        known = self._open.pop(key)
        self._number[key[0]] -= 1
        if known.sent_at is None:
            return []
        lasted = format_seconds(max(now.elapsed - known.began_at, 0.0))
        evidence = f"over after {lasted}{f': {why}' if why else ''}"
        more = known.more + self._counted.pop(key[0], 0)
        return [replace(known.record, state=RESOLVED, time=now.time, step=now.step, evidence=evidence, more=more)]

    def _record(self, sign: Sign, subject: str, now: Instant) -> AlertRecord:
        kind = KINDS[sign.kind]
        began = now.time if sign.began is None else sign.began
        lost = now.usd_per_hour * min(sign.lost, 1.0) if sign.lost > 0 else 0.0
        evidence = printable(sign.evidence).replace("\n", " ")
        evidence = evidence if len(evidence) <= _LONGEST_EVIDENCE else f"{evidence[:_LONGEST_EVIDENCE]}..."
        if lost:
            evidence += f"; {format_usd(lost)} of each hour is lost"
        first = now.step if sign.since is None else sign.since
        return AlertRecord(
            id=f"{sign.kind}/{subject}/{first}",  # not by a time: each process that reads the log finds the same
            kind=sign.kind,
            subject=subject,
            severity=sign.severity or kind.severity,
            state=FIRED,
            time=now.time,
            began=began,
            step=now.step,
            since=sign.since,
            value=sign.value,
            limit=sign.limit,
            evidence=evidence,
            next=replace(kind, command=sign.command or kind.command).next(self._run, first),
            usd_per_hour=lost or None,
        )
