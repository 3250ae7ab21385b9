"""The page of a comparison: settings that differ, the metrics at equal places of the runs, and charts. No scripts."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot import __version__
from ingot.report.compare.align import WINDOW, ComparedPoint, RunComparison, difference_curve
from ingot.report.compare.curves import Axis, Curve
from ingot.report.compare.differing import MACHINE, SettingDifference, letter_of, setting_text
from ingot.report.compare.texts import (
    LABELS,
    axis_label,
    cells_of,
    columns_of,
    difference_text,
    label_of,
    quarter_rows,
    shown_metrics,
    value_text,
    window_text,
    x_text,
)
from ingot.report.render.charts import SMALL, WIDE, ChartMark, Line, Point, sized_chart, smooth, thin
from ingot.report.render.markup import render_html
from ingot.report.render.page import (
    Block,
    Chart,
    Charts,
    HeadlineFigure,
    ReportPage,
    Section,
    TableBlock,
    Text,
)
from ingot.schema.changes import ChangeClass
from ingot.storage import write_atomic
from ingot.units import format_count

_KINDS = 6  # of lines, in the style sheet
_TILES = 4
_TASKS = 6  # charts of tasks
_POINTS = 400  # of a line
_DIFFERENCES = 200  # points of a line of differences
_SCALES: dict[Axis, tuple[tuple[float, str], ...]] = {
    "tokens": ((1e12, "tokens (T)"), (1e9, "tokens (B)"), (1e6, "tokens (M)"), (1e3, "tokens (k)"), (1, "tokens")),
    "flops": (
        (1e24, "FLOP (Y)"), (1e21, "FLOP (Z)"), (1e18, "FLOP (E)"), (1e15, "FLOP (P)"), (1e12, "FLOP (T)"),
        (1e9, "FLOP (G)"), (1, "FLOP"),
    ),
    "steps": ((1, "step"),),
    "time": ((2 * 86400, "days of training"), (2 * 3600, "hours of training"), (120, "minutes of training"),
             (1, "seconds of training")),
}  # fmt: skip
_UNIT_SECONDS = {"days of training": 86400.0, "hours of training": 3600.0, "minutes of training": 60.0}
_SMALL_CHARTS = (
    ("perf/tokens_per_second", "si", True),
    ("perf/mfu", ".0%", True),
    ("train/grad_norm", "g", False),
    ("train/lr", "g", False),
    ("run/goodput", ".0%", True),
)


def write_page(found: RunComparison, path: Path) -> None:
    """Write the page of a comparison as one HTML file."""
    write_atomic(path, render_html(comparison_page(found, path)).encode("utf-8", "replace"))


def comparison_page(found: RunComparison, path: Path) -> ReportPage:
    """Return the page of a comparison. path: its file, for the command at its top."""
    words = ["ingot", "compare", *(str(run.path) for run in found.runs), "--by", found.by, "--out", str(path)]
    sections = [_runs(found), _settings(found), _metrics(found), _charts(found)]
    return ReportPage(
        title=", ".join(found.labels),
        subtitle=f"{len(found.runs)} runs at equal {axis_label(found.by)}, up to {x_text(found.by, found.last)}",
        headline=_headline(found),
        command=shlex.join(words),
        sections=[section for section in sections if section],
        footer=f"Written by ingot {__version__} from the event logs of the runs.",
        brand="ingot compare",
        about_command="The command that compares them again",
    )


def _column(found: RunComparison, number: int) -> str:
    return f"{letter_of(number)} · {found.labels[number]}"


def _headline(found: RunComparison) -> list[HeadlineFigure]:
    if (metric := found.points[-1].metric(found.measure)) is None:
        return []
    figures = [HeadlineFigure(_title(f"{label_of(metric.name)} of {_column(found, 0)}"), value_text(metric, 0))]
    for number in range(1, min(len(found.runs), _TILES + 1)):
        sigmas, difference = metric.sigmas[number], metric.differences[number]
        sure = None if sigmas is None or difference is None or abs(sigmas) < 2 else difference < 0
        note = difference_text(metric, number)
        label = _title(f"{label_of(metric.name)} of {_column(found, number)}")
        figures.append(HeadlineFigure(label, value_text(metric, number), f"{note} to A" if note else "", good=sure))
    return figures


def _runs(found: RunComparison) -> Section:
    rows = [
        (
            letter_of(number),
            one.run.name,
            one.run.state,
            f"{one.run.step:,} of {one.run.config.train.steps:,}",
            format_count(float(one.tokens([one.run.step])[0])),
            str(one.run.path),
        )
        for number, one in enumerate(found.aligned)
    ]
    blocks: list[Block] = [TableBlock(("", "Run", "State", "Step", "Tokens", "Folder"), rows, right=(3, 4))]
    return Section("runs", "Runs", [*blocks, *map(Text, found.notes)])


def _settings(found: RunComparison) -> Section:
    header = ("Setting", *(_column(found, number) for number in range(len(found.runs))))

    def rows(differences: Sequence[SettingDifference]) -> list[tuple[str, ...]]:
        return [(one.key, *map(setting_text, one.values)) for one in differences]

    free = [one for one in found.settings if one.kind in (MACHINE, ChangeClass.SAME_BITS)]
    others = [one for one in found.settings if one not in free]
    blocks: list[Block] = [
        TableBlock(header, rows(others)) if others else Text("No setting differs that changes the numbers of a run.")
    ]
    if free:
        caption = f"{len(free)} more: the machine, and settings that change no number"
        blocks.append(TableBlock(header, rows(free), caption=caption, folded=True))
    return Section("settings", "Settings that differ", blocks)


def _metrics(found: RunComparison) -> Section:
    every, last = range(len(found.runs)), found.points[-1]

    def table(point: ComparedPoint, caption: str = "") -> TableBlock:
        rows = [(_title(label_of(one.name)), *cells_of(one, every)) for one in shown_metrics(point)]
        header = ("", *columns_of(every))
        return TableBlock(header, rows, right=tuple(range(1, len(header))), caption=caption, folded=bool(caption))

    header, rows = quarter_rows(found, every)
    caption = f"{_title(label_of(found.measure))} on the way"
    blocks: list[Block] = [
        Text(f"At {x_text(found.by, last.x)}, the last that all runs have. {window_text(WINDOW)}"),
        table(last),
        TableBlock(header, rows, right=tuple(range(len(header))), caption=caption),
        *(table(point, f"All metrics at {x_text(found.by, point.x)}") for point in found.points[:-1]),
    ]
    return Section("metrics", f"At equal {axis_label(found.by)}", blocks)


def _title(text: str) -> str:
    """Return a label as a title; names of tasks stay as they are."""
    return text[:1].upper() + text[1:] if text.startswith(LABELS) else text


# -- charts --


def _charts(found: RunComparison) -> Section:
    scale, x_label = next((one for one in _SCALES[found.by] if found.last >= one[0]), _SCALES[found.by][-1])
    if found.by == "time":
        scale = _UNIT_SECONDS.get(x_label, 1.0)
    charts = _ChartMaker(found, scale, x_label)
    return Section("curves", "Curves", charts.blocks())


class _ChartMaker:
    """The charts of a comparison; curves are by the numbers of their runs. scale: the value of the axis that is 1 in
    the charts."""

    def __init__(self, found: RunComparison, scale: float, x_label: str):
        self._found, self._scale = found, scale
        self._options = {"x_label": x_label, "x_format": "g"}

    def blocks(self) -> list[Block]:
        measure, first, last = self._found.measure, self._found.first, self._found.last
        whole = self._curves(measure, smoothed=True)
        ends = [float(one.axis([one.run.step])[0]) for one in self._found.aligned]
        end = f"{letter_of(ends.index(min(ends)))} ends"
        marks = [ChartMark(last / self._scale, end)] if max(ends) > 1.02 * last else []
        blocks: list[Block] = []
        if main := self._chart(f"{label_of(measure)}, smoothed", whole, WIDE, marks=marks):
            blocks.append(main)
        middle = (first + last) / 2
        late = {n: _between(points, middle / self._scale, last / self._scale) for n, points in whole.items()}
        pair = [
            self._chart(f"{label_of(measure)}, second half", late, SMALL, y_format="g"),
            self._differences(),
        ]
        small = [
            self._chart(label_of(name), self._curves(name, smoothed=name == "train/grad_norm"), SMALL,
                        y_format=y_format, from_zero=from_zero)
            for name, y_format, from_zero in _SMALL_CHARTS
        ]  # fmt: skip
        evaluations = list(dict.fromkeys(name for one in self._found.aligned for name in one.evaluations))
        scores = [
            self._chart(label_of(name), self._curves(name), SMALL, dots=True) for name in evaluations[: _TASKS + 1]
        ]
        for row in (pair, scores, small):
            if shown := [chart for chart in row if chart]:
                blocks.append(Charts(shown))
        return blocks or [Text("There are fewer than two points to draw.")]

    def _curves(self, name: str, *, smoothed: bool = False) -> dict[int, list[Point]]:
        """Return the points of each run that has the metric, by the number of the run."""
        found = {}
        for number, one in enumerate(self._found.aligned):
            if name in one.all:
                points = self._points(one.all[name])
                if smoothed:
                    points = smooth(points, max(len(points) // 40, 5) | 1)
                found[number] = points
        return found

    def _points(self, curve: Curve) -> list[Point]:
        return [(float(x) / self._scale, float(y)) for x, y in zip(curve.x, curve.y, strict=True)]

    def _differences(self) -> Chart | None:
        """Return the chart of the differences of the measure to the first run."""
        measure, found = self._found.measure, self._found
        if found.same_tokens is False and measure == "train/loss":
            return None
        first, last = found.first + (found.last - found.first) * 0.05, found.last  # the first steps are far apart
        windows = {float(x): found.window_at(float(x), 2 * WINDOW) for x in np.linspace(first, last, _DIFFERENCES)}
        curves = {
            number: self._points(difference_curve(found.aligned[0].all[measure], one.all[measure], windows))
            for number, one in enumerate(found.aligned[1:], 1)
            if measure in one.all and measure in found.aligned[0].all
        }
        zero = [(first / self._scale, 0.0), (last / self._scale, 0.0)]
        title = f"{label_of(measure)}, difference to {_column(found, 0)}"
        return self._chart(title, curves, SMALL, extra=[Line("zero", zero)])

    def _chart(
        self,
        name: str,
        curves: dict[int, list[Point]],
        sizes: tuple[tuple[int, int], tuple[int, int]],
        *,
        dots: bool = False,
        extra: Sequence[Line] = (),
        **options,
    ) -> Chart | None:
        """Return a chart of curves by the numbers of their runs; None for fewer than two points in all."""
        title, curves = _title(name), {number: points for number, points in curves.items() if points}
        if sum(map(len, curves.values())) < 2:
            return None
        lines = [*extra, *(Line(_kind(number), thin(points, _POINTS)) for number, points in curves.items())]
        lines += [Line(f"dots {_kind(number)}", points) for number, points in curves.items() if dots]
        names = {number: _column(self._found, number) for number in curves}
        rows = [
            (names[number], f"{len(points):,}", f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}")
            for number, points in curves.items()
        ]
        table = TableBlock(("Run", "Points", "First", "Last"), rows, right=(1, 2, 3), caption=title)
        legend = tuple((_kind(number), name) for number, name in names.items())
        label = f"{title}, of {len(legend)} runs, by {self._options['x_label']}"
        return sized_chart(title, lines, table, label, sizes, legend, **{**self._options, **options})


def _kind(number: int) -> str:
    return f"run-{number % _KINDS + 1}"


def _between(points: list[Point], first: float, last: float) -> list[Point]:
    return [point for point in points if first <= point[0] <= last]
