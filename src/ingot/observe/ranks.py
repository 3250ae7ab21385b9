"""The newest numbers of single ranks, for sinks that show every rank."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.observe.scalars import USES


class RankRow(NamedTuple):
    """The newest numbers of a rank, by name (scalars.py). time: Unix seconds."""

    step: int
    time: float
    values: dict[str, float]


def rank_rows(waits: Mapping[str, Any]) -> dict[int, RankRow]:
    """Return the newest numbers by rank. waits: the newest event of that kind, which has, for each use of time, the
    rank with the most of it: other ranks have no row."""
    rows: dict[int, RankRow] = {}
    for use in USES:
        own = waits.get(use)
        if isinstance(own, Mapping):
            row = rows.setdefault(int(own["rank"]), RankRow(int(waits["step"]), float(waits["time"]), {}))
            row.values[f"perf/{use}_seconds"] = float(own["most"])
    return rows
