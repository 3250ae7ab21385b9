"""The files of the numbers of a run, under RUN/metrics/: rows of fixed width, written by one process each.

    000003-epoch-000002-step-00000121/   a lineage: an attempt, or what follows a roll-back; the epoch of the run's
                                   lease, and the first step that it trains
        run/                       a table: the numbers of the whole run, written by rank 0
        layers/, sources/, checks/ the same, for numbers that few steps have
        rank-00007/                the numbers of one rank
            0-00000121.rows        a segment: level 0, and the step of its first row
            1-00000121.rows        level 1: a bucket for every 16 rows of level 0
            2-..., 3-...           buckets of 256 and of 4,096 rows

A segment is a line of JSON, then rows in little-endian order. A row of level 0: step int64, time float64 (Unix
seconds), and a float64 per name. A row of another level: first and last step int64, time float64 of the last step, and
for each name four float64: the number of its values, their mean, the least and the most. MISSING, a NaN that no
computation gives, stands for a value that was not measured; a bucket in which a value is NaN has a NaN as its mean.

Only the last row of a segment can be torn, and readers leave it out. Segments have equally many rows at all levels, so
that all buckets of a segment are complete before the next one begins: a segment that is not the last one of its level
can be removed without a loss at higher levels. The last ones of a closed lineage are completed first
(metric_thinning.py).

Two attempts can be alive at once, if a launcher lost the lease of its run and has not noticed. The epoch of the lease
keeps their folders apart. Folders without an epoch are older than all others.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

BUCKET = 16  # rows of a level in a bucket of the next one
LEVELS = 4
SEGMENT_ROWS = BUCKET ** (LEVELS - 1)
RUN_TABLE = "run"
EXTRA_TABLES = ("layers", "sources", "checks")  # of the run, too
_FORMAT = 1
_USUAL_HEADER_BYTES, MOST_HEADER_BYTES = 1 << 14, 1 << 20
_MOST_NAMES = 10_000
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[\w.-]+)+", re.ASCII)
_LINEAGE = re.compile(r"(\d{6,12})(?:-epoch-(\d{6,12}))?-step-(\d{8,12})", re.ASCII)
_RANK = re.compile(r"rank-(\d{5,9})", re.ASCII)
_SEGMENT = re.compile(r"(\d)-(\d{8,12})\.rows", re.ASCII)
_MISSING_BITS = 0x7FF8_0000_4E4F_4E45
MISSING = float(np.array(_MISSING_BITS, "<u8").view("<f8"))


def is_missing(values: np.ndarray) -> np.ndarray:
    """Return where `values`, float64, were not measured; a NaN that was computed is a value."""
    return np.ascontiguousarray(values, "<f8").view("<u8") == _MISSING_BITS


def row_type(level: int, names: int) -> np.dtype:
    """Return the type of a row: fields step, time and values [names]; above level 0 first, last, time and values
    [names, 4] (number, mean, least, most)."""
    if level == 0:
        return np.dtype([("step", "<i8"), ("time", "<f8"), ("values", "<f8", (names,))])
    return np.dtype([("first", "<i8"), ("last", "<i8"), ("time", "<f8"), ("values", "<f8", (names, 4))])


# -- folders --


@dataclass(frozen=True, order=True)
class Lineage:
    """A part of a run's history without a step back; a later one is larger. epoch: that of the lease with which it was
    written, 0 for folders without one. number: its number in the run. first_step: the first step that it trains; steps
    of earlier lineages from there on are void."""

    epoch: int
    number: int
    first_step: int
    folder: Path

    def table(self, rank: int | None) -> Path:
        """Return the folder of a rank's table; None: that of the run."""
        return self.folder / (RUN_TABLE if rank is None else rank_table(rank))

    def ranks(self) -> list[int]:
        """Return the ranks that have a table."""
        return sorted(int(found[1]) for name in _names(self.folder) if (found := _RANK.fullmatch(name)))


def rank_table(rank: int) -> str:
    """Return the name of the table of a rank."""
    return f"rank-{rank:05}"


def lineage_folder(metrics: Path, number: int, first_step: int, epoch: int = 0) -> Path:
    """Return the folder of a lineage in the folder `metrics` of a run."""
    return metrics / f"{number:06}{f'-epoch-{epoch:06}' if epoch else ''}-step-{first_step:08}"


def read_lineages(metrics: Path) -> list[Lineage]:
    """Return the lineages in the folder `metrics`, oldest first; none without the folder. Lists one folder."""
    found = [(match, name) for name in _names(metrics) if (match := _LINEAGE.fullmatch(name))]
    return sorted(Lineage(int(match[2] or 0), int(match[1]), int(match[3]), metrics / name) for match, name in found)


