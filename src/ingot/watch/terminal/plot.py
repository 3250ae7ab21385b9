"""Draw a chart (watch/charts.py) with the characters of a terminal: lines of dots, values at the left, incidents below.

A terminal without Unicode has one character per cell instead of 2 x 4 dots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.report.robust import shown_range
from ingot.watch.drawn import WatchChart, WatchLine
from ingot.watch.terminal.canvas import Canvas

_LABEL = 9  # cells of the values at the left
_LOG_FROM = 10.0  # largest by smallest value
_RUN_STYLES = ("cyan", "yellow", "green", "magenta", "blue")
_MARK_STYLES = {"bad": "red", "warn": "yellow", "info": "blue"}
# Of the styles of lines, the later one has the cell that both are in.
_ORDER = ("void", "expected", "raw", "dots", "main")
_ASCII = {"void": ".", "expected": "-", "raw": ":", "dots": "o", "main": "*"}
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclass(frozen=True)
class _Scale:
    """The values at the lowest and highest row of dots. log: they are logarithms."""

    low: float
    high: float
    log: bool

    def place(self, values: np.ndarray, rows: int) -> np.ndarray:
        """Return the row of each value from the top, int64; values that are not finite have none and are left out."""
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log(values) if self.log else values
            found = (self.high - shown) / (self.high - self.low) * (rows - 1)
        return np.clip(np.nan_to_num(np.rint(found), nan=0.0, posinf=0.0, neginf=0.0), 0, rows - 1).astype(np.int64)

    def value(self, share: float) -> float:
        """Return the value at a share of the height, from the bottom."""
        value = self.low + (self.high - self.low) * share
        return math.exp(value) if self.log else value


def plot_pixels(width: int, canvas: Canvas) -> int:
    """Return the columns of dots of a plot of `width` cells, for which a chart is to be thinned."""
    return max(width - _LABEL, 1) * canvas.glyphs.dots[0]


def draw_chart(
    canvas: Canvas, chart: WatchChart, x: int, y: int, width: int, height: int, runs: Sequence[str] = ("",)
) -> None:
    """Draw a chart into the cells from (x, y) on: a title, the plot, marks of incidents, and the steps. runs: the names
    of its runs, by number."""
    style = "bold"
    after = canvas.put(x, y, chart.title, style, width)
    if chart.unit:
        after = canvas.put(after, y, f", {chart.unit}", "dim", width - (after - x))
    _draw_legend(canvas, chart, after + 2, y, x + width, runs)
    lines = [line for line in chart.lines if len(line.points.steps)]
    inner, rows = width - _LABEL, height - 2 - bool(chart.marks)
    if not lines or inner < 8 or rows < 2:
        canvas.put(x, y + 1, "nothing yet" if not lines else "", "dim", width)
        return
    scale = _scale_of(chart, lines)
    raster = _Raster(canvas, inner, rows)
    for line in sorted(lines, key=lambda own: _ORDER.index(own.style)):
        raster.draw(line, chart, scale, one_run=len({own.run for own in lines}) == 1)
    for band in chart.bands:
        raster.draw_level(band.low, scale)
        raster.draw_level(band.high, scale)
    raster.put(x + _LABEL, y + 1)
    for row in (0, (rows - 1) // 2, rows - 1) if rows >= 5 else (0, rows - 1):
        label = _label(scale.value(1 - row / (rows - 1)))
        canvas.put(x, y + 1 + row, f"{label:>{_LABEL - 1}}", "dim", _LABEL - 1)
    for mark in chart.marks:
        at = x + _LABEL + _column(mark.step, chart, inner)
        canvas.put(at, y + 1 + rows, canvas.glyphs.mark, _MARK_STYLES[mark.severity], 1)
    bottom = y + height - 1
    canvas.put(x + _LABEL, bottom, f"step {chart.first:,}", "dim", inner)
    beyond, room = _beyond(chart, scale), max(inner - 24, 0)
    if beyond or len(chart.note) <= room:  # a part of a note says nothing
        look = "yellow" if beyond else "dim"
        canvas.put(x + _LABEL + len(f"step {chart.first:,}") + 2, bottom, beyond or chart.note, look, room)
    last = f"{chart.last:,}"
    canvas.put(x + width - len(last), bottom, last, "dim", len(last))


def _draw_legend(canvas: Canvas, chart: WatchChart, x: int, y: int, end: int, runs: Sequence[str]) -> None:
    """Write the names of the lines, each with the character that draws it; of several runs, their names first, because
    their lines differ by color."""
    own = sorted({line.run for line in chart.lines})
    named = dict.fromkeys((line.style, line.name) for line in chart.lines)
    texts = [(runs[run], _style("main", run, one_run=False)) for run in own] if len(runs) > 1 else []
    for style, name in sorted(named, key=lambda one: -_ORDER.index(one[0])):
        text = f"{_ASCII[style]} {name}" if not canvas.glyphs.braille else name
        texts.append((text, "dim" if len(own) > 1 else _style(style, own[0], one_run=True)))
    for text, look in texts:
        if x + len(text) <= end:
            x = canvas.put(x, y, text, look) + 2


def _style(style: str, run: int, *, one_run: bool) -> str:
    if style == "main" or not one_run:
        return _RUN_STYLES[run % len(_RUN_STYLES)] if style != "void" else "dim"
    return {"void": "dim", "expected": "green", "raw": "blue", "dots": "yellow"}[style]


def _scale_of(chart: WatchChart, lines: Sequence[WatchLine]) -> _Scale:
    finite = [found for values in _samples(lines) if len(found := values[np.isfinite(values)])]
    if not finite:
        return _Scale(0.0, 1.0, False)
    # Each line has its own range: a short one must not be an outlier of a long one.
    if chart.log and min(values.min() for values in finite) > 0:  # what a logarithm shows is not left out
        logs = [shown_range(np.log(values).tolist()) for values in finite]
        ranges = [(math.exp(low), math.exp(high)) for low, high in logs]
    else:
        ranges = [shown_range(values.tolist(), from_zero=chart.from_zero) for values in finite]
    ranges += [(band.low, band.high) for band in chart.bands if math.isfinite(band.low + band.high)]
    low, high = min(own for own, _ in ranges), max(own for _, own in ranges)
    if chart.log and low > 0 and high / low > _LOG_FROM:
        return _Scale(math.log(low), math.log(high), True)
    if high <= low:
        low, high = low - max(abs(low), 1.0) * 0.05, high + max(abs(high), 1.0) * 0.05
    return _Scale(low, high, False)


def _samples(lines: Sequence[WatchLine]) -> list[np.ndarray]:
    """Return the values of each line for the scale. Those of void steps are a part of the line that replaced them; a
    mean has none of its own, because an outlier is spread over it."""
    raw = {line.run for line in lines if line.style == "raw"}
    found = []
    for line in lines:
        void = [own.points.values for own in lines if own.style == "void" and own.run == line.run]
        if line.style in ("dots", "expected"):
            found.append(line.points.values)
        elif line.style == "raw" or (line.style == "main" and line.run not in raw):
            found.append(np.concatenate([line.points.values, *void]))
    return found or [line.points.values for line in lines]


def _beyond(chart: WatchChart, scale: _Scale) -> str:
    """Return how many values are above or below the plot, at its edge, and the farthest; "": none is."""
    values = np.concatenate([line.points.values for line in chart.lines])
    values = values[np.isfinite(values)]
    edge = abs(scale.value(1.0)) * 1e-9  # logarithms are rounded
    above, below = values[values > scale.value(1.0) + edge], values[values < scale.value(0.0) - edge]
    parts = [f"{len(above):,} above, up to {_label(float(above.max()))}"] if len(above) else []
    parts += [f"{len(below):,} below, down to {_label(float(below.min()))}"] if len(below) else []
    return "; ".join(parts)


def _label(value: float) -> str:
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _column(step: int, chart: WatchChart, columns: int) -> int:
    span = max(chart.last - chart.first, 1)
    return min(max(round((step - chart.first) / span * (columns - 1)), 0), columns - 1)


class _Raster:
    """The dots of a plot of `width` x `height` cells, and the style of each cell."""

    def __init__(self, canvas: Canvas, width: int, height: int):
        self._canvas, self._width, self._height = canvas, width, height
        dots = canvas.glyphs.dots
        self.columns, self.rows = width * dots[0], height * dots[1]
        self._dots = np.zeros((self.rows, self.columns), bool)
        self._styles = [[("", "")] * width for _ in range(height)]

    def draw(self, line: WatchLine, chart: WatchChart, scale: _Scale, *, one_run: bool) -> None:
        """Draw a line over the steps of a chart. Values that are not finite are gaps, and on a logarithmic scale those
        that are not positive, too."""
        steps, values = line.points
        fine = np.isfinite(values) & ((values > 0) if scale.log else True)
        span = max(chart.last - chart.first, 1)
        columns = np.rint((steps - chart.first) / span * (self.columns - 1)).astype(np.int64)
        rows = scale.place(values, self.rows)
        style = line.style, _style(line.style, line.run, one_run=one_run)
        before: tuple[int, int] | None = None
        for column, row, good in zip(columns.tolist(), rows.tolist(), fine.tolist(), strict=True):
            if not good or not 0 <= column < self.columns:
                before = None
                continue
            self._segment(before or (column, row), (column, row), style, points=line.style == "dots")
            before = column, row

    def draw_level(self, value: float, scale: _Scale) -> None:
        """Draw a horizontal line of dashes."""
        if not math.isfinite(value) or (scale.log and value <= 0):
            return
        row = int(scale.place(np.array([value]), self.rows)[0])
        for column in range(self.columns):
            self._dot(column, row, ("expected", "green"))

    def _segment(self, start: tuple[int, int], end: tuple[int, int], style: tuple[str, str], *, points: bool) -> None:
        (x0, y0), (x1, y1) = start, end
        if points or x0 == x1:
            for row in range(min(y0, y1), max(y0, y1) + 1) if not points else (y1,):
                self._dot(x1, row, style)
            return
        before = y0
        for column in range(x0, x1 + 1):
            row = round(y0 + (y1 - y0) * (column - x0) / (x1 - x0))
            way = 1 if row > before else -1
            for own in range(before + way, row + way, way) if row != before else (row,):
                self._dot(column, own, style)
            before = row

    def _dot(self, column: int, row: int, style: tuple[str, str]) -> None:
        kind = style[0]
        if (kind == "void" and (column + row) % 2) or (kind == "expected" and column // 3 % 2):
            return  # pale and dashed, also without colors
        self._dots[row, column] = True
        dots = self._canvas.glyphs.dots
        x, y = column // dots[0], row // dots[1]
        if not self._styles[y][x][0] or _ORDER.index(kind) >= _ORDER.index(self._styles[y][x][0]):
            self._styles[y][x] = style

    def put(self, x: int, y: int) -> None:
        """Write the cells that have dots, from cell (x, y) of the canvas on."""
        wide, high = self._canvas.glyphs.dots
        for row in range(self._height):
            for column in range(self._width):
                kind, style = self._styles[row][column]
                if kind:
                    char = _ASCII[kind]
                    if self._canvas.glyphs.braille:
                        own = self._dots[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                        bits = sum(_BRAILLE[i][j] for i in range(2) for j in range(4) if own[j, i])
                        char = chr(0x2800 + bits)
                    self._canvas.put(x + column, y + row, char, style, 1)
