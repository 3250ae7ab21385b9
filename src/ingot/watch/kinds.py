"""The kinds of charts: which lines of a run each one has, and what the plan expects there."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ingot.observe.scalars import USES, axis_title
from ingot.planner.run.hyperparameters import size_in_laws
from ingot.planner.run.scaling import BESIROGLU
from ingot.report.evaluations import evaluated
from ingot.schema.metrics import ALL_RANKS, read_series
from ingot.schema.plan import Plan
from ingot.units import format_count
from ingot.watch.columns import TRAFFIC_COLUMNS
from ingot.watch.drawn import Question, WatchBand, WatchLine
from ingot.watch.live import LiveRun
from ingot.watch.series import Points, StepSeries

OWN = "own:"  # begins the keys of charts of callbacks and loss terms
MEASURED = "measured"  # the series of charts of LiveRun.measured
_LAYERS_SHOWN, _SOURCES_SHOWN = 6, 8
_GIB = 2**30
_FIT = BESIROGLU
_EARLY_POINTS = 2000


@dataclass(frozen=True)
class ChartKind:
    """A kind of chart. build: yields its lines, not thinned, and bands for a run and its number. series, column: it is
    shown for runs that have numbers there; of MEASURED, the name of a number, perhaps with a word in braces. note: what
    is not drawn of a run, and why; "": nothing."""

    title: str
    unit: str
    question: Question
    build: Callable[["ChartRequest", LiveRun, int], Iterable[WatchLine | WatchBand]]
    series: str
    column: str
    stacked: bool = False
    from_zero: bool = False
    log: bool = False
    marked: bool = False
    note: Callable[[LiveRun], str] = lambda run: ""


@dataclass(frozen=True)
class ChartRequest:
    """The steps that a chart shows, and the number of runs in it."""

    first: int
    last: int | None
    runs: int

    def line(
        self, run: LiveRun, series: str, column: str, name: str, number: int, scale: float = 1.0
    ) -> Iterable[WatchLine]:
        """Yield the line of a column, times `scale`; nothing without points."""
        points = getattr(run, series).points(column, self.first, self.last)
        if len(points.steps):
            scaled = points if scale == 1.0 else Points(points.steps, points.values * scale)
            yield WatchLine(name=name, style="main", points=scaled, run=number, feed=(series, column, scale))

    def void(self, series: StepSeries, column: str, run: int) -> Iterable[WatchLine]:
        """Yield the values of void steps, which the run trained again."""
        for points in series.void_points(column, self.first, self.last):
            yield WatchLine(name="rolled back", style="void", points=points, run=run)

    def smoothed(self, run: LiveRun, column: str, name: str, number: int) -> Iterable[WatchLine]:
        """Yield the line of each step and its mean over a window, like the report."""
        if run.unread:
            yield from self.recorded(run, column, name, number)
            return
        points = run.steps.points(column, self.first, self.last)
        if not len(points.steps):
            return
        window = max(len(points.steps) // 40, 5) | 1
        if self.runs <= 2:
            own = ("steps", column, 1.0)
            yield WatchLine(name="each logged step", style="raw", points=points, run=number, feed=own)
        words = f"{name}, mean of {window:,} logged steps"
        yield WatchLine(name=words, style="main", points=moving_mean(points, window), run=number)

    def recorded(self, run: LiveRun, column: str, name: str, number: int) -> Iterable[WatchLine]:
        """Yield the line from the recorded metrics, which open at once, while the log is still being read."""
        parts = read_series(run.folder.metrics, None, f"train/{column}", self.first, self.last, _EARLY_POINTS)
        for part in parts:
            style = "main" if part.valid else "void"
            yield WatchLine(name=name, style=style, points=Points(part.last, part.mean), run=number)


@np.errstate(over="ignore", invalid="ignore")  # the mean of values near the largest number is infinite, without a word
def moving_mean(points: Points, window: int) -> Points:
    """Return the centered moving mean over up to `window` finite points; the window shrinks at both ends."""
    finite = np.isfinite(points.values)
    steps, values = points.steps[finite], points.values[finite]
    half = min(window // 2, max(len(values) - 1, 0) // 2)
    ends = 2 * np.arange(half)  # the newest point of each window that shrinks, from either end
    first, last = np.cumsum(values[: 2 * half])[ends], np.cumsum(values[: -2 * half - 1 : -1])[ends]
    middle = _window_sums(values, 2 * half + 1) / (2 * half + 1)
    return Points(steps, np.concatenate((first / (ends + 1), middle, (last / (ends + 1))[::-1])))


def _window_sums(values: np.ndarray, width: int) -> np.ndarray:
    """Return the sum of each `width` neighbors. No sum has a value from outside its window: in differences of running
    sums, a single huge value would swallow all that come after it."""
    blocks = np.zeros(-(-len(values) // width) * width)
    blocks[: len(values)] = values
    blocks = blocks.reshape(-1, width)
    before = np.cumsum(blocks, axis=1).ravel()  # from the begin of its block to a value
    after = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()  # from a value to the end of its block
    begins = np.arange(len(values) - width + 1) if len(values) else np.zeros(0, np.int64)
    return after[begins] + np.where(begins % width, before[begins + width - 1], 0.0)


# -- the charts --


def _loss(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.void(run.steps, "loss", number)
    yield from asked.smoothed(run, "loss", "training loss", number)
    held_out = _evaluations(asked, run, lambda event: event["loss"])
    if len(held_out.steps):
        yield WatchLine(name="held-out loss", style="dots", points=held_out, run=number)
    expected = _expected_loss(asked, run)
    if len(expected.steps):
        words = f"of this size and tokens, by {_FIT.source}, on other text"
        yield WatchLine(name=words, style="expected", points=expected, run=number)


def _expected_loss(asked: ChartRequest, run: LiveRun) -> Points:
    """Return the loss by a published fit at log lines; none where the fit would be extrapolated (`_not_expected`)."""
    parameters = size_in_laws(run.data.run.model) if run.data.run else 0
    if not _FIT.parameters[0] <= parameters <= _FIT.parameters[1]:
        return Points(np.zeros(0, np.int64), np.zeros(0))
    steps, tokens = run.lines.points("tokens", asked.first, asked.last)
    known = (tokens >= _FIT.tokens[0]) & (tokens <= _FIT.tokens[1])
    steps, tokens = steps[known], tokens[known]
    return Points(steps, _FIT.e + _FIT.a / parameters**_FIT.alpha + _FIT.b / tokens**_FIT.beta)


def _not_expected(run: LiveRun) -> str:
    """Return why a run has no expected loss, or has none yet, in words; "": it has one, or its run file is unknown."""
    if run.data.run is None:
        return ""
    parameters, tokens = size_in_laws(run.data.run.model), run.lines.newest("tokens")
    if not _FIT.parameters[0] <= parameters <= _FIT.parameters[1]:
        what, value, (low, high) = "parameters", parameters, _FIT.parameters
    elif tokens is not None and not _FIT.tokens[0] <= tokens <= _FIT.tokens[1]:
        what, value, (low, high) = "tokens", tokens, _FIT.tokens
    else:
        return ""
    own = f"no expected loss for {format_count(value)} {what}"
    return f"{own}: the fit of {_FIT.source} is of {format_count(low)} to {format_count(high)}"


def _evaluations(asked: ChartRequest, run: LiveRun, value: Callable[[dict], float]) -> Points:
    found = [
        (event["step"], value(event))
        for event in evaluated(run.data)
        if event["step"] >= asked.first and (asked.last is None or event["step"] <= asked.last)
    ]
    return Points(np.array([step for step, _ in found], np.int64), np.array([own for _, own in found], float))


def _held_out(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    every = _evaluations(asked, run, lambda event: event["bpb"])
    if not len(every.steps):
        return
    yield WatchLine(name="held-out text", style="main", points=every, run=number)
    unigram = _evaluations(asked, run, lambda event: event["unigram_bpb"])
    yield WatchLine(name="frequencies of tokens alone", style="expected", points=unigram, run=number)
    sources = dict.fromkeys(source for event in evaluated(run.data) for source in event.get("by_source") or {})
    for source in list(sources)[:8] if asked.runs == 1 and len(sources) > 1 else ():
        points = _evaluations(asked, run, lambda event, own=source: _of_source(event, own))
        yield WatchLine(name=str(source), style="main", points=points, run=number)


def _of_source(event: dict, source: str) -> float:
    own = (event.get("by_source") or {}).get(source)
    value = own.get("bpb") if isinstance(own, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _grad_norm(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.void(run.steps, "grad_norm", number)
    yield from asked.smoothed(run, "grad_norm", "norm before clipping", number)


def _learning_rate(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "steps", "lr", "learning rate", number)


def _speed(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "tokens_per_second", "tokens per second", number)
    plan = run.data.plan
    if plan and plan.step_seconds:
        low, high = (plan.tokens_per_step / s for s in (_high(plan), plan.step_seconds_low or plan.step_seconds))
        yield WatchBand(name="the plan", low=low, high=high, run=number)


def _high(plan: Plan) -> float:
    return plan.step_seconds_high or plan.step_seconds


def _step_time(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "step_seconds", "a step", number)
    plan = run.data.plan
    if plan and plan.step_seconds:
        low = plan.step_seconds_low or plan.step_seconds
        yield WatchBand(name="the plan", low=low, high=_high(plan), run=number)


def _mfu(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "mfu", "MFU", number, 100.0)
    if run.data.plan and run.data.plan.mfu:
        yield WatchBand(name="the plan", low=run.data.plan.mfu * 100, high=run.data.plan.mfu * 100, run=number)


def _uses(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    for use in USES if number == 0 else ():
        yield from asked.line(run, "uses", use, use, number)


def _traffic(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    for column in TRAFFIC_COLUMNS if number == 0 else ():
        if run.traffic.points(column, asked.first, asked.last).values.any():
            axis, _, part = column.partition("/")
            yield from asked.line(run, "traffic", column, f"{axis_title(axis)}, {part}", number)


def _memory(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "peak_memory_bytes", "peak of rank 0", number, 1 / _GIB)
    if run.data.plan:
        expected = run.data.plan.total_memory_bytes / _GIB
        yield WatchBand(name="the plan", low=expected, high=expected, run=number)


def _loads(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "max_load", "busiest expert", number)
    yield from asked.line(run, "experts", "min_load", "idlest expert", number)


def _dropped(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "dropped", "dropped", number, 100.0)
    yield from asked.line(run, "experts", "fallback", "to the fallback expert", number, 100.0)


def _entropy(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "entropy", "entropy of a token's scores", number)


def _cost(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "lines", "cost_usd", "cost", number)


# -- charts of numbers by their names in schema/metrics.py --


def measured_lines(run: LiveRun, name: str) -> dict[str, StepSeries]:
    """Return the series with a name, or with each word in the place of the braces, by this word; those with values."""
    begin, brace, end = re.split(r"\{\w+(\})", name) if "{" in name else (name, "", "")
    named = {
        own[len(begin) : len(own) - len(end)]: series
        for own, series in run.measured.items()
        if (own.startswith(begin) and own.endswith(end) if brace else own == name)
    }
    return {word: series for word, series in named.items() if series.last_step}


def _number(name: str, words: str, scale: float = 1.0) -> Callable[[ChartRequest, LiveRun, int], Iterable[WatchLine]]:
    """Return the function that builds the chart of a number of the run."""

    def build(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
        for series in measured_lines(run, name).values():
            yield from asked.void(series, "value", number) if scale == 1.0 else ()
            points = series.points("value", asked.first, asked.last)
            yield WatchLine(name=words, style="main", points=Points(points.steps, points.values * scale), run=number)

    return build


def _by_source(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
    losses, shares = (measured_lines(run, f"data/{{source}}/{field}") for field in ("loss", "share"))
    largest = sorted(losses, key=lambda source: -((shares[source].newest("value") or 0.0) if source in shares else 0.0))
    for source in largest[: _SOURCES_SHOWN if asked.runs == 1 else 2]:
        points = losses[source].points("value", asked.first, asked.last)
        yield WatchLine(name=source, style="main", points=points, run=number)


def _by_layer(name: str) -> Callable[[ChartRequest, LiveRun, int], Iterable[WatchLine]]:
    """Return the function that builds the chart of a number of each layer: of a few layers all, of many the largest,
    the median and the smallest."""

    def build(asked: ChartRequest, run: LiveRun, number: int) -> Iterable[WatchLine]:
        layers = {
            layer: series.points("value", asked.first, asked.last)
            for layer, series in measured_lines(run, name).items()
        }
        if not layers:
            return
        if len(layers) <= _LAYERS_SHOWN and asked.runs == 1:
            for layer in sorted(layers, key=lambda own: (not own.isdigit(), own.zfill(6))):
                words = f"layer {layer}" if layer.isdigit() else "outside of layers"
                yield WatchLine(name=words, style="main", points=layers[layer], run=number)
            return
        steps = reduce(np.intersect1d, (points.steps for points in layers.values()))
        values = np.stack([points.values[np.searchsorted(points.steps, steps)] for points in layers.values()])
        for words, over in (("largest layer", np.max), ("median layer", np.median), ("smallest layer", np.min)):
            yield WatchLine(name=words, style="main", points=Points(steps, over(values, axis=0)), run=number)

    return build


def _measured(
    title: str,
    unit: str,
    question: Question,
    name: str,
    scale: float = 1.0,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> ChartKind:
    build = _number(name, title.lower() if title != "Goodput" else "time in steps that count", scale)
    return ChartKind(title, unit, question, build, MEASURED, name, log=log, from_zero=from_zero)


def _of_layers(title: str, unit: str, question: Question, name: str, *, log: bool = False) -> ChartKind:
    return ChartKind(title, unit, question, _by_layer(name), MEASURED, name, log=log)


CHARTS: dict[str, ChartKind] = {
    "loss": ChartKind(
        "Loss", "nats per token", "learning", _loss, "steps", "loss", log=True, marked=True, note=_not_expected
    ),
    "heldout": ChartKind("Held-out text", "bits per byte", "learning", _held_out, "", ""),
    "grad_norm": ChartKind("Gradient norm", "", "learning", _grad_norm, "steps", "grad_norm", log=True, marked=True),
    "source_loss": ChartKind(
        "Training loss by source", "nats per token", "learning", _by_source, MEASURED, "data/{source}/loss", log=True
    ),
    "update_ratio": _measured("Update over weights", "", "learning", "train/update_ratio", log=True),
    "param_norm": _measured("Norm of the weights", "", "learning", "train/param_norm"),
    "layer_norms": _of_layers("Gradient norm by layer", "", "learning", "layers/{layer}/grad_norm", log=True),
    "activations": _of_layers("Activations by layer", "RMS", "healthy", "layers/{layer}/activation_rms", log=True),
    "saturation": _of_layers(
        "Activations near the largest number", "share", "healthy", "layers/{layer}/activation_saturation"
    ),
    "lr": ChartKind("Learning rate", "", "learning", _learning_rate, "steps", "lr", from_zero=True),
    "speed": ChartKind(
        "Tokens per second", "tokens/s", "fast", _speed, "lines", "tokens_per_second", from_zero=True, marked=True
    ),
    "mfu": ChartKind("MFU", "%", "fast", _mfu, "lines", "mfu", from_zero=True),
    "step_time": ChartKind("Time of a step", "s", "fast", _step_time, "lines", "step_seconds", from_zero=True),
    "uses": ChartKind(
        "Parts of a step, mean over ranks", "s", "fast", _uses, "uses", "computing", stacked=True, from_zero=True
    ),
    "traffic": ChartKind(
        "Communication by axis, mean over ranks",
        "s",
        "fast",
        _traffic,
        "traffic",
        f"{ALL_RANKS}/exposed",
        from_zero=True,
    ),
    "memory": ChartKind("Memory", "GiB", "healthy", _memory, "lines", "peak_memory_bytes", from_zero=True),
    "loads": ChartKind("Load of experts", "x mean", "healthy", _loads, "experts", "max_load", from_zero=True),
    "dropped": ChartKind(
        "Beyond the capacity of experts", "%", "healthy", _dropped, "experts", "dropped", from_zero=True
    ),
    "entropy": ChartKind("Entropy of the router", "nats", "healthy", _entropy, "experts", "entropy"),
    "route_flips": _measured(
        "Routes that flipped since the check before", "%", "healthy", "experts/route_flips", 100.0, from_zero=True
    ),
    "cost": ChartKind("Cost", "USD", "cost", _cost, "lines", "cost_usd", from_zero=True),
    "goodput": _measured("Goodput", "%", "cost", "run/goodput", 100.0, from_zero=True),
    "cost_to_come": _measured("Cost to come", "USD", "cost", "run/cost_to_come_usd", from_zero=True),
}


def kind_of(key: str) -> ChartKind | None:
    """Return the kind of the chart with a key of CHARTS, or of one of a callback or loss term; None for another key."""
    if not key.startswith(OWN):
        return CHARTS.get(key)
    name = key.removeprefix(OWN)
    return ChartKind(name, "", "learning", lambda asked, run, number: _own(asked, run, number, name), "own", name)


def _own(asked: ChartRequest, run: LiveRun, number: int, name: str) -> Iterable[WatchLine]:
    if name in run.own:
        points = run.own[name].points("value", asked.first, asked.last)
        yield WatchLine(name=name.partition("/")[2], style="main", points=points, run=number)
