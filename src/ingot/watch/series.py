"""Numbers by step that grow while a run trains, and their thinning for a screen. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ingot.schema.metric_files import is_missing

MOST_ROWS = 1 << 22
_VOID_SHOWN = 8  # stretches of void steps, the newest ones


class Points(NamedTuple):
    """Values over steps, as arrays of equal length. steps: int64, increasing. values: float64, perhaps not finite."""

    steps: np.ndarray
    values: np.ndarray


class StepSeries:
    """Rows of numbers by step. A step back makes later rows void; a step that comes again makes its earlier row void.

    names: of the columns. most_rows: beyond so many, the older half is thinned to an eighth, with its extremes.
    skipped: how many rows were left out in that way.
    """

    def __init__(self, *names: str, most_rows: int = MOST_ROWS):
        self.names, self.skipped, self._most = names, 0, most_rows
        self._rows = np.zeros(64, np.dtype([("step", "<i8"), ("time", "<f8"), ("values", "<f8", (len(names),))]))
        self._valid = np.zeros(64, np.int64)  # the rows that are not void: their steps increase
        self._count = self._kept = 0

    def __len__(self) -> int:
        return self._count

    @property
    def last_step(self) -> int:
        """The newest step that is not void; 0 without one."""
        return int(self._rows["step"][self._valid[self._kept - 1]]) if self._kept else 0

    @property
    def first_step(self) -> int:
        """The first step that is not void; 0 without one."""
        return int(self._rows["step"][self._valid[0]]) if self._kept else 0

    def add(self, step: int, time: float, values: Sequence[float]) -> None:
        """Add a row. values: one per column; MISSING (schema/metric_files.py) where there is none. Raises OverflowError
        for a step beyond 64 bits."""
        row = np.zeros(1, self._rows.dtype)
        row["step"], row["time"], row["values"] = step, time, values
        self.extend(row)

    def extend(self, rows: np.ndarray) -> None:
        """Add rows, an array of the type of `new_rows`."""
        if len(rows) > 1 and not (np.all(np.diff(rows["step"]) > 0) and rows["step"][0] > self.last_step):
            for index in range(len(rows)):
                self.extend(rows[index : index + 1])
            return
        if not len(rows):
            return
        self._forget(int(rows["step"][0]) - 1)
        self._make_room(len(rows))
        self._rows[self._count : self._count + len(rows)] = rows
        self._valid[self._kept : self._kept + len(rows)] = np.arange(self._count, self._count + len(rows))
        self._count += len(rows)
        self._kept += len(rows)
        if self._count > self._most:
            self._thin_older_half()

    def new_rows(self, count: int) -> np.ndarray:
        """Return `count` empty rows for `extend`: fields step, time (Unix seconds) and values [names]."""
        return np.zeros(count, self._rows.dtype)

    def go_back(self, step: int) -> bool:
        """Make all rows after `step` void. Return whether there were any."""
        before = self._kept
        self._forget(step)
        return self._kept < before

    def points(self, name: str, first: int = 1, last: int | None = None) -> Points:
        """Return a column over the valid steps first..last, without rows where it is missing. last: None for the
        newest."""
        rows = self._rows[self._valid[: self._kept]]
        begin = int(np.searchsorted(rows["step"], first))
        end = len(rows) if last is None else int(np.searchsorted(rows["step"], last, side="right"))
        return self._column(rows[begin:end], name)

    def void_points(self, name: str, first: int = 1, last: int | None = None) -> list[Points]:
        """Return a column over void steps: one part for each stretch that was trained, the newest ones."""
        void = np.ones(self._count, bool)
        void[self._valid[: self._kept]] = False
        indices = np.flatnonzero(void)
        steps = self._rows["step"][indices]
        part = np.r_[0, np.cumsum((np.diff(steps) <= 0) | (np.diff(indices) > 1))][: len(indices)]
        within = steps >= first if last is None else (steps >= first) & (steps <= last)
        indices, part = indices[within], part[within]
        begins = np.flatnonzero(np.r_[True, np.diff(part) > 0][: len(part)])[-_VOID_SHOWN:]
        ends = np.r_[begins, len(part)][1:]
        return [self._column(self._rows[indices[a:b]], name) for a, b in zip(begins, ends, strict=True)]

    def newest(self, name: str) -> float | None:
        """Return the newest value of a column that was measured and is not void; None without one."""
        column = self.names.index(name)
        for index in range(self._kept - 1, max(self._kept - 1000, 0) - 1, -1):
            value = self._rows["values"][self._valid[index], column]
            if not is_missing(value):
                return float(value)
        return None

    def added(self, since: int) -> np.ndarray:
        """Return the valid rows that were added after the first `since` rows, as they are: fields as in `new_rows`."""
        valid = self._valid[: self._kept]
        return self._rows[valid[np.searchsorted(valid, since) :]]

    def time_of(self, step: int) -> float | None:
        """Return when the newest valid row at or before `step` was written, in Unix seconds; None without one."""
        steps = self._rows["step"][self._valid[: self._kept]]
        index = int(np.searchsorted(steps, step, side="right")) - 1
        return float(self._rows["time"][self._valid[index]]) if index >= 0 else None

    def _column(self, rows: np.ndarray, name: str) -> Points:
        values = rows["values"][:, self.names.index(name)]
        there = ~is_missing(values)
        return Points(rows["step"][there], values[there])

    def _forget(self, step: int) -> None:
        while self._kept and self._rows["step"][self._valid[self._kept - 1]] > step:
            self._kept -= 1

    def _make_room(self, count: int) -> None:
        while self._count + count > len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros_like(self._rows)))
        while self._kept + count > len(self._valid):
            self._valid = np.concatenate((self._valid, np.zeros_like(self._valid)))

    def _thin_older_half(self) -> None:
        """Keep an eighth of the older half of the valid rows, with the extremes of each column, and no void rows."""
        valid = self._valid[: self._kept]
        older, newer = valid[: self._kept // 2], valid[self._kept // 2 :]
        steps = self._rows["step"][older]
        kept = [
            thinned(Points(steps, self._rows["values"][older, column]), len(older) // (32 * len(self.names)))
            for column in range(len(self.names))
        ]
        rows = (
            self._rows[np.concatenate((older[np.unique(np.concatenate(kept))], newer))] if kept else self._rows[newer]
        )
        self.skipped += self._count - len(rows)
        self._count = self._kept = 0
        self._make_room(len(rows))
        self._rows[: len(rows)] = rows
        self._valid[: len(rows)] = np.arange(len(rows))
        self._count = self._kept = len(rows)


def thinned(points: Points, buckets: int) -> np.ndarray:
    """Return the indices of the points to draw, in order: of each of `buckets` equal ranges of steps the first, the
    least, the greatest, the last, and the first value that is not finite.

    A line through them covers the same pixels as a line through all points, if a bucket is a pixel wide (the M4
    aggregation, Jugel et al. 2014). All indices, if there are not more than four times `buckets`.
    """
    steps, values = points
    if len(steps) <= 4 * max(buckets, 1):
        return np.arange(len(steps))
    buckets = max(buckets, 1)
    span = int(steps[-1] - steps[0]) + 1
    bucket = np.minimum(((steps - steps[0]) * (buckets / span)).astype(np.int64), buckets - 1)
    starts = np.flatnonzero(np.r_[True, np.diff(bucket) > 0])
    sizes = np.diff(np.r_[starts, len(steps)])
    finite = np.isfinite(values)
    chosen = [starts, starts + sizes - 1]
    for fill, reduce in ((np.inf, np.minimum), (-np.inf, np.maximum)):
        shown = np.where(finite, values, fill)
        extreme = np.repeat(reduce.reduceat(shown, starts), sizes)
        chosen.append(_first_per_bucket(np.flatnonzero(finite & (shown == extreme)), bucket))
    chosen.append(_first_per_bucket(np.flatnonzero(~finite), bucket))
    return np.unique(np.concatenate(chosen))


def _first_per_bucket(indices: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    own = bucket[indices]
    return indices[np.r_[True, np.diff(own) > 0]] if len(indices) else indices
