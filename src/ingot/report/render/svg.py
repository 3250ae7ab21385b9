"""Line charts as inline SVG text. Colours come from the page's style sheet, by class, so that dark mode reaches them.

A figure that is not finite is left out of a line, never drawn as something else.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """kind: class of the stroke ("raw", "main", "second", "baseline"), or "dots" for single marks."""

    kind: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """A vertical line at `x`, with a word at its top."""

    x: float
    label: str


@dataclass(frozen=True)
class _Frame:
    """Data coordinates to pixels."""

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def line_chart(
    lines: Sequence[Line],
    *,
    width: int,
    height: int,
    label: str,
    x_label: str = "step",
    y_format: str = "g",
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> str:
    """An <svg> of `width` x `height` user units, text at 12 units. label: what it shows, for those who cannot see it.

    y_format: format spec of the tick labels ("g", ".0%", "si" for 12k). from_zero: the y axis starts at 0.
    """
    points = [p for line in lines for p in _finite(line.points)]
    if not points:
        return ""
    x_range = _widen(min(p[0] for p in points), max(p[0] for p in points))
    y_ticks = nice_ticks(*_y_limits(points, from_zero), count=5 if height > 200 else 3)
    y_range = (min(y_ticks[0], 0.0) if from_zero else y_ticks[0], y_ticks[-1])
    labels = [_tick_text(t, y_format, y_ticks) for t in y_ticks]
    frame = _Frame(
        left=10 + 7 * max(map(len, labels)),
        top=24 if marks else 10,
        right=width - 14,
        bottom=height - 36,
        x_range=x_range,
        y_range=y_range,
    )
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}" class="chart"><title>{escape(label)}</title>'
    ]
    parts += _axes(frame, y_ticks, labels, x_label, width)
    parts += _marks(frame, marks)
    parts += [_line(frame, line) for line in lines]
    return "".join(parts) + "</svg>"


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _widen(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    half = abs(low) * 0.05 or 0.5
    return low - half, high + half


def _y_limits(points: Sequence[Point], from_zero: bool) -> tuple[float, float]:
    low, high = _widen(min(p[1] for p in points), max(p[1] for p in points))
    return (min(low, 0.0), high) if from_zero else (low, high)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values (1, 2 or 5 times a power of ten) that enclose low..high (low < high)."""
    raw = (high - low) / max(count - 1, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick_text(value: float, spec: str, ticks: Sequence[float]) -> str:
    if spec == "si":
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if max(map(abs, ticks)) >= size:
                return f"{value / size:g}{unit}" if value else "0"
    if spec == "g":
        step = ticks[1] - ticks[0]
        if max(map(abs, ticks)) < 1e-3:
            return f"{value:.0e}".replace("e-0", "e-") if value else "0"
        return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return format(value, spec)


def _axes(frame: _Frame, y_ticks: Sequence[float], labels: Sequence[str], x_label: str, width: int) -> list[str]:
    out = []
    for tick, label in zip(y_ticks, labels, strict=True):
        y = frame.y(tick)
        out.append(f'<line class="grid" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    x_ticks = nice_ticks(*frame.x_range, count=max(6, width // 80))
    for tick in x_ticks:
        if frame.x_range[0] <= tick <= frame.x_range[1]:
            x, text = frame.x(tick), f"{tick:,.0f}"
            end = x + 3.5 * len(text) > frame.right + 12
            anchor = "end" if end else "middle"
            out.append(
                f'<text class="tick" x="{min(x, frame.right) if end else x:.1f}" y="{frame.bottom + 16:.1f}" '
                f'text-anchor="{anchor}">{text}</text>'
            )
    middle = (frame.left + frame.right) / 2
    out.append(
        f'<text class="tick" x="{middle:.1f}" y="{frame.bottom + 31:.1f}" text-anchor="middle">{escape(x_label)}</text>'
    )
    return out


def _marks(frame: _Frame, marks: Sequence[Mark]) -> list[str]:
    out = []
    for mark in marks:
        if not frame.x_range[0] <= mark.x <= frame.x_range[1]:
            continue
        x = frame.x(mark.x)
        out.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top:.1f}" y2="{frame.bottom:.1f}"/>')
        if mark.label:
            right = x > (frame.left + frame.right) / 2
            out.append(
                f'<text class="mark-text" x="{x + (6 if right else -6):.1f}" y="{frame.top - 8:.1f}" '
                f'text-anchor="{"end" if right else "start"}">{escape(mark.label)}</text>'
            )
    return out


def _line(frame: _Frame, line: Line) -> str:
    points = _finite(line.points)
    if line.kind == "dots":
        return "".join(f'<circle class="dots" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>' for x, y in points)
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{line.kind}" points="{path}"/>'


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of up to `window` points centred on each one; towards the ends the window shrinks, so nothing lags."""
    points, out = _finite(points), []
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    for i, (x, _) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        out.append((x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return out


def thin(points: Sequence[Point], limit: int = 600) -> list[Point]:
    """At most about `limit` points that keep every peak: the lowest and the highest of each bucket, in order."""
    points = _finite(points)
    if len(points) <= limit:
        return points
    size, out = math.ceil(2 * len(points) / limit), []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        out += sorted({low, high})
    return out