@dataclass(frozen=True, order=True)
class Segment:
    """A file of a table."""

    level: int
    first_step: int
    path: Path


def read_segments(table: Path) -> list[list[Segment]]:
    """Return the segments of a table by level, each in the order of steps: LEVELS lists."""
    levels: list[list[Segment]] = [[] for _ in range(LEVELS)]
    for name in _names(table):
        match = _SEGMENT.fullmatch(name)
        if match and int(match[1]) < LEVELS:
            levels[int(match[1])].append(Segment(int(match[1]), int(match[2]), table / name))
    return [sorted(level) for level in levels]


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def thin(table: Path, newest_step: int, keep_steps: int) -> None:
    """Remove segments of `table`, which is being written, that are older than `keep_steps` steps at level 0, and BUCKET
    times as many at each further level. The last level stays, and so does the last segment of each. keep_steps: 0 keeps
    all."""
    if keep_steps:
        for level, segments in enumerate(read_segments(table)[:-1]):
            for segment, following in pairwise(segments):
                if following.first_step <= newest_step - keep_steps * BUCKET**level:
                    segment.path.unlink(missing_ok=True)


# -- reading --


@dataclass(frozen=True)
class OpenSegment:
    """An open segment. facts: all of its header. names: the names of its values, in order. rows: whole rows."""

    fd: int
    facts: Mapping[str, Any]
    names: tuple[str, ...]
    type: np.dtype
    header_bytes: int
    rows: int

    def read(self, first: int, last: int) -> np.ndarray:
        """Return the rows first..last-1 as a structured array; fewer if the file ends before."""
        first, last = max(first, 0), min(last, self.rows)
        size = self.type.itemsize
        data = os.pread(self.fd, max(last - first, 0) * size, self.header_bytes + first * size)
        return np.frombuffer(data[: len(data) // size * size], self.type)


@contextlib.contextmanager
def open_segment(segment: Segment) -> Iterator[OpenSegment | None]:
    """Yield the open segment; None if it was removed, is no regular file, or has no header of this format."""
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield _opened(fd, segment.level)
    finally:
        os.close(fd)


def _opened(fd: int, level: int) -> OpenSegment | None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        return None
    start = os.pread(fd, _USUAL_HEADER_BYTES, 0)
    if b"\n" not in start:
        start = os.pread(fd, MOST_HEADER_BYTES, 0)
    line, newline, _ = start.partition(b"\n")
    try:
        facts = json.loads(line) if newline else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT or facts.get("level") != level:
        return None
    names = facts.get("names")
    if not isinstance(names, list) or not 0 < len(names) <= _MOST_NAMES:
        return None
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names) or len({*names}) < len(names):
        return None
    kind = row_type(level, len(names))
    return OpenSegment(fd, facts, tuple(names), kind, len(line) + 1, (info.st_size - len(line) - 1) // kind.itemsize)


def newest_step(levels: Sequence[Sequence[Segment]]) -> int:
    """Return the newest step of a table, by the lowest of these levels that has rows; 0 without rows."""
    for level in levels:
        for segment in reversed(level):
            with open_segment(segment) as opened:
                if opened is not None and len(rows := whole_rows(opened, last=1)):
                    return int(ends_of(rows)[-1])
    return 0


def whole_rows(opened: OpenSegment, last: int = SEGMENT_ROWS) -> np.ndarray:
    """Return the last rows of a segment, without those that were not written: zeros, after a loss of power."""
    end = min(opened.rows, SEGMENT_ROWS)
    rows = opened.read(end - last, end)
    written = ends_of(rows) >= 1
    if written.all():
        return rows
    return rows[written] if last >= SEGMENT_ROWS else whole_rows(opened)[-last:]


def ends_of(rows: np.ndarray) -> np.ndarray:
    """Return the last step of each row, int64."""
    return rows["step"] if "step" in (rows.dtype.names or ()) else rows["last"]


# -- writing --


class TableWriter:
    """The writer of one table of one lineage. It has no thread; `add` only keeps a row, and `flush` writes.

    names: of the values, in the order of the columns. facts: added to the headers. keep_steps: as in `thin`.
    The folder of the lineage's folder must exist. Raises OSError if a row cannot be written, and when the files were
    removed; nothing may be added after that.

    last_step: of the newest row. segments: of level 0 that were begun.
    """

    def __init__(self, table: Path, names: Sequence[str], facts: Mapping[str, Any], keep_steps: int = 0):
        if wrong := [name for name in names if not _NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is not the name of a metric, like train/loss")
        self._table, self._names, self._keep = table, tuple(names), keep_steps
        self._columns = {name: index for index, name in enumerate(self._names)}
        self._facts = dict(facts) | {"format": _FORMAT, "names": list(self._names)}
        self._levels = [_LevelWriter(self, level) for level in range(LEVELS)]
        self.last_step = self.segments = self._thinned = 0

    def add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Keep a row until `flush`. values: by name; other names of the table are missing. Steps must increase."""
        if step <= self.last_step:
            raise ValueError(f"step {step} comes after step {self.last_step}: it needs a new lineage")
        row = np.zeros((), row_type(0, len(self._names)))
        row["step"], row["time"], row["values"] = step, time, MISSING
        for name, value in values.items():
            row["values"][self._columns[name]] = value
        self.last_step = step
        self._levels[0].add(row[None], step)

    def flush(self) -> None:
        """Write the rows that were added. A killed process loses those that were not flushed; a machine that loses its
        power, those that its kernel had not written."""
        for level in self._levels:
            level.flush()
        if self.segments != self._thinned:  # not before the buckets of a removed segment are written
            self._thinned = self.segments
            thin(self._table, self.last_step, self._keep)

    def close(self) -> None:
        """Write what is left, and close the files."""
        try:
            self.flush()
        finally:
            for level in self._levels:
                level.close()


class _LevelWriter:
    """One level of a table: the open segment, and the rows of the bucket that is not complete."""

    def __init__(self, writer: TableWriter, level: int):
        self._writer, self._level = writer, level
        self._fd, self._rows = -1, 0
        self._unwritten: list[bytes] = []
        self._bucket: list[np.ndarray] = []

    def add(self, row: np.ndarray, first_step: int) -> None:
        """Add a row, a structured array [1]; with the last one of a bucket, one to the next level, too."""
        writer = self._writer
        if self._rows % SEGMENT_ROWS == 0:
            self._begin(first_step)
        self._rows += 1
        self._unwritten.append(row.tobytes())
        if self._level + 1 < LEVELS:
            self._bucket.append(row)
            if len(self._bucket) == BUCKET:
                bucket = merged(np.concatenate(self._bucket), len(writer._names))
                self._bucket.clear()
                writer._levels[self._level + 1].add(bucket, int(bucket["first"][0]))

    def _begin(self, first_step: int) -> None:
        writer = self._writer
        self.close()
        if self._level == 0:
            writer.segments += 1
            if not self._rows:
                writer._table.parent.mkdir(exist_ok=True)
                writer._table.mkdir(exist_ok=True)
        path = writer._table / f"{self._level}-{first_step:08}.rows"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._unwritten.append(json.dumps(writer._facts | {"level": self._level}).encode() + b"\n")

    def flush(self) -> None:
        if self._unwritten:
            data = b"".join(self._unwritten)
            self._unwritten.clear()
            if not os.fstat(self._fd).st_nlink:
                raise FileNotFoundError(f"{self._writer._table}: the files were removed while they were written")
            if (written := os.write(self._fd, data)) < len(data):
                raise OSError(f"{self._writer._table}: only {written} of {len(data)} bytes could be written")

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1


def merged(rows: np.ndarray, names: int) -> np.ndarray:
    """Return one bucket, a structured array [1] of a level above 0, of `rows` of any level."""
    bucket = np.zeros(1, row_type(1, names))
    if "step" in (rows.dtype.names or ()):
        bucket["first"], bucket["last"] = rows["step"][0], rows["step"][-1]
        values = rows["values"]
        there = ~is_missing(values)
        number, mean, least, most = there.astype(float), values, values, values
    else:
        bucket["first"], bucket["last"] = rows["first"][0], rows["last"][-1]
        number, mean, least, most = np.moveaxis(rows["values"], -1, 0)
        there = number > 0
    bucket["time"] = rows["time"][-1]
    with np.errstate(invalid="ignore", over="ignore"):
        total = number.sum(0)
        found = np.stack(
            (
                total,
                np.where(there, mean * number, 0.0).sum(0) / np.maximum(total, 1),
                np.fmin.reduce(np.where(there, least, np.nan)),
                np.fmax.reduce(np.where(there, most, np.nan)),
            ),
            axis=-1,
        )
    bucket["values"][0] = np.where(total[:, None] > 0, found, (0.0, MISSING, MISSING, MISSING))
    return bucket
