"""The types of charts over steps, as plain data for a page or a terminal."""

from dataclasses import dataclass
from typing import Literal

from ingot.report.incidents import Severity
from ingot.watch.series import Points

Question = Literal["learning", "fast", "healthy", "cost"]
QUESTIONS: dict[Question, str] = {
    "learning": "Is it learning?",
    "fast": "Is it fast?",
    "healthy": "Is it healthy?",
    "cost": "What did it cost?",
}


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
    so far that a logarithmic axis helps. first, last: the steps that it covers. total: the points before thinning.
    note: what is not drawn, and why; "": nothing."""

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
    note: str = ""
