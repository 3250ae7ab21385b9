"""The newest numbers of single ranks, for sinks that show every rank."""

from dataclasses import replace
from pathlib import Path

from ingot.schema.metrics import METRICS, TRAFFIC_AXES, NewestRow, newest_rows

RANK_METRICS = {
    name: replace(metric, name=name, meaning=metric.meaning.format(axis=axis))
    for metric in METRICS
    for axis in (TRAFFIC_AXES if "{axis}" in metric.name else ("",))
    if metric.owner == "rank" and (name := metric.name.format(axis=axis))
}


def rank_rows(metrics: Path) -> dict[int, NewestRow]:
    """Return the newest numbers of every rank by rank, without those of the run. metrics: the folder of the numbers.
    Raises OSError."""
    return {
        rank: row._replace(values={name: value for name, value in row.values.items() if name in RANK_METRICS})
        for rank, row in newest_rows(metrics).items()
    }
