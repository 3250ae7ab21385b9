"""The charts of a report, as inline SVG: loss, gradient norm, learning rate, throughput, data wait, loads of experts.

Colors come from the style sheet of the page, by CSS class, so they follow dark mode. Values that are not finite are
left out of lines.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median

from ingot.report.evaluations import evaluated
from ingot.report.facts import RunData
from ingot.report.readable import is_finite
from ingot.report.render.page import Chart, Charts, TableBlock
from ingot.units import format_count

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart. kind: the CSS class of the stroke ("raw", "main", "baseline", "run-1" to "run-6"), or "dots"
    for single points, with a class of a run for those of one ("dots run-2")."""

    kind: str
    points: Sequence[Point]


@dataclass(frozen=True)
class ChartMark:
    """A vertical line at `x` with a label at its top."""

    x: float
    label: str


@dataclass(frozen=True)
class _Frame:
    """The plot area of a chart; `x` and `y` map data coordinates to SVG user units."""

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
    x_format: str = ",.0f",
    y_format: str = "g",
    marks: Sequence[ChartMark] = (),
    from_zero: bool = False,
) -> str:
    """Return a line chart as an <svg> of `width` x `height` user units, with 12-unit text; "" if no point is finite.

    label: a description for screen readers. x_format, y_format: the format spec of the labels ("g", ".0%"; "si" gives
    12k).
    from_zero: the y axis includes 0.
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
    parts += _axes(frame, y_ticks, labels, x_label, x_format, width)
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
    """Return about `count` round values (1, 2 or 5 times a power of ten) that enclose low..high (low < high)."""
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
    if spec in ("g", "si"):
        step = ticks[1] - ticks[0]
        if max(map(abs, ticks)) < 1e-3:
            return f"{value:.0e}".replace("e-0", "e-") if value else "0"
        return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return format(value, spec)


def _axes(
    frame: _Frame, y_ticks: Sequence[float], labels: Sequence[str], x_label: str, x_format: str, width: int
) -> list[str]:
    out = []
    for tick, label in zip(y_ticks, labels, strict=True):
        y = frame.y(tick)
        out.append(f'<line class="grid" x1="{frame.left:.1f}" x2="{frame.right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    x_ticks = nice_ticks(*frame.x_range, count=max(6, width // 80))
    for tick in x_ticks:
        if frame.x_range[0] <= tick <= frame.x_range[1]:
            x, text = frame.x(tick), _tick_text(tick, x_format, x_ticks)
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


def _marks(frame: _Frame, marks: Sequence[ChartMark]) -> list[str]:
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
    if line.kind.startswith("dots"):
        return "".join(
            f'<circle class="{line.kind}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>' for x, y in points
        )
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{line.kind}" points="{path}"/>'


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return `points` smoothed by a centered moving mean over up to `window` points; the window shrinks at the ends."""
    points, out = _finite(points), []
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    for i, (x, _) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        out.append((x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return out


def thin(points: Sequence[Point], limit: int = 600) -> list[Point]:
    """Return about `limit` of the points at most, in order: the lowest and the highest of each bucket, so that no peak
    is lost."""
    points = _finite(points)
    if len(points) <= limit:
        return points
    size, out = math.ceil(2 * len(points) / limit), []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        out += sorted({low, high})
    return out


# The sizes of a chart on wide and on narrow screens: alone, and one of several side by side.
WIDE = (900, 320), (350, 270)
SMALL = (430, 190), (350, 190)


def loss_chart(data: RunData) -> Chart | None:
    """Return the chart of the training loss, each logged step and smoothed, with held-out and unigram losses.

    Returns None for fewer than two logged steps.
    """
    raw = [(float(s), float(e["loss"])) for s, e in sorted(data.steps.items())]
    if len(raw) < 2:
        return None
    window = max(len(raw) // 40, 5) | 1
    lines = [Line("raw", thin(raw)), Line("main", thin(smooth(raw, window), 400))]
    legend = [("main", f"training loss, mean of {window} logged steps"), ("raw", "each logged step")]
    held_out = [(float(e["step"]), float(e["loss"])) for e in evaluated(data)]
    if held_out:
        lines.append(Line("dots", held_out))
        legend.append(("dots", "held-out loss"))
        last = evaluated(data)[-1]
        if last["bpb"] > 0:  # for the same tokens, nats per token are proportional to bits per byte
            unigram = last["loss"] * last["unigram_bpb"] / last["bpb"]
            lines.append(Line("baseline", [(raw[0][0], unigram), (raw[-1][0], unigram)]))
            legend.append(("baseline", f"unigram baseline on held-out text ({unigram:.2f})"))
    label = f"Training loss in nats per token from step {raw[0][0]:,.0f} to {raw[-1][0]:,.0f}"
    rows = [_loss_row(data, step) for step in spread(sorted(data.steps), 10)]
    table = TableBlock(("Step", "Loss", "Gradient norm", "Learning rate"), rows, right=(0, 1, 2, 3), caption=label)
    marks = _fault_marks(data)
    return sized_chart("Loss (nats per token)", lines, table, label, WIDE, tuple(legend), marks)


def _loss_row(data: RunData, step: int) -> tuple[str, ...]:
    event = data.steps[step]
    return f"{step:,}", f"{event['loss']:.4f}", f"{event['grad_norm']:.3f}", f"{event['lr']:.2e}"


def spread(values: list[int], count: int) -> list[int]:
    """Return at most `count` of `values`, evenly spread, including the first and the last."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _fault_marks(data: RunData, labeled: bool = True) -> list[ChartMark]:
    return [
        ChartMark(float(i.fault_step), f"lost at {i.fault_step:,}" if labeled and n < 4 else "")
        for n, i in enumerate(data.faults)
    ]


def sized_chart(title, lines, table, label, sizes, legend=(), marks=(), **options) -> Chart:
    """Return a chart in the two `sizes`, WIDE or SMALL. options: those of `line_chart`."""
    wide, narrow = (
        line_chart(lines, width=width, height=height, label=label, marks=marks, **options) for width, height in sizes
    )
    return Chart(title=title, wide=wide, narrow=narrow, legend=legend, table=table)


def optimizer_charts(data: RunData) -> Charts | None:
    """Return charts of gradient norm and learning rate by step, None for fewer than two logged steps."""
    if len(data.steps) < 2:
        return None
    steps = sorted(data.steps)
    norm = [(float(s), float(data.steps[s]["grad_norm"])) for s in steps]
    lr = [(float(s), float(data.steps[s]["lr"])) for s in steps]
    return Charts(
        [
            _small("Gradient norm, before clipping", norm, ".3f", data, smoothed=True),
            _small("Learning rate", lr, ".2e", data),
        ]
    )


def throughput_charts(data: RunData) -> Charts | None:
    """Return charts by step of MFU and peak memory, if they were measured, of tokens per second, and of the share of a
    step spent waiting for data; None for fewer than two log lines."""
    if len(data.progress) < 2:
        return None
    events = [data.progress[s] for s in sorted(data.progress)]
    speed = [(float(e["step"]), float(e["tokens_per_second"])) for e in events]
    wait = [(float(e["step"]), e["data_wait_seconds"] / e["step_seconds"]) for e in events if e["step_seconds"] > 0]
    mfu = [(float(e["step"]), float(e["mfu"])) for e in events if is_finite(e.get("mfu"))]
    peaks = [(float(e["step"]), e["peak_memory_bytes"]) for e in events if is_finite(e.get("peak_memory_bytes"))]
    gib = [(step, peak / 2**30) for step, peak in peaks]
    charts = [_small("MFU", mfu, ".1%", data, y_format=".0%", from_zero=True)] if len(mfu) > 1 else []
    charts += [_small("Peak memory of rank 0 (GiB)", gib, ".2f", data, from_zero=True)] if len(gib) > 1 else []
    charts += [
        _small("Tokens per second", speed, ",.0f", data, y_format="si", from_zero=True),
        _small("Waiting for data (share of a step)", wait, ".2%", data, y_format=".1%", from_zero=True),
    ]
    return Charts(charts)


def _small(title: str, points: Sequence[tuple[float, float]], spec: str, data: RunData, *, smoothed=False, **options):
    values = sorted(y for _, y in points if math.isfinite(y)) or [math.nan]
    label = f"{title}: {len(points)} points, from {points[0][1]:{spec}} to {points[-1][1]:{spec}}"
    lines = [Line("raw" if smoothed else "main", thin(points, 300))]
    if smoothed:
        lines.append(Line("main", thin(smooth(points, max(len(points) // 40, 5) | 1), 300)))
    row = tuple(format(v, spec) for v in (points[0][1], values[0], median(values), values[-1], points[-1][1]))
    header = ("First", "Lowest", "Median", "Highest", "Last")
    table = TableBlock(header, [row], right=(0, 1, 2, 3, 4), caption=title)
    return sized_chart(title, lines, table, label, SMALL, marks=_fault_marks(data, labeled=False), **options)


def metric_chart(data: RunData, by: str, name: str) -> Chart | None:
    """Return the chart of a metric of a callback or loss term by step, None for fewer than two finite values."""
    points = _finite([(float(step), float(value)) for step, value in sorted(data.metrics[by, name].items())])
    return _small(f"{name} ({by})", points, ".4g", data) if len(points) > 1 else None


def number_chart(data: RunData, title: str, name: str, spec: str, **options) -> Chart | None:
    """Return the chart of a number of `data.measured` by step, None for fewer than two finite values. options: those of
    `line_chart`."""
    points = _finite([(float(step), value) for step, value in sorted(data.measured.get(name, {}).items())])
    return _small(title, points, spec, data, **options) if len(points) > 1 else None


def expert_charts(data: RunData) -> Charts | None:
    """Return charts of the balance of expert loads by step: means over layers, or the largest and smallest load of all
    experts; None for fewer than two events."""
    if len(data.experts) < 2:
        return None
    events = [data.experts[s] for s in sorted(data.experts)]

    def points(name: str, of_layers=fmean) -> list[tuple[float, float]]:
        return [(float(e["step"]), of_layers(e[name])) for e in events if e[name] is not None]

    charts = [
        _small("Deviation of loads", points("load_cv"), ".3f", data, from_zero=True),
        _small("Busiest expert (x mean load)", points("max_load", max), ".2f", data, from_zero=True),
        _small("Entropy of a token's scores (nats)", points("entropy"), ".3f", data),
    ]
    shares = {"Dropped, beyond capacity": points("dropped"), "To the fallback expert": points("fallback")}
    if shares := {title: found for title, found in shares.items() if len(found) > 1}:
        charts += [_small(t, found, ".2%", data, y_format=".1%", from_zero=True) for t, found in shares.items()]
    else:
        charts.append(_small("Idlest expert (x mean load)", points("min_load", min), ".2f", data, from_zero=True))
    return Charts(charts)


def throughput_summary(data: RunData) -> list[tuple[str, str]]:
    """Return rows (label, median over the log lines without the first of each attempt)."""
    events = settled(data)
    if not events:
        return []
    rows = [("Tokens per second, median", format_count(median([e["tokens_per_second"] for e in events])))]
    waits = [e["data_wait_seconds"] / e["step_seconds"] for e in events if e["step_seconds"] > 0]
    if waits:
        rows.append(("Waiting for data, median", f"{median(waits):.2%} of a step"))
    if mfus := [e["mfu"] for e in events if is_finite(e.get("mfu"))]:
        rows.append(("MFU, median", f"{median(mfus):.1%}"))
    return rows


def settled(data: RunData) -> list[dict]:
    """Return the progress events in order, without the first of each attempt, which includes start-up costs."""
    events = [data.progress[s] for s in sorted(data.progress)]
    first = set()
    for start in data.starts:
        after = [e["step"] for e in events if e["time"] >= start["time"]]
        first.update(after[:1])
    return [e for e in events if e["step"] not in first]
