"""Thinning of closed lineages: parts of a run's numbers that no process writes any more (metric_files.py). No torch.

A closed table may end in the middle of a bucket, at every level, and a killed process may have left a torn row there.
What is not in a bucket of the next level is added to it before the rows are removed. If that is interrupted, the rows
are still there, and the next call does it again. A file whose header was never written, because its process was
killed or the power failed, counts as absent.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path

import numpy as np

from ingot.schema.metric_files import (
    BUCKET,
    EXTRA_TABLES,
    LEVELS,
    MOST_HEADER_BYTES,
    RUN_TABLE,
    SEGMENT_ROWS,
    Lineage,
    ends_of,
    merged,
    newest_step,
    open_segment,
    rank_table,
    read_lineages,
    read_segments,
    whole_rows,
)
from ingot.storage import write_atomic


def thin_lineages(
    metrics: Path, current: tuple[int, int], trained: int, *, rank: int, ranks: int, keep_steps: int
) -> Iterator[None]:
    """Thin what a rank wrote in all lineages before its own, newest first: one lineage per step of the iterator.

    current: epoch and number of the lineage that this process writes. trained: the steps of it so far. rank, ranks:
    this one, and their number; rank 0 also thins the tables of the run, and those of ranks that the run has no more.
    keep_steps: as in `thin_closed`, counted over lineages; 0 removes nothing.
    """
    later = trained
    for lineage in reversed(read_lineages(metrics) if keep_steps else []):
        if (lineage.epoch, lineage.number) >= current:
            continue
        steps, tables = 0, []
        with contextlib.suppress(OSError):
            tables = _tables(lineage, rank, ranks)
        for table in tables:
            with contextlib.suppress(OSError, ValueError):  # a damaged file: the others are thinned
                steps = max(steps, thin_closed(lineage.folder / table, later, keep_steps) - lineage.first_step + 1)
        later += steps
        yield


def _tables(lineage: Lineage, rank: int, ranks: int) -> list[str]:
    if rank:
        return [rank_table(rank)]
    return [rank_table(0), RUN_TABLE, *EXTRA_TABLES, *(rank_table(one) for one in lineage.ranks() if one >= ranks)]


def thin_closed(table: Path, later_steps: int, keep_steps: int) -> int:
    """Remove old segments of a closed table, and return the step of its newest row; 0 without rows.

    later_steps: the steps that the run trained after this row, void ones too. Level n loses a segment `keep_steps` x
    BUCKET^n steps after its last row; the last level keeps all. Raises OSError, and removes nothing, if what the next
    level lacks cannot be written there.
    """
    newest = newest_step(read_segments(table))
    for level in range(LEVELS - 1):
        segments, limit = read_segments(table)[level], keep_steps * BUCKET**level
        first_kept = later_steps + newest + 1 - limit
        old = [segment for segment, following in pairwise(segments) if following.first_step <= first_kept]
        if later_steps >= limit:
            old = segments
        if old:
            _complete(table, level)
        for segment in old:
            segment.path.unlink(missing_ok=True)
    return newest


def _complete(table: Path, level: int) -> None:
    """Add what the next level lacks of this one to it."""
    levels = read_segments(table)
    above = newest_step([levels[level + 1]])
    for segment, following in zip_longest(levels[level], levels[level][1:]):
        if following is not None and following.first_step <= above + 1:
            continue
        with open_segment(segment) as opened:
            if opened is None and _has_no_header(segment.path):
                segment.path.unlink(missing_ok=True)
                continue
            if opened is None:
                raise OSError(f"{segment.path} cannot be read")
            rows, facts = whole_rows(opened), dict(opened.facts)
        rows = rows[ends_of(rows) > above]
        buckets = [merged(rows[at : at + BUCKET], len(facts["names"])) for at in range(0, len(rows), BUCKET)]
        if buckets:
            _append(table, level + 1, facts, np.concatenate(buckets))


def _has_no_header(path: Path) -> bool:
    """Return whether a segment is empty, ends in its header, or has zeros there. A header that is damaged, or of
    another version, is a header. Raises OSError if the file cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        start = os.pread(fd, 1, 0)
        return start in (b"", b"\0") or b"\n" not in os.pread(fd, MOST_HEADER_BYTES, 0)
    finally:
        os.close(fd)


def _append(table: Path, level: int, facts: dict, buckets: np.ndarray) -> None:
    """Add rows to the last segment of a level, or to a new one. A torn row at its end is cut off."""
    size = buckets.dtype.itemsize
    segments = read_segments(table)[level]
    while segments and _has_no_header(segments[-1].path):
        segments.pop().path.unlink()
    for segment in segments[-1:]:
        with open_segment(segment) as opened:
            fits = opened is not None and opened.type == buckets.dtype and opened.facts["names"] == facts["names"]
            if opened is None or not fits or (rows := len(whole_rows(opened))) >= SEGMENT_ROWS:
                continue
            end = opened.header_bytes + rows * size
        fd = os.open(segment.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, end)
            os.lseek(fd, end, os.SEEK_SET)
            data = buckets.tobytes()
            if (written := os.write(fd, data)) < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            os.fsync(fd)  # the rows that these buckets stand for are removed next
        finally:
            os.close(fd)
        return
    path = table / f"{level}-{int(buckets['first'][0]):08}.rows"
    if path.exists():
        raise FileExistsError(f"{path} has a damaged header, or another version wrote it")
    write_atomic(path, json.dumps(facts | {"level": level}).encode() + b"\n" + buckets.tobytes())
