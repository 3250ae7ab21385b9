"""The report section on metrics that plug-ins wrote: those of callbacks, and the means of loss terms."""

import math

from ingot.report.facts import RunData
from ingot.report.render.charts import metric_chart
from ingot.report.render.page import Block, Charts, Section, TableBlock, Text

_CHARTS = 8  # of the first metrics; all are in the table


def metrics_section(data: RunData) -> Section | None:
    """Return the section on own metrics: a chart of each, and a table; None for a run without any."""
    if not data.metrics:
        return None
    charts = [chart for by, name in list(data.metrics)[:_CHARTS] if (chart := metric_chart(data, by, name))]
    blocks: list[Block] = [Text("Values that callbacks of plug-ins wrote at log lines, and the means of loss terms.")]
    blocks += [Charts(charts)] if charts else []
    header = ("Metric", "By", "Lines", "First", "Lowest", "Highest", "Last", "At step")
    rows = [_row(by, name, values) for (by, name), values in data.metrics.items()]
    caption = f"All metrics: {len(rows):,}"
    blocks.append(TableBlock(header, rows, right=(2, 3, 4, 5, 6, 7), caption=caption, folded=len(rows) > 12))
    return Section("own-metrics", "Own metrics", blocks)


def _row(by: str, name: str, values: dict[int, float]) -> tuple[str, ...]:
    first, last = min(values), max(values)
    finite = [value for value in values.values() if math.isfinite(value)] or [math.nan]
    figures = (values[first], min(finite), max(finite), values[last])
    return name, by, f"{len(values):,}", *(f"{value:,.4g}" for value in figures), f"{last:,}"
