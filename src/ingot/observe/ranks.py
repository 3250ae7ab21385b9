"""The newest numbers of single ranks, for sinks that show every rank."""

from pathlib import Path

from ingot.schema.metrics import METRICS, NewestRow, newest_rows

RANK_METRICS = {metric.name: metric for metric in METRICS if metric.owner == "rank"}


def rank_rows(metrics: Path) -> dict[int, NewestRow]:
    """Return the newest numbers of every rank by rank, without those of the run. metrics: the folder of the numbers.
    Raises OSError."""
    return {
        rank: row._replace(values={name: value for name, value in row.values.items() if name in RANK_METRICS})
        for rank, row in newest_rows(metrics).items()
    }
