"""The section of a report on alerts: what alerted people, from alerts.jsonl."""

import time
from collections.abc import Sequence

from ingot.report.facts import RunData
from ingot.report.render.page import Block, Section, TableBlock, Text
from ingot.schema.alert_record import ShownAlert, read_records, summarized
from ingot.units import counted, format_seconds

_SHOWN = 50


def alerts_section(data: RunData) -> Section | None:
    """Return the table of alerts; None for a run without any."""
    found = summarized(read_records(data.folder.alerts))
    return Section("alerts", "Alerts", alert_blocks(found)) if found else None


def alert_blocks(found: Sequence[ShownAlert], left_out: int = 0) -> list[Block]:
    """Return a table of alerts: open ones first, each group newest first. left_out: how many older ones there are."""
    still_open = sum(alert.over is None for alert in found)
    total = len(found) + left_out
    words = f"{still_open:,} open of {counted(total, 'alert')}."
    ordered = sorted(found, key=lambda alert: (alert.over is not None, -alert.last.time))
    shown = ordered[:_SHOWN]
    if total > len(shown):
        words += f" The newest {len(shown)} are shown; `ingot alerts` has all."
    header = ("Alert", "State", "Since step", "Evidence", "What helps")
    return [Text(words), TableBlock(header, [_row(alert) for alert in shown], right=(2,))]


def _row(alert: ShownAlert) -> tuple[str, ...]:
    last = alert.last
    kind = f"{last.kind} ({last.subject})" if last.subject else last.kind
    times = f", {alert.count:,} times" if alert.count > 1 else ""
    if alert.over is None:
        state = f"open, {last.severity}{times}"
    else:
        state = f"over after {format_seconds(max(alert.over - last.began, 0.0))}{times}"
    since = last.step if last.since is None else last.since
    clock = time.strftime("%m-%d %H:%M", time.gmtime(last.began))
    return kind, state, f"{since:,}", f"{clock}: {last.evidence}", last.next
