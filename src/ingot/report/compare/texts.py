"""The numbers of a comparison as text, for the terminal and the page."""

from collections.abc import Callable, Sequence

from ingot.report.compare.align import ComparedMetric, ComparedPoint, RunComparison
from ingot.report.compare.curves import Axis
from ingot.report.compare.differing import letter_of
from ingot.units import format_count, format_flops, format_seconds, format_usd

Row = tuple[str, ...]
_COUNT = "{:,.0f}".format
_SHARE = "{:.1%}".format
_FINE = "{:.4f}".format
_RELATIVE, _POINTS, _ABSOLUTE = "relative", "points", "absolute"
# Metric -> its label, the text of a value, and the kind of difference that is shown.
_SHOWN: dict[str, tuple[str, Callable[[float], str], str]] = {
    "train/step": ("step", _COUNT, ""),
    "train/tokens": ("tokens", format_count, ""),
    "run/train_seconds": ("training time", format_seconds, _RELATIVE),
    "train/loss": ("loss", _FINE, _ABSOLUTE),
    "train/bpb": ("bits per byte", _FINE, _ABSOLUTE),
    "eval/bpb": ("held-out bpb", _FINE, _ABSOLUTE),
    "train/grad_norm": ("gradient norm", "{:.3f}".format, _RELATIVE),
    "train/lr": ("learning rate", "{:.3g}".format, ""),
    "perf/tokens_per_second": ("tokens/s", format_count, _RELATIVE),
    "perf/mfu": ("MFU", _SHARE, _POINTS),
    "run/goodput": ("goodput", _SHARE, _POINTS),
    "run/cost_usd": ("cost", format_usd, _RELATIVE),
    "run/faults": ("faults", _COUNT, ""),
    "run/roll_backs": ("roll-backs", _COUNT, ""),
    "run/skipped_steps": ("skipped updates", _COUNT, ""),
}
LABELS = tuple(label for label, _, _ in _SHOWN.values())
_UNITS = {"tokens": "tokens", "flops": "FLOP", "steps": "steps", "time": "training time"}


def label_of(name: str) -> str:
    """Return the label of a metric: that of "eval/arc_easy/acc" is "arc_easy acc"."""
    return _SHOWN[name][0] if name in _SHOWN else name.removeprefix("eval/").replace("/", " ")


def value_text(metric: ComparedMetric, number: int) -> str:
    """Return the value of a run; "~" marks one between two evaluations, "-" an unknown one."""
    value = metric.values[number]
    if value is None:
        return "-"
    mark = "~" if metric.interpolated[number] and metric.name.startswith("eval/") else ""
    return mark + (_SHOWN[metric.name][1] if metric.name in _SHOWN else _FINE)(value)


def difference_text(metric: ComparedMetric, number: int) -> str:
    """Return the difference of a run to the first, with its size in deviations of noise; "" if it has none, or none
    to speak of."""
    difference, base, sigmas = metric.differences[number], metric.values[0], metric.sigmas[number]
    kind = _SHOWN[metric.name][2] if metric.name in _SHOWN else _ABSOLUTE
    if difference is None or not kind:
        return ""
    if kind == _ABSOLUTE and not difference:
        return "equal"
    if kind == _ABSOLUTE:
        size = "" if sigmas is None else f" ({sigmas:+.1f}σ)" if abs(sigmas) < 99.95 else " (over 99σ)"
        return f"{difference:+.4f}{size}"
    percent = 100 * difference / (base or 1.0) if kind == _RELATIVE else 100 * difference
    if abs(percent) < 0.05 or not base:
        return ""
    return f"{percent:+.1f}" + ("%" if kind == _RELATIVE else " points")


def x_text(by: Axis, x: float) -> str:
    """Return a place on the axis with its unit: "2.9M tokens"."""
    return {
        "tokens": lambda: f"{format_count(x)} tokens",
        "flops": lambda: format_flops(x),
        "steps": lambda: f"step {x:,.0f}",
        "time": lambda: format_seconds(x),
    }[by]()


def axis_label(by: Axis) -> str:
    return _UNITS[by]


def columns_of(numbers: Sequence[int]) -> Row:
    """Return the header of tables with a value for each run, and its difference to the first."""
    header = ["A"]
    for number in numbers[1:]:
        header += [letter_of(number), f"{letter_of(number)} to A"]
    return tuple(header)


def cells_of(metric: ComparedMetric, numbers: Sequence[int]) -> Row:
    """Return the values of a metric for the columns of `columns_of`."""
    cells = [value_text(metric, 0)]
    for number in numbers[1:]:
        cells += [value_text(metric, number), difference_text(metric, number)]
    return tuple(cells)


def shown_metrics(point: ComparedPoint) -> list[ComparedMetric]:
    """Return the metrics of a point, without counts of incidents that no run had."""
    return [metric for metric in point.metrics if not metric.name.startswith("run/") or any(metric.values)]


def metric_rows(point: ComparedPoint, numbers: Sequence[int]) -> list[Row]:
    """Return the rows (label, value of each run) of the metrics at a point; below a metric that has differences, a row
    of them. numbers: of the runs to show, the first of which is 0."""
    rows: list[Row] = []
    for metric in shown_metrics(point):
        rows.append((label_of(metric.name), *(value_text(metric, number) for number in numbers)))
        differences = [difference_text(metric, number) for number in numbers]
        if any(differences):
            rows.append(("  to A", *differences))
    return rows


def quarter_rows(found: RunComparison, numbers: Sequence[int]) -> tuple[Row, list[Row]]:
    """Return the header and the rows of the measure of the comparison at every point: x, then the value of each run
    with its difference to the first."""
    measured = [(point.x, metric) for point in found.points if (metric := point.metric(found.measure))]
    rows = [(x_text(found.by, x), *cells_of(metric, numbers)) for x, metric in measured]
    return (axis_label(found.by), *columns_of(numbers)), rows


def window_text(window: float) -> str:
    """Return how the losses were made. window: a share of the range that all runs have."""
    return (
        f"Losses are means over the last {window:.1%} of the range that all runs have, and at least 8 steps of each. "
        "σ: the difference over its standard error, from the noise between steps; for runs that saw the same samples, "
        "from that of their differences. It has no part from another seed."
    )
