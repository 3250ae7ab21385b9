"""Charts of runs over steps, as plain data, thinned for the pixels on which a page or a terminal draws them.

Callers hold the locks of the runs while another thread refreshes them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ingot.observe.scalars import USES
from ingot.planner.run.scaling import BESIROGLU
from ingot.report.evaluations import evaluated
from ingot.watch.incidents import Severity
from ingot.watch.live import LiveRun
from ingot.watch.series import Points, StepSeries, thinned

Question = Literal["learning", "fast", "healthy", "cost"]
QUESTIONS: dict[Question, str] = {
    "learning": "Is it learning?",
    "fast": "Is it fast?",
    "healthy": "Is it healthy?",
    "cost": "What did it cost?",
}
_OWN = "own:"  # begins the keys of charts of callbacks and loss terms
_GIB = 2**30
_FIT_PARAMETERS = 40e6  # the smallest models of the fit of Besiroglu et al.
_MARK_PIXELS = 6
_MARK_TEXTS = 6


@dataclass(frozen=True, kw_only=True)
class WatchLine:
    """A line of a chart. run: its number among the runs of the chart. style: "main"; "raw": pale, under its smoothed
    line; "dots": single points; "void": steps from which the run went back; "expected": by the plan. points: thinned;
    values that are not finite are gaps. feed: (series, column, factor): new values of that column of the LiveRun's
    series, times the factor, continue this line; None: only another chart does."""

    name: str
    style: Literal["main", "raw", "dots", "void", "expected"]
    points: Points
    run: int = 0
    feed: tuple[str, str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class WatchBand:
    """A range of values that the plan expects. low equals high for a single value."""

    name: str
    low: float
    high: float
    run: int = 0


@dataclass(frozen=True, kw_only=True)
class WatchMark:
    """Incidents at the steps step..last_step, which are as wide as a few pixels. text: a sentence per line, of the
    first; count: of all."""

    step: int
    last_step: int
    severity: Severity
    text: str
    count: int
    run: int = 0


@dataclass(frozen=True, kw_only=True)
class WatchChart:
    """A chart over steps. stacked: its lines are parts of a whole. from_zero: its axis begins at 0. log: values spread
    so far that a logarithmic axis helps. first, last: the steps that it covers. total: the points before thinning."""

    key: str
    title: str
    unit: str
    question: Question
    lines: tuple[WatchLine, ...]
    bands: tuple[WatchBand, ...] = ()
    marks: tuple[WatchMark, ...] = ()
    stacked: bool = False
    from_zero: bool = False
    log: bool = False
    first: int = 1
    last: int = 1
    total: int = 0


@dataclass(frozen=True)
class _Kind:
    """A kind of chart. build: yields its lines, not thinned, and bands for a run and its number. series, column: it is
    shown for runs that have numbers there."""

    title: str
    unit: str
    question: Question
    build: Callable[["_Request", LiveRun, int], Iterable[WatchLine | WatchBand]]
    series: str
    column: str
    stacked: bool = False
    from_zero: bool = False
    log: bool = False
    marked: bool = False


@dataclass(frozen=True)
class _Request:
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
        points = run.steps.points(column, self.first, self.last)
        if not len(points.steps):
            return
        window = max(len(points.steps) // 40, 5) | 1
        if self.runs <= 2:
            own = ("steps", column, 1.0)
            yield WatchLine(name="each logged step", style="raw", points=points, run=number, feed=own)
        words = f"{name}, mean of {window:,} logged steps"
        yield WatchLine(name=words, style="main", points=moving_mean(points, window), run=number)


def moving_mean(points: Points, window: int) -> Points:
    """Return the centered moving mean over up to `window` finite points; the window shrinks at both ends."""
    finite = np.isfinite(points.values)
    steps, values = points.steps[finite], points.values[finite]
    sums = np.r_[0.0, np.cumsum(values)]
    index = np.arange(len(values))
    half = np.minimum(np.minimum(window // 2, index), len(values) - 1 - index)
    return Points(steps, (sums[index + half + 1] - sums[index - half]) / (2 * half + 1))


# -- the charts --


def _loss(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.void(run.steps, "loss", number)
    yield from asked.smoothed(run, "loss", "training loss", number)
    held_out = _evaluations(asked, run, lambda event: event["loss"])
    if len(held_out.steps):
        yield WatchLine(name="held-out loss", style="dots", points=held_out, run=number)
    expected = _expected_loss(asked, run)
    if len(expected.steps):
        words = f"of this size and tokens, by {BESIROGLU.source}, on other text"
        yield WatchLine(name=words, style="expected", points=expected, run=number)


def _expected_loss(asked: _Request, run: LiveRun) -> Points:
    """Return the loss by a published fit at log lines; none for models smaller than those of the fit."""
    parameters = run.data.plan.parameters if run.data.plan else 0
    if parameters < _FIT_PARAMETERS:
        return Points(np.zeros(0, np.int64), np.zeros(0))
    steps, tokens = run.lines.points("tokens", asked.first, asked.last)
    steps, tokens = steps[tokens > 0], tokens[tokens > 0]
    fit = BESIROGLU
    return Points(steps, fit.e + fit.a / parameters**fit.alpha + fit.b / tokens**fit.beta)


def _evaluations(asked: _Request, run: LiveRun, value: Callable[[dict], float]) -> Points:
    found = [
        (event["step"], value(event))
        for event in evaluated(run.data)
        if event["step"] >= asked.first and (asked.last is None or event["step"] <= asked.last)
    ]
    return Points(np.array([step for step, _ in found], np.int64), np.array([own for _, own in found], float))


def _held_out(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
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


def _grad_norm(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.void(run.steps, "grad_norm", number)
    yield from asked.smoothed(run, "grad_norm", "norm before clipping", number)


def _learning_rate(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "steps", "lr", "learning rate", number)


def _speed(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "tokens_per_second", "tokens per second", number)
    plan = run.data.plan
    if plan and plan.step_seconds:
        low, high = (plan.tokens_per_step / s for s in (_high(plan), plan.step_seconds_low or plan.step_seconds))
        yield WatchBand(name="the plan", low=low, high=high, run=number)


def _high(plan) -> float:
    return plan.step_seconds_high or plan.step_seconds


def _step_time(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "step_seconds", "a step", number)
    plan = run.data.plan
    if plan and plan.step_seconds:
        low = plan.step_seconds_low or plan.step_seconds
        yield WatchBand(name="the plan", low=low, high=_high(plan), run=number)


def _mfu(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "mfu", "MFU", number, 100.0)
    if run.data.plan and run.data.plan.mfu:
        yield WatchBand(name="the plan", low=run.data.plan.mfu * 100, high=run.data.plan.mfu * 100, run=number)


def _uses(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    for use in USES if number == 0 else ():
        yield from asked.line(run, "uses", use, use, number)


def _memory(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine | WatchBand]:
    yield from asked.line(run, "lines", "peak_memory_bytes", "peak of rank 0", number, 1 / _GIB)
    if run.data.plan:
        expected = run.data.plan.total_memory_bytes / _GIB
        yield WatchBand(name="the plan", low=expected, high=expected, run=number)


def _loads(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "max_load", "busiest expert", number)
    yield from asked.line(run, "experts", "min_load", "idlest expert", number)


def _dropped(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "dropped", "dropped", number, 100.0)
    yield from asked.line(run, "experts", "fallback", "to the fallback expert", number, 100.0)


def _entropy(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "experts", "entropy", "entropy of a token's scores", number)


def _cost(asked: _Request, run: LiveRun, number: int) -> Iterable[WatchLine]:
    yield from asked.line(run, "lines", "cost_usd", "cost", number)


CHARTS: dict[str, _Kind] = {
    "loss": _Kind("Loss", "nats per token", "learning", _loss, "steps", "loss", log=True, marked=True),
    "heldout": _Kind("Held-out text", "bits per byte", "learning", _held_out, "", ""),
    "grad_norm": _Kind("Gradient norm", "", "learning", _grad_norm, "steps", "grad_norm", log=True, marked=True),
    "lr": _Kind("Learning rate", "", "learning", _learning_rate, "steps", "lr", from_zero=True),
    "speed": _Kind("Tokens per second", "tokens/s", "fast", _speed, "lines", "tokens_per_second", from_zero=True, marked=True),
    "mfu": _Kind("MFU", "%", "fast", _mfu, "lines", "mfu", from_zero=True),
    "step_time": _Kind("Time of a step", "s", "fast", _step_time, "lines", "step_seconds", from_zero=True),
    "uses": _Kind("Parts of a step, mean over ranks", "s", "fast", _uses, "uses", "computing", stacked=True, from_zero=True),
    "memory": _Kind("Memory", "GiB", "healthy", _memory, "lines", "peak_memory_bytes", from_zero=True),
    "loads": _Kind("Load of experts", "x mean", "healthy", _loads, "experts", "max_load", from_zero=True),
    "dropped": _Kind("Beyond the capacity of experts", "%", "healthy", _dropped, "experts", "dropped", from_zero=True),
    "entropy": _Kind("Router", "nats", "healthy", _entropy, "experts", "entropy"),
    "cost": _Kind("Cost", "USD", "cost", _cost, "lines", "cost_usd", from_zero=True),
}


def chart_keys(runs: Sequence[LiveRun]) -> list[str]:
    """Return the keys of the charts for which a run has numbers, in the order of CHARTS; then those of callbacks."""
    known = [key for key, kind in CHARTS.items() if any(_has(run, kind) for run in runs)]
    own = dict.fromkeys(name for run in runs for name in run.own)
    return known + [_OWN + name for name in own]


def _has(run: LiveRun, kind: _Kind) -> bool:
    if not kind.series:
        return bool(evaluated(run.data))
    return getattr(run, kind.series).newest(kind.column) is not None


def chart(
    runs: Sequence[LiveRun], key: str, first: int = 1, last: int | None = None, pixels: int = 1000
) -> WatchChart | None:
    """Return a chart of the steps first..last, thinned for a width of `pixels`: at most about two points per pixel and
    line, with all extremes; every point where there are no more. last: None for the newest step. Return None for an
    unknown key."""
    kind = CHARTS.get(key)
    if key.startswith(_OWN):
        name = key.removeprefix(_OWN)
        kind = _Kind(name, "", "learning", lambda asked, run, number: _own(asked, run, number, name), "own", name)
    if kind is None:
        return None
    asked = _Request(first, last, len(runs))
    lines: list[WatchLine] = []
    bands: list[WatchBand] = []
    total = 0
    for number, run in enumerate(runs):
        for part in kind.build(asked, run, number):
            if isinstance(part, WatchBand):
                bands.append(part)
                continue
            total += len(part.points.steps)
            chosen = thinned(part.points, pixels // 2)
            points = Points(part.points.steps[chosen], part.points.values[chosen])
            lines.append(replace(part, points=points))
    lines = [line for line in lines if len(line.points.steps)]
    begin = min((int(line.points.steps[0]) for line in lines), default=first)
    end = max((int(line.points.steps[-1]) for line in lines), default=last or first)
    marks = tuple(m for n, run in enumerate(runs) for m in _marks(run, n, begin, end, pixels)) if kind.marked else ()
    return WatchChart(
        key=key, title=kind.title, unit=kind.unit, question=kind.question, lines=tuple(lines), bands=tuple(bands),
        marks=marks, stacked=kind.stacked, from_zero=kind.from_zero, log=kind.log, first=begin, last=end, total=total,
    )  # fmt: skip


def _own(asked: _Request, run: LiveRun, number: int, name: str) -> Iterable[WatchLine]:
    if name in run.own:
        points = run.own[name].points("value", asked.first, asked.last)
        yield WatchLine(name=name.partition("/")[2], style="main", points=points, run=number)


_ORDER: tuple[Severity, ...] = ("info", "warn", "bad")


def _marks(run: LiveRun, number: int, first: int, last: int, pixels: int) -> Iterable[WatchMark]:
    """Yield the incidents of these steps; those within a few pixels are one mark."""
    width = max((last - first + 1) * _MARK_PIXELS / max(pixels, 1), 1.0)
    found: dict[int, list] = {}
    for incident in run.incidents:
        if first <= incident.step <= last:
            found.setdefault(int((incident.step - first) / width), []).append(incident)
    for _, group in sorted(found.items()):
        steps = [one.step for one in group]
        texts = [f"step {one.step:,}: {one.text}" for one in group[:_MARK_TEXTS]]
        if len(group) > _MARK_TEXTS:
            texts.append(f"and {len(group) - _MARK_TEXTS:,} more")
        yield WatchMark(
            step=min(steps), last_step=max(steps), severity=max((one.severity for one in group), key=_ORDER.index),
            text="\n".join(texts), count=len(group), run=number,
        )  # fmt: skip
