"""Records of alerts as channels send them: a line, a message, JSON."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ingot.schema.alert_record import RESOLVED, AlertRecord
from ingot.schema.run_folder import RunFolder

VERSION = 1  # of the JSON that a webhook gets


def headline(record: AlertRecord) -> str:
    """Return the first words about an alert: its state or severity, its kind and subject."""
    about = f" ({record.subject})" if record.subject else ""
    return f"{'resolved' if record.state == RESOLVED else record.severity}: {record.kind}{about}"


def sentence(record: AlertRecord) -> str:
    """Return the evidence of an alert, and how many more came."""
    return record.evidence + (f"; {record.more:,} more" if record.more else "")


def line_of(record: AlertRecord) -> str:
    """Return the line of a terminal."""
    following = "" if record.state == RESOLVED else f"   next: {record.next}"
    return f"alert     {headline(record)}: {sentence(record)}{following}"


def message_of(run: str, records: Sequence[AlertRecord]) -> str:
    """Return several alerts as plain text with several lines each."""
    parts = []
    for record in records:
        following = "" if record.state == RESOLVED else f"\n  next: {record.next}"
        parts.append(f"{headline(record)}, step {record.step:,} of {run}\n  {sentence(record)}{following}")
    return "\n\n".join(parts) + "\n"


def as_json(run: str, folder: RunFolder, records: Sequence[AlertRecord]) -> dict[str, Any]:
    """Return several alerts as a webhook gets them."""
    alerts = [record.as_dict() for record in records]
    return {"version": VERSION, "run": run, "folder": str(folder.root), "alerts": alerts}


def as_slack(run: str, records: Sequence[AlertRecord]) -> dict[str, Any]:
    """Return several alerts as an incoming webhook of Slack, Mattermost or Discord takes them.

    `<`, `>` and `&` are escaped, so that no text of a run makes a link or calls people.
    """
    text = "\n".join(
        f"*{_escaped(headline(record))}*  step {record.step:,} of {_escaped(run)}\n{_escaped(sentence(record))}"
        + ("" if record.state == RESOLVED else f"\n`{_escaped(record.next).replace('`', '')}`")
        for record in records
    )
    return {"text": text}


def _escaped(text: str) -> str:
    for mark, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, name)
    return text


def as_alertmanager(run: str, run_id: str, records: Sequence[AlertRecord], until: float) -> list[dict[str, Any]]:
    """Return alerts as Alertmanager's API v2 takes them. run_id: other runs may have the same name. until: Unix
    seconds, the end of one that is not sent again."""
    found = []
    for record in records:
        labels = {
            "alertname": f"Ingot{''.join(word.capitalize() for word in record.kind.split())}",
            "run": run,
            "run_id": run_id,
            "severity": record.severity,
        }
        if record.subject:
            labels["subject"] = record.subject
        ends = record.time if record.state == RESOLVED else until
        found.append(
            {
                "labels": labels,
                "annotations": {"summary": headline(record), "description": sentence(record), "next": record.next},
                "startsAt": _rfc3339(min(record.began, ends - 1)),  # a begin after the end is refused
                "endsAt": _rfc3339(ends),
            }
        )
    return found


def _rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
