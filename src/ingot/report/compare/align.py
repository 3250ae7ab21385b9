"""Runs compared at equal tokens, FLOPs, steps or time: metrics with their differences, and the noise between steps.

The first run is the one that the others are compared with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ingot.errors import UsageError
from ingot.report.compare.curves import AXES, Axis, ComparedRun, Curve
from ingot.report.compare.differing import SettingDifference, differing_settings, notes_of, same_samples, same_tokens
from ingot.schema.metrics import metric_of

SCHEMA = 1  # of the JSON form; a new field does not change it
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the range that all runs have
WINDOW = 0.025  # of that range: losses are means over it
_LEAST_STEPS = 8  # of each run in such a mean, where it has them
_NOISE_STEPS = 32  # least number of steps from which the noise is estimated
_PAIRED = ("train/loss", "train/bpb")
_LINES = {"perf/tokens_per_second": "tokens_per_second", "perf/mfu": "mfu"}
_OWN_UNITS = {"eval/bpb": "bits per byte", "train/step": "", "run/train_seconds": "s", "train/flops": "FLOP"}


@dataclass(frozen=True, kw_only=True)
class ComparedMetric:
    """A metric of all runs at one point, as lists with a value per run; None: not known.

    noise: the standard error of each value, from the noise between steps, or of a task. differences: to the value of
    the first run. sigmas: each difference, divided by its standard error. interpolated: the value is between two
    evaluations. paired: the standard error is that of differences at equal steps, because both runs saw the same
    samples.
    """

    name: str
    unit: str
    values: list[float | None]
    noise: list[float | None]
    differences: list[float | None]
    sigmas: list[float | None]
    interpolated: list[bool]
    paired: list[bool]


@dataclass(frozen=True, kw_only=True)
class ComparedPoint:
    """The metrics at one value of the axis. share: of the range that all runs have."""

    share: float
    x: float
    metrics: list[ComparedMetric]

    def metric(self, name: str) -> ComparedMetric | None:
        return next((one for one in self.metrics if one.name == name), None)


class AlignedRun:
    """The curves of a run along an axis, each made once. Attributes as the methods of ComparedRun; all: by the names
    of metrics; errors: standard errors of evaluations."""

    def __init__(self, run: ComparedRun, by: Axis):
        self.run, axes = run, {name: run.axis(name) for name in AXES if name in (by, "tokens", "time")}
        self.axis, self.tokens, self.time = axes[by], axes["tokens"], axes["time"]
        of_lines = {name: run.of_lines(own) for name, own in _LINES.items()}
        curves = {
            "train/loss": run.of_steps("loss"),
            "train/grad_norm": run.of_steps("grad_norm"),
            "train/lr": run.of_steps("lr"),
            "run/goodput": run.goodput(),
            **of_lines,
        }
        values, errors = run.evaluations()
        self.evaluations = {name: self._moved(curve) for name, curve in values.items()}
        self.errors = {name: self._moved(curve) for name, curve in errors.items()}
        self.all = {name: self._moved(curve) for name, curve in curves.items()} | self.evaluations
        if run.bytes_per_token:
            loss = self.all["train/loss"]
            self.all["train/bpb"] = Curve(loss.x, loss.y / (run.bytes_per_token * math.log(2)))
        self.cost = self._moved(run.of_lines("cost_usd", first_lines=True))
        self.incidents = run.incidents()

    def _moved(self, curve: Curve) -> Curve:
        return Curve(self.axis(curve.x), curve.y)

    def step_at(self, x: float) -> float:
        """Return the first step at `x`, or a fraction between two steps where none is at it."""
        low, high = 0.0, float(self.run.step)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if float(self.axis([middle])[0]) < x else (low, middle)
        return high

    def least_window(self, x: float) -> float:
        """Return the width of the range before `x` that has enough steps for a mean, or all steps before `x`."""
        return x - float(self.axis([max(self.step_at(x) - _LEAST_STEPS, 0.0)])[0])


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """The comparison of several runs.

    first, last: the range of the axis that all runs have. same_tokens: the runs have the same tokenizer, so their
    losses per token can be compared; None: not known. settings: those that differ. notes: sentences about limits of
    the comparison.
    """

    by: Axis
    aligned: list[AlignedRun]
    first: float
    last: float
    same_tokens: bool | None
    settings: list[SettingDifference]
    notes: list[str]
    points: list[ComparedPoint]

    @property
    def runs(self) -> list[ComparedRun]:
        return [one.run for one in self.aligned]

    def window_at(self, x: float, share: float = WINDOW) -> float:
        """Return the width of the means before `x`. share: of the range that all runs have."""
        return common_window(self.aligned, x, share * (self.last - self.first))

    @property
    def labels(self) -> list[str]:
        """The names of the runs; if they are not all different, those of their folders, else the paths."""
        runs = self.runs
        every = ([run.name for run in runs], [run.path.resolve().name for run in runs], [str(run.path) for run in runs])
        return next((labels for labels in every if len(set(labels)) == len(labels)), every[-1])

    @property
    def measure(self) -> str:
        """The metric by which the runs are compared: the loss, or bits per byte if the tokenizers differ."""
        has_bits = all("train/bpb" in one.all for one in self.aligned)
        return "train/bpb" if self.same_tokens is False and has_bits else "train/loss"

    def as_dict(self) -> dict:
        """Return the comparison for JSON. Numbers that are not finite are None."""
        runs = [
            {
                "path": str(one.run.path),
                "name": one.run.name,
                "state": one.run.state,
                "steps": one.run.config.train.steps,
                "step": one.run.step,
                "last": float(one.axis([one.run.step])[0]),
            }
            for one in self.aligned
        ]
        return {
            "schema": SCHEMA,
            "by": self.by,
            "runs": runs,
            "first": self.first,
            "last": self.last,
            "same_tokenizer": self.same_tokens,
            "settings": [asdict(one) for one in self.settings],
            "notes": self.notes,
            "points": [asdict(one) for one in self.points],
        }


def compare_runs(paths: Sequence[Path], by: Axis = "tokens") -> RunComparison:
    """Compare two or more run folders, which may still be training.

    Raises UsageError for fewer than two different folders, for a folder without a run or without logged steps, and for
    runs without a common range; DataError or ConfigError for files that cannot be read.
    """
    if len({path.resolve() for path in paths}) < max(len(paths), 2):
        twice = len(paths) > 1
        raise UsageError(
            "E-COMPARE-RUNS",
            "a run folder is named twice" if twice else "one run is no comparison",
            rule="a comparison is of two or more different run folders; the others are compared with the first",
            fix="name each run folder once: ingot compare runs/a runs/b",
            runs=[str(path) for path in paths],
        )
    runs = [ComparedRun(path) for path in paths]
    aligned = [AlignedRun(run, by) for run in runs]
    ranges = [one.axis([one.run.first_step, one.run.step]) for one in aligned]
    first, last = max(float(one[0]) for one in ranges), min(float(one[1]) for one in ranges)
    if first > last:
        late = int(np.argmax([one[0] for one in ranges]))
        early = int(np.argmin([one[1] for one in ranges]))
        raise UsageError(
            "E-COMPARE-NO-OVERLAP",
            f"{runs[late].path} begins at {first:.6g} {by}, after the end of {runs[early].path} at {last:.6g}",
            rule="runs are compared where all of them have logged steps",
            fix="leave one of them out, or align them by something else: --by tokens, flops, steps or time",
            first=first,
            last=last,
        )
    same = same_tokens(runs)
    points, before, window = [], first, (last - first) * WINDOW
    for x in sorted({first + share * (last - first) for share in SHARES}):
        found: dict[str, list[_Value]] = {}
        common = common_window(aligned, x, window)
        for number, one in enumerate(aligned):
            for name, value in _values(one, before, x, window, common).items():
                found.setdefault(name, [_NONE] * len(runs))[number] = value
        comparable = {name: same is not False or name != "train/loss" for name in found}
        metrics = [
            _metric(name, values, _paired_errors(name, aligned, x, common), comparable=comparable[name])
            for name, values in found.items()
        ]
        share = (x - first) / (last - first) if last > first else 1.0
        points.append(ComparedPoint(share=round(share, 6), x=x, metrics=metrics))
        before = x
    return RunComparison(
        by=by,
        aligned=aligned,
        first=first,
        last=last,
        same_tokens=same,
        settings=differing_settings(runs),
        notes=notes_of(runs, same, by),
        points=points,
    )


@dataclass(frozen=True)
class _Value:
    value: float | None
    noise: float | None = None
    interpolated: bool = False


_NONE = _Value(None)


def _paired_errors(name: str, aligned: list[AlignedRun], x: float, window: float) -> list[float | None]:
    """Return the standard error of the difference of each run to the first, where both saw the same samples in the same
    steps: the noise of the samples is in both, and not in their difference. None: they did not."""
    base = aligned[0]
    return [
        paired_error(base.all[name], one.all[name], x, window)
        if name in _PAIRED and one is not base and name in base.all.keys() & one.all and same_samples(base.run, one.run)
        else None
        for one in aligned
    ]


def paired_error(base: Curve, other: Curve, x: float, window: float) -> float | None:
    """Return the standard error of a difference of means, from the differences at equal places before `x`; None if the
    means are not over the same places."""
    common, first, second = np.intersect1d(base.x, other.x, return_indices=True)
    begin, end = _part(common, x, window)
    parts = [_part(curve.x, x, window) for curve in (base, other)]
    if end - begin < _LEAST_STEPS or any(stop - start != end - begin for start, stop in parts):
        return None
    start = max(min(begin, end - _NOISE_STEPS), 0)
    noise = noise_between_steps(other.y[second[start:end]] - base.y[first[start:end]])
    return None if noise is None else noise / math.sqrt(end - begin)


def _metric(name: str, values: list[_Value], paired_errors: list[float | None], *, comparable: bool) -> ComparedMetric:
    base = values[0]
    differences: list[float | None] = [None] * len(values)
    sigmas: list[float | None] = [None] * len(values)
    for number, one in enumerate(values[1:], 1):
        if not comparable or base.value is None or one.value is None:
            continue
        differences[number] = one.value - base.value
        error = paired_errors[number]
        if error is None and base.noise is not None and one.noise is not None:
            error = math.hypot(base.noise, one.noise)
        if error:
            sigmas[number] = (one.value - base.value) / error
    known = metric_of(name)
    return ComparedMetric(
        name=name,
        unit=known.unit if known else _OWN_UNITS.get(name, ""),
        values=[one.value for one in values],
        noise=[one.noise for one in values],
        differences=differences,
        sigmas=sigmas,
        interpolated=[one.interpolated for one in values],
        paired=[error is not None for error in paired_errors],
    )


def _values(one: AlignedRun, before: float, x: float, window: float, common: float) -> dict[str, _Value]:
    """Return the metrics of a run at `x`, without those that it lacks. before: the point before it, after which speeds
    are taken. common: the width of means."""
    step, curves = one.step_at(x), one.all
    found = {
        "train/step": _Value(round(step, 3)),
        "train/tokens": _Value(float(one.tokens([step])[0])),
        "run/train_seconds": _Value(float(one.time([step])[0])),
    }
    for name in ("train/loss", "train/bpb"):
        found[name] = mean_before(curves[name], x, common) if name in curves else _NONE
    for name, curve in one.evaluations.items():
        found[name] = value_at(curve, x, window)
        if name in one.errors:
            found[name] = replace(found[name], noise=value_at(one.errors[name], x, window).value)
    found["train/grad_norm"] = _Value(mean_before(curves["train/grad_norm"], x, common).value)
    found["train/lr"] = value_at(curves["train/lr"], x, window)
    for name in _LINES:
        found[name] = _Value(_median_between(curves[name], before, x))
    found["run/goodput"] = last_before(curves["run/goodput"], x)
    found["run/cost_usd"] = value_at(one.cost, x, window)
    for name, steps in one.incidents.items():
        found[name] = _Value(float(sum(lost < step for lost in steps)))
    return {name: value for name, value in found.items() if value.value is not None}


def common_window(aligned: Sequence[AlignedRun], x: float, window: float) -> float:
    """Return `window`, or the wider one in which every run has enough steps: means over ranges of different widths
    differ where the loss falls, even if the runs do not."""
    return max([window, *(one.least_window(x) for one in aligned)])


def mean_before(curve: Curve, x: float, window: float) -> _Value:
    """Return the mean over x - window to x, with its standard error; no value if there is no step there."""
    begin, end = _part(curve.x, x, window)
    part = curve.y[begin:end]
    if not len(part):
        return _NONE
    noise = noise_between_steps(curve.y[max(min(begin, end - _NOISE_STEPS), 0) : end])
    return _Value(float(part.mean()), None if noise is None else noise / math.sqrt(len(part)))


def _part(places: np.ndarray, x: float, window: float) -> tuple[int, int]:
    """Return the begin and the end of the places from x - window, not included, to x."""
    begin = np.searchsorted(places, x - window * (1 - 1e-9), side="right")  # a place at the border is off by rounding
    end = np.searchsorted(places, x, side="right")
    return int(min(begin, end)), int(end)


def noise_between_steps(values: np.ndarray) -> float | None:
    """Return the standard deviation of the noise in values of consecutive steps; None for fewer than five.

    It is that of the differences between neighbors, so a slope does not count, from their median, so a spike does not
    either.
    """
    if len(values) < 5:
        return None
    return float(np.median(np.abs(np.diff(values)))) * 1.4826 / math.sqrt(2)


def value_at(curve: Curve, x: float, window: float) -> _Value:
    """Return the value at `x`, between the neighbors where there is none; beyond the ends only within `window`."""
    if not len(curve.x):
        return _NONE
    if not curve.x[0] <= x <= curve.x[-1]:
        nearest = 0 if x < curve.x[0] else -1
        return _Value(float(curve.y[nearest])) if abs(float(curve.x[nearest]) - x) <= window else _NONE
    exact = bool(np.isclose(curve.x, x, rtol=1e-9, atol=0).any())
    return _Value(float(np.interp(x, curve.x, curve.y)), interpolated=not exact)


def last_before(curve: Curve, x: float) -> _Value:
    """Return the last value up to `x`."""
    end = int(np.searchsorted(curve.x, x, side="right"))
    return _Value(float(curve.y[end - 1])) if end else _NONE


def _median_between(curve: Curve, before: float, x: float) -> float | None:
    part = curve.y[(curve.x > before) & (curve.x <= x)]
    if not len(part):
        return last_before(curve, x).value
    return float(np.median(part))


def difference_curve(base: Curve, other: Curve, windows: Mapping[float, float]) -> Curve:
    """Return other - base, each a mean, where both have steps. windows: x -> the width of the mean before it."""
    found = []
    for x, window in windows.items():
        a, b = mean_before(base, x, window).value, mean_before(other, x, window).value
        if a is not None and b is not None:
            found.append((x, b - a))
    rows = np.array(found).reshape(-1, 2)
    return Curve(rows[:, 0], rows[:, 1])
