"""Charts of runs over steps, thinned for the pixels on which a page or a terminal draws them.

Callers hold the locks of the runs while another thread refreshes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from ingot.report.evaluations import evaluated
from ingot.report.incidents import Severity
from ingot.watch.drawn import WatchBand, WatchChart, WatchLine, WatchMark
from ingot.watch.kinds import CHARTS, MEASURED, OWN, ChartKind, ChartRequest, kind_of, measured_lines
from ingot.watch.live import LiveRun
from ingot.watch.series import Points, thinned

_MARK_PIXELS = 6
_MARK_TEXTS = 6


def chart_keys(runs: Sequence[LiveRun]) -> list[str]:
    """Return the keys of the charts for which a run has numbers, in the order of CHARTS; then those of callbacks."""
    known = [key for key, kind in CHARTS.items() if any(_has(run, kind) for run in runs)]
    own = dict.fromkeys(name for run in runs for name in run.own)
    return known + [OWN + name for name in own]


def _has(run: LiveRun, kind: ChartKind) -> bool:
    if not kind.series:
        return bool(evaluated(run.data))
    if kind.series == MEASURED:
        return bool(measured_lines(run, kind.column))
    return getattr(run, kind.series).newest(kind.column) is not None


def chart(
    runs: Sequence[LiveRun], key: str, first: int = 1, last: int | None = None, pixels: int = 1000
) -> WatchChart | None:
    """Return a chart of the steps first..last, thinned for a width of `pixels`: at most about two points per pixel and
    line, with all extremes; every point where there are no more. last: None for the newest step. Return None for an
    unknown key."""
    kind = kind_of(key)
    if kind is None:
        return None
    asked = ChartRequest(first, last, len(runs))
    parts = [part for number, run in enumerate(runs) for part in kind.build(asked, run, number)]
    bands = tuple(part for part in parts if isinstance(part, WatchBand))
    lines = [part for part in parts if isinstance(part, WatchLine)]
    total = sum(len(line.points.steps) for line in lines)
    lines = _stacked(lines, pixels) if kind.stacked else [_thinned(line, pixels) for line in lines]
    lines = [line for line in lines if len(line.points.steps)]
    begin = min((int(line.points.steps[0]) for line in lines), default=first)
    end = max((int(line.points.steps[-1]) for line in lines), default=last or first)
    marks = tuple(m for n, run in enumerate(runs) for m in _marks(run, n, begin, end, pixels)) if kind.marked else ()
    return WatchChart(
        key=key, title=kind.title, unit=kind.unit, question=kind.question, lines=tuple(lines), bands=bands,
        marks=marks, stacked=kind.stacked, from_zero=kind.from_zero, log=kind.log, first=begin, last=end, total=total,
        note=_note(runs, kind),
    )  # fmt: skip


def _note(runs: Sequence[LiveRun], kind: ChartKind) -> str:
    """Return what is not drawn of the runs, and why; with the names of the runs that it is about, if not of all."""
    named: dict[str, list[str]] = {}
    for run in runs:
        named.setdefault(kind.note(run), []).append(run.name)
    named.pop("", None)
    return "; ".join(
        text if len(names) == len(runs) else f"{', '.join(names)}: {text}" for text, names in named.items()
    )


def _thinned(line: WatchLine, pixels: int) -> WatchLine:
    chosen = thinned(line.points, pixels // 2)
    return replace(line, points=Points(line.points.steps[chosen], line.points.values[chosen]))


def _stacked(lines: list[WatchLine], pixels: int) -> list[WatchLine]:
    """Thin lines whose values are added up, all at the same steps: those of each line."""
    steps = reduce(np.intersect1d, (line.points.steps for line in lines)) if lines else np.zeros(0, np.int64)
    columns = [line.points.values[np.searchsorted(line.points.steps, steps)] for line in lines]
    each = max(pixels // 2 // max(len(lines), 1), 1)
    chosen = [thinned(Points(steps, values), each) for values in columns]
    shown = np.unique(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
    return [
        replace(line, points=Points(steps[shown], values[shown])) for line, values in zip(lines, columns, strict=True)
    ]


_ORDER: tuple[Severity, ...] = ("info", "warn", "bad")


def _marks(run: LiveRun, number: int, first: int, last: int, pixels: int) -> Iterable[WatchMark]:
    """Yield the incidents of these steps; those within a few pixels are one mark."""
    width = max((last - first + 1) * _MARK_PIXELS / max(pixels, 1), 1.0)
    found: dict[int, list] = {}
    for incident in run.data.incidents:
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
