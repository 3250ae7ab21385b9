"""The lines of the board as tables in Markdown: all rows, and what came of each case of some rows."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from ingot.drill.oracles import ORACLES, RED

from .row import Row


class Cases(NamedTuple):
    """A table of the cases of `rows`. down, across: what its rows and its columns are, "fault" and another word."""

    rows: tuple[str, ...]
    down: str
    across: str


CASES = {
    "crash points": Cases(("RS09",), "file: call", "fault"),
    "disk faults": Cases(("RS12",), "fault", "file: call"),
    "store faults": Cases(("RS13", "RS13 killed", "RS31 store"), "fault", "request"),
}


def cases_of(lines: Sequence[dict], cases: Cases) -> str:
    """Return the table of the cases that `lines` of the rows `cases.rows` have; lines without cases add none."""
    cells: dict[tuple[str, str], Counter[str]] = {}
    for line in (line for line in lines if line["id"] in cases.rows):
        for fault, place, outcome, count in line.get("outcomes", []):
            cell = (fault, place) if cases.down == "fault" else (place, fault)
            cells.setdefault(cell, Counter())[outcome] += count
    down, across = (sorted({cell[side] for cell in cells}) for side in (0, 1))
    text = [f"| {cases.down} | {' | '.join(across)} |", "|" + "---|" * (1 + len(across))]
    for one in down:
        found = [cells.get((one, other), Counter()) for other in across]
        text.append(f"| {one} | {' | '.join(_counted(cell) for cell in found)} |")
    return "\n".join(text)


def _counted(outcomes: Counter[str]) -> str:
    found = [f"{count} × {outcome}" for outcome, count in sorted(outcomes.items())]
    return ", ".join(f"**{one}**" if one.endswith(RED) else one for one in found)


def table_of(lines: Sequence[dict]) -> str:
    """Return the table of all rows: those with lines, one row of the table for all seeds, and those that are missing.

    lines: as `Verdicts.as_json` returns them. A red row names its first finding.
    """
    from . import ALL, MISSING

    rows = {row.id: _row(row, [line for line in lines if line["id"] == row.id]) for row in ALL}
    rows |= {name: [name, what, "missing", f"- | {why}"] for name, (what, why) in MISSING.items()}
    head = [
        "row",
        "fault",
        "result",
        "seeds",
        *(o.upper() for o in ORACLES),
        "detect s",
        "recover s",
        "redone",
        "found",
    ]
    empty = len(head) - 4
    text = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in sorted(rows):
        cells = rows[name]
        if name in MISSING:
            cells = [*cells[:3], "", *[""] * (empty - 1), MISSING[name][1]]
        text.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(text)


def _row(row: Row, lines: Sequence[dict]) -> list[str]:
    name, injects = row.id, row.injects
    if not lines:
        reason = row.missing()
        return [name, injects, "not played" if reason else "not run", "0", *[""] * (len(ORACLES) + 3), reason]
    red = [line for line in lines if not line["passed"]]
    found = _numbers(lines) if not red else f"seed {red[0]['seed']}: {' '.join(red[0]['wrong'][0].split())[:200]}"
    result = f"**RED** in {len(red)}" if red else "passes"
    oracles = [_oracle([line[oracle] for line in lines]) for oracle in ORACLES]
    times = [_median([line[key] for line in lines if line[key] is not None]) for key in ("detect_s", "recover_s")]
    most = str(max(line["redone_steps"] for line in lines))
    return [name, injects, result, str(len(lines)), *oracles, *times, most, found]


def _oracle(states: Sequence[bool | None]) -> str:
    asked = [state for state in states if state is not None]
    return "" if not asked else "yes" if all(asked) else "**NO**"


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else ""


def _numbers(lines: Sequence[dict]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line["numbers"]))
    parts = [f"{sum(line['cases'] for line in lines)} cases"]
    for name in names:
        values = [line["numbers"][name] for line in lines if name in line["numbers"]]
        parts.append(f"{name} {median(values):.3g}")
    return ", ".join(parts)
