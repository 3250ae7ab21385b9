"""The lines of the board as tables in Markdown: all rows, and what came of each case of some rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from ingot.drill.oracles import ORACLES, RED
from ingot.drill.restores import PLACES

from .row import Row
from .times import not_judged

# The tables of cases: their names in the page -> the rows whose cases they have.
CASES = {
    "crash points": ("RS09", "RS09 disks", "RS09 memory", "RS09 weights"),
    "disk faults": ("RS12",),
    "store faults": ("RS13", "RS13 killed", "RS31 store"),
}

RESTORES = "restores by tier"  # the table of all rows that restore
_PLACES = ("local disks kB", "memory of the node kB", "memory of others kB", "store kB")  # as in PLACES


def with_all_points(lines: Sequence[dict]) -> list[dict]:
    """Return the lines without those whose row has all its crash points in another line: they would count twice."""

    def has_all(line: dict) -> bool:
        return "points" in line["numbers"] and line["numbers"]["points"] == line["numbers"]["played"]

    whole = {line["id"] for line in lines if has_all(line)}
    return [line for line in lines if line["id"] not in whole or has_all(line)]


def cases_of(lines: Sequence[dict]) -> str:
    """Return the table of the cases that `lines` have: a row for each fault and what came of it, with the places of the
    fault. Lines without cases add none."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for line in lines:
        for fault, place, outcome, count in line.get("outcomes", []):
            found.setdefault((fault, outcome), Counter())[place] += count
    text = ["| fault | cases | what came of it | where |", "|---|---|---|---|"]
    for fault, outcome in sorted(found):
        places = found[fault, outcome]
        where = ", ".join(f"{place} ({count})" for place, count in sorted(places.items()))
        text.append(f"| {fault} | {places.total()} | {f'**{RED}**' if outcome == RED else outcome} | {where} |")
    return "\n".join(text)


def restores_of(lines: Sequence[dict]) -> str:
    """Return the table of the restores that `lines` have: a row for each row of the board and tier, with medians of
    the seeds' kB from each place and seconds. Lines without restores add none."""
    found: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        for tier, facts in line.get("restores", {}).items():
            found.setdefault((line["id"], tier), []).append(facts)
    text = ["| row | state from | restores | " + " | ".join(_PLACES) + " | median s | longest s |"]
    text += ["|---|---|" + "---|" * (len(_PLACES) + 3)]
    for row, tier in sorted(found):
        of_seeds = found[row, tier]
        sizes = [f"{median(one[key] for one in of_seeds) / 1000:,.0f}" for key in PLACES]
        times = f"{median(one['seconds'] for one in of_seeds):.2f} | {max(one['most_seconds'] for one in of_seeds):.2f}"
        count = sum(int(one["restores"]) for one in of_seeds)
        text.append(f"| {row} | {tier} | {count} | {' | '.join(sizes)} | {times} |")
    return "\n".join(text)


def table_of(lines: Sequence[dict], slow: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the table of all rows: those with lines, one row of the table for all seeds, and those that are missing.

    lines: as `Verdicts.as_json` returns them. slow: what is wrong with the times of rows. A red row names its first
    finding.
    """
    from . import ALL, MISSING

    slow = slow or {}
    rows = {row.id: _row(row, [line for line in lines if line["id"] == row.id], slow.get(row.id, ())) for row in ALL}
    rows |= {name: [name, what, "missing", f"- | {why}"] for name, (what, why) in MISSING.items()}
    head = [
        "row",
        "fault",
        "result",
        "seeds",
        *(o.upper() for o in ORACLES),
        "detect s",
        "recover s",
        "load",
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


def _row(row: Row, lines: Sequence[dict], slow: Sequence[str]) -> list[str]:
    name, injects = row.id, row.injects
    if not lines:
        reason = row.missing()
        return [name, injects, "not played" if reason else "not run", "0", *[""] * (len(ORACLES) + 4), reason]
    red = [line for line in lines if not line["passed"]]
    found, result = _numbers(lines), "passes"
    if reason := not_judged(row.limits, lines):
        found += f"; {reason}"
    if slow:
        found, result = slow[0], "**RED**: slow"
    if red:
        found = f"seed {red[0]['seed']}: {' '.join(red[0]['wrong'][0].split())[:200]}"
        result = f"**RED** in {len(red)}"
    oracles = [_oracle([line[oracle] for line in lines]) for oracle in ORACLES]
    keys = ("detect_s", "recover_s", "load")
    times = [_median([line[key] for line in lines if line.get(key) is not None]) for key in keys]
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
