"""alerts.jsonl of a run folder: what alerted people, and what was over again, one JSON object per line. No torch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FIRED = "fired"
RESOLVED = "resolved"
CRITICAL = "critical"
WARNING = "warning"
Severity = Literal["critical", "warning"]


@dataclass(frozen=True, kw_only=True)
class AlertRecord:
    """An alert that fired, goes on, or is over.

    id: the same for all records of one alert. kind: as in observe/alerts/kinds.py. subject: the rank, machine or source
    that it is about; "": the run. state: FIRED, also when it goes on; RESOLVED. time: Unix seconds of this record.
    began: of the first sign. step: the newest step of the run. since: the first step that shows it; None without one.
    value, limit: the figure, and the one that it is compared with; None without one. evidence: a sentence. next: the
    command that helps. more: how often this kind of alert came since the last record of it. usd_per_hour: what each
    hour of it costs; None if the price is unknown, or nothing is lost.
    """

    id: str
    kind: str
    subject: str
    severity: Severity
    state: Literal["fired", "resolved"]
    time: float
    began: float
    step: int
    since: int | None = None
    value: float | None = None
    limit: float | None = None
    evidence: str
    next: str
    more: int = 0
    usd_per_hour: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)


_TEXTS = ("id", "kind", "subject", "evidence", "next")
YEAR_5000_SECONDS = 95_617_584_000
_STATES, _SEVERITIES = (FIRED, RESOLVED), (CRITICAL, WARNING)


def record_of(values: Mapping[str, Any]) -> AlertRecord:
    """Return the record of a line. Raises KeyError, TypeError, ValueError or OverflowError for other values."""
    if values["state"] not in _STATES or values["severity"] not in _SEVERITIES:
        raise ValueError(f"state {values['state']!r}, severity {values['severity']!r}")
    time, began = float(values["time"]), float(values["began"])
    if not (0 <= time < YEAR_5000_SECONDS and 0 <= began < YEAR_5000_SECONDS):  # which no clock shows; also NaN
        raise ValueError(f"time {time}, began {began}")
    number = lambda name: None if values.get(name) is None else float(values[name])  # noqa: E731
    return AlertRecord(
        **{name: str(values[name]) for name in _TEXTS},
        severity=values["severity"],
        state=values["state"],
        time=time,
        began=began,
        step=int(values["step"]),
        since=None if values.get("since") is None else int(values["since"]),
        value=number("value"),
        limit=number("limit"),
        more=int(values.get("more", 0)),
        usd_per_hour=number("usd_per_hour"),
    )


def read_records(path: Path) -> Iterator[AlertRecord]:
    """Yield the records of `path` in order; without those that cannot be read, and without other lines."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield record_of(json.loads(line))
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
                continue


@dataclass(kw_only=True)
class ShownAlert:
    """An alert with all its records. last: the newest that fired. over: Unix seconds of its end; None: it is open.
    count: how often it came."""

    last: AlertRecord
    over: float | None = None
    count: int = field(default=1)


def summarized(records: Iterable[AlertRecord]) -> list[ShownAlert]:
    """Return one entry per alert, in the order in which they fired first."""
    found: dict[str, ShownAlert] = {}
    for record in records:
        add_record(found, record)
    return list(found.values())


def add_record(found: dict[str, ShownAlert], record: AlertRecord) -> None:
    """Add the next record to the entries in `found`, by id."""
    own = found.get(record.id)
    if own is None:
        found[record.id] = ShownAlert(last=record, over=record.time if record.state == RESOLVED else None)
    elif record.state == RESOLVED:
        own.over, own.count = record.time, own.count + record.more
    else:
        own.last, own.over, own.count = record, None, own.count + 1 + record.more
