"""Charts, chapters and states of runs as values for JSON. All texts stay texts: the page never reads them as markup."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ingot.report.render.page import (
    Bars,
    Block,
    Folded,
    HeatMap,
    LabeledValues,
    Sample,
    TableBlock,
    Text,
)
from ingot.watch.chapters import WatchChapter, WatchHead
from ingot.watch.drawn import WatchChart
from ingot.watch.live import LiveRun
from ingot.watch.series import StepSeries

FEEDS = ("steps", "lines", "uses", "traffic", "experts")  # the series of a LiveRun whose new rows pages get at once
MOST_ROWS = 500  # of a feed in one message


def encoded(values: Any) -> bytes:
    """Return JSON that browsers read: a number that is not finite is null."""
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    except ValueError:
        return json.dumps(_finite(values), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def numbers(values: np.ndarray) -> list[float | None]:
    """Return an array as a list, with None where it is not finite."""
    found = values.tolist()
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        found[index] = None
    return found


def chart_json(chart: WatchChart) -> dict[str, Any]:
    """Return a chart; each line has lists x (steps) and y."""
    lines = [
        {"name": line.name, "style": line.style, "run": line.run, "feed": line.feed, "x": line.points.steps.tolist(),
         "y": numbers(line.points.values)}
        for line in chart.lines
    ]  # fmt: skip
    own = {"key", "title", "unit", "question", "stacked", "from_zero", "log", "first", "last", "total", "note"}
    return {name: getattr(chart, name) for name in sorted(own)} | {
        "lines": lines,
        "bands": [asdict(band) for band in chart.bands],
        "marks": [asdict(mark) for mark in chart.marks],
    }


def head_json(head: WatchHead) -> dict[str, Any]:
    """Return the state of a run."""
    return asdict(head)


def chapters_json(chapters: Sequence[WatchChapter]) -> list[dict[str, Any]]:
    """Return chapters with their blocks; each block has its class in lower case as `kind`."""
    return [
        {
            "question": chapter.question,
            "anchor": chapter.section.anchor,
            "title": chapter.section.title,
            "blocks": [_block(block) for block in chapter.section.blocks],
        }
        for chapter in chapters
    ]


def _block(block: Block) -> dict[str, Any]:
    if isinstance(block, Folded):
        return {"kind": "folded", "caption": block.caption, "blocks": [_block(own) for own in block.blocks]}
    if not isinstance(block, Text | LabeledValues | TableBlock | Bars | HeatMap | Sample):
        raise TypeError(f"a page draws no {type(block).__name__}: charts are drawn from the numbers")
    kinds = {Text: "text", LabeledValues: "pairs", TableBlock: "table", Bars: "bars", HeatMap: "heat", Sample: "sample"}
    return {"kind": kinds[type(block)], **asdict(block)}


def feed_json(series: StepSeries, since: int) -> dict[str, list] | None:
    """Return the rows that were added after the first `since`, by column, with their steps as `step`; None if there are
    too many for a message."""
    rows = series.added(since)
    if len(rows) > MOST_ROWS:
        return None
    columns = {name: numbers(rows["values"][:, index]) for index, name in enumerate(series.names)}
    return {"step": rows["step"].tolist(), **columns}


def feeds_of(run: LiveRun) -> dict[str, StepSeries]:
    """Return the series of FEEDS by name."""
    return {name: getattr(run, name) for name in FEEDS}
