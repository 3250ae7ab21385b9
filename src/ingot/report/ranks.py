"""The section of a report on ranks: where each spends its step, beside its peers, from the numbers of every rank."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

from ingot.observe.scalars import axis_title
from ingot.report.facts import RunData
from ingot.report.render.page import Block, HeatMap, HeatRow, Section, Text
from ingot.schema.metrics import TRAFFIC_AXES, NewestRow, newest_rows
from ingot.units import format_bytes, format_seconds

# Columns: title, metric, and whether more of it is worse (waiting for others is what fast ranks do).
_PHASES = (
    ("step", "perf/step_seconds", True),
    ("data", "data/wait_seconds", True),
    ("forward", "perf/forward_seconds", True),
    ("backward", "perf/backward_seconds", True),
    ("optimizer", "perf/optimizer_seconds", True),
    ("waiting for ranks", "perf/wait_seconds", False),
    ("pipeline", "perf/pipeline_wait_seconds", False),
    *((f"waiting for {axis_title(axis)}", f"perf/{axis}/exposed_seconds", False) for axis in TRAFFIC_AXES),
    ("no core", "perf/queued_seconds", True),
    ("blocked", "perf/blocked_seconds", True),
    ("save", "checkpoint/stall_seconds", True),
)
_MEMORY = ("memory", "memory/peak_bytes", True)
_EDGES = (1.1, 1.3, 1.7)  # ratios to the median, between the shades
_LEAST_SHARE = 0.02  # of the median step, below which a difference does not count
_SHOWN = 40


def ranks_section(data: RunData) -> Section | None:
    """Return the map of ranks and phases of the newest steps; None if their numbers were not recorded, or for one rank
    only."""
    rows = newest_rows(data.folder.metrics)
    blocks = rank_blocks(rows, open_stragglers(data)) if len(rows) > 1 else []
    return Section("ranks", "Ranks", blocks) if blocks else None


def open_stragglers(data: RunData) -> dict[int, dict]:
    """Return the `straggler` events of the ranks that are slow in the newest attempt, by rank."""
    started = data.starts[-1]["time"] if data.starts else 0.0
    slow: dict[int, dict] = {}
    for event in data.stragglers:
        slow.pop(event["rank"], None)
        if not event.get("ended") and event["time"] >= started:
            slow[event["rank"]] = event
    return slow


class _Cell(NamedTuple):
    text: str
    level: int


def rank_blocks(rows: Mapping[int, NewestRow], slow: Mapping[int, dict]) -> list[Block]:
    """Return the map of ranks and phases: seconds per step, shaded by the ratio to the median rank. Of many ranks,
    those that differ most are shown. slow: the `straggler` events of slow ranks."""
    steps = [row.values.get("perf/step_seconds", 0.0) for row in rows.values()]
    if not any(steps):
        return []
    typical = median(steps)
    cells: dict[int, list[_Cell]] = {rank: [] for rank in sorted(rows)}
    titles = []
    for title, name, worse in (*_PHASES, _MEMORY):
        values = {rank: row.values[name] for rank, row in rows.items() if name in row.values}
        if not any(values.values()):
            continue
        titles.append(title)
        middle = median(values.values())
        least = 0.02 * middle if title == _MEMORY[0] else _LEAST_SHARE * typical
        show = format_bytes if title == _MEMORY[0] else format_seconds
        for rank in cells:
            value = values.get(rank)
            level = 0 if value is None or abs(value - middle) < least else level_of(value, middle)
            text = "" if value is None else show(value) if value else "0"
            cells[rank].append(_Cell(text, level if worse or level < 0 else min(level, 1)))
    order = sorted(cells, key=lambda rank: (rank not in slow, -_excess(cells[rank]), rank))[:_SHOWN]
    heat_rows = [_row(rank, cells[rank], rows[rank], slow.get(rank)) for rank in sorted(order)]
    newest = max(row.step for row in rows.values())
    words = (
        f"Seconds per step, one row per rank, shaded by the distance from the median rank. Step, data and waiting are "
        f"of step {newest:,}, other columns are means over the steps of the newest log line."
    )
    if {"no core", "blocked"} & {*titles}:
        words += " No core and blocked overlap with other columns."
    if len(cells) > _SHOWN:
        words += f" The {_SHOWN} of {len(cells):,} ranks that differ most are shown."
    blocks: list[Block] = [Text(words), HeatMap(("Rank", *titles), heat_rows)]
    return blocks + [Text(_slow_text(rank, slow[rank])) for rank in sorted(slow)[:8]]


def level_of(value: float, middle: float) -> int:
    """Return the shade of a value beside the median: -3 (far less) to 3 (far more)."""
    if middle <= 0:
        return 3 if value > 0 else 0
    ratio = value / middle
    if ratio >= 1:
        return sum(ratio >= edge for edge in _EDGES)
    return -sum(ratio <= 1 / edge for edge in _EDGES)


def _excess(cells: Iterable[_Cell]) -> int:
    return sum(abs(cell.level) + max(cell.level, 0) for cell in cells)


def _row(rank: int, cells: list[_Cell], row: NewestRow, slow: dict | None) -> HeatRow:
    note = f"slow, {slow['factor']:.1f} times its peers" if slow else ""
    return HeatRow(f"{rank}", tuple(c.text for c in cells), tuple(c.level for c in cells), note)


def _slow_text(rank: int, slow: dict) -> str:
    return (
        f"Rank {rank} on {slow.get('host') or 'an unknown host'} takes {slow['factor']:.1f} times as long as its peers "
        f"since step {slow.get('since', slow['step']):,} ({slow.get('phase', 'compute')})."
    )
