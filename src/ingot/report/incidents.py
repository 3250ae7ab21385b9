"""The incidents of a run, in words for people: faults, restarts, measures of the guard, saves that failed.

The timeline of the report has what guards found and did; here is all that is marked on a chart of the page.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingot.report.render.page import Section, TableBlock
from ingot.report.timeline import KINDS, entry_of
from ingot.schema import events as kinds
from ingot.units import format_seconds

MOST_INCIDENTS = 5_000  # that are kept, the newest
_SHOWN = 100
Severity = Literal["bad", "warn", "info"]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """Something to mark at `step`. time: Unix seconds. kind: of its event. text: a sentence, without the step."""

    step: int
    time: float
    kind: str
    severity: Severity
    text: str


def incidents_section(found: Sequence[Incident], total: int) -> Section | None:
    """Return the newest incidents as a table, newest first; None without any. total: how many there were."""
    if not found:
        return None
    shown = list(found)[-_SHOWN:][::-1]
    rows = [(f"{one.step:,}", time.strftime("%m-%d %H:%M:%S", time.gmtime(one.time)), one.text) for one in shown]
    words = f"All {total:,}" if total == len(shown) else f"The newest {len(shown)} of {total:,}"
    caption = f"{words}, newest first"
    table = TableBlock(("Step", "Time (UTC)", "Incident"), rows, right=(0,), caption=caption)
    return Section("incidents", "Incidents", [table])


def incident_of(event: Mapping[str, Any], step: int) -> Incident | None:
    """Return the incident of an event; None if it has none. step: the newest step of the run, for events that have
    none. Raises AttributeError, KeyError, TypeError or ValueError if the event lacks what its kind has."""
    kind = event["kind"]
    if kind in KINDS:
        entry = entry_of(event)
        if entry is None:
            return None
        return Incident(step=entry.step, time=entry.time, kind=kind, severity=_of_guard(kind), text=entry.text)
    if (own := _TEXTS.get(kind)) is None or (text := own[1](event)) is None:
        return None
    at = event.get("step")
    at = at if isinstance(at, int) and at >= 0 else step
    return Incident(step=at, time=float(event["time"]), kind=kind, severity=own[0], text=text)


def _of_guard(kind: str) -> Severity:
    if kind in (kinds.STATE_DAMAGED, kinds.ROLLED_BACK):
        return "bad"
    return "info" if kind in (kinds.LISTED, kinds.STATE_REPLAYED, kinds.GUARD_REPLAYED) else "warn"


def _fault(event: Mapping[str, Any]) -> str:
    rank = event.get("rank")
    who = "the job" if rank is None or rank < 0 else f"rank {rank:d}"
    return f"fault: {who} {event.get('cause') or 'was lost'}"


def _restart(event: Mapping[str, Any]) -> str:
    wait = event.get("wait_seconds")
    after = f" after a pause of {format_seconds(wait)}" if wait else ""
    return f"restart {event['attempt']}: the job starts again{after}"


def _straggler(event: Mapping[str, Any]) -> str:
    where = f"rank {event['rank']:d} on {event.get('host', '')}"
    if event.get("ended"):
        return f"{where} is as fast as its peers again"
    return f"{where} takes {event['factor']:.1f} times as long as its peers ({event['phase']})"


def _node(event: Mapping[str, Any]) -> str | None:
    if event["action"] not in ("lost", "drained"):
        return None
    reason = event.get("reason")
    return f"machine {event.get('host')} was {event['action']}" + (f": {reason}" if reason else "")


def _layout(event: Mapping[str, Any]) -> str:
    return f"the job changes its layout: {' '.join(map(str, event['overrides'])) or 'that of the run file'}"


_TEXTS: dict[str, tuple[Severity, Callable[[Mapping[str, Any]], str | None]]] = {
    kinds.FAULT: ("bad", _fault),
    kinds.RESTART: ("warn", _restart),
    kinds.PLANNED_RESTART: ("info", lambda event: f"planned restart: {event['reason']}"),
    kinds.STRAGGLER: ("warn", _straggler),
    kinds.NODE: ("bad", _node),
    kinds.SPARES: ("warn", lambda event: f"{event['waiting']:d} of {event['wanted']:d} spare machines wait"),
    kinds.HEALTH: ("warn", lambda event: f"machine {event['node']}: {event['words']}"),
    kinds.LAYOUT: ("info", _layout),
    kinds.DRILL: ("info", lambda event: f"a drill {event['action']}s rank {event.get('rank')}"),
    kinds.DATA_TROUBLE: ("warn", lambda event: f"rank {event['rank']:d} read token shards late: {event['reason']}"),
    kinds.CHECKPOINT_FAILED: ("warn", lambda event: f"a save failed: {event['reason']}"),
    kinds.CHECKPOINT_REFUSED: ("bad", lambda event: f"a checkpoint was refused: {event['reason']}"),
    kinds.CHECKPOINT_NOT_STORED: ("warn", lambda event: f"an upload failed: {event['reason']}"),
    kinds.SETTING_CHANGED: ("info", lambda event: f"{event['key']} = {event['new']} (was {event['old']})"),
    kinds.STOPPED: ("info", lambda event: f"stopped: {event['reason']}"),
    kinds.FINISHED: ("info", lambda event: "finished"),
}
MARKED = frozenset((*KINDS, *_TEXTS))  # the kinds of events that have an incident
