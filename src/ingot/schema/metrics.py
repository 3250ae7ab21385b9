"""The numbers of a run: their names, and the readers of their files (metric_files.py). No torch.

A metric of the run has one value per step; a metric of a rank has one per rank and step. A name in braces stands for
any word: `data/{source}/loss` is the name of `data/web/loss`. Values that are measured at log lines are missing in the
rows of other steps.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ingot.schema.metric_files import (
    BUCKET,
    EXTRA_TABLES,
    LEVELS,
    SEGMENT_ROWS,
    Lineage,
    Segment,
    is_missing,
    merged,
    newest_step,
    open_segment,
    read_lineages,
    read_segments,
    row_type,
)

Owner = Literal["run", "rank"]
ALL_RANKS = "world"
# Whose communication is counted apart: axes of the mesh, and exchanges of all ranks that belong to none of them.
TRAFFIC_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp", ALL_RANKS)


@dataclass(frozen=True)
class Metric:
    """A metric. unit: "" if it has none; "share": a part of 1. meaning: in words. owner: "run" or "rank". at: "step":
    in the row of every step; "line": in the row of the last step of a log line; "time": read every ten seconds, every
    step has the newest; "layers": in steps that metrics.layers_every or guard.precision_every chooses, or that somebody
    asks for; "check": where held-out text is scored before a save. table: one of EXTRA_TABLES; "": that of the
    owner."""

    name: str
    unit: str
    owner: Owner
    at: Literal["step", "line", "time", "layers", "check"]
    meaning: str
    table: str = ""


_FLIPS = "share of the experts of held-out tokens that are others than at the check before"
_NORM = "norm of the gradient of a layer, before clipping; {layer} is its number, or `other`"
_EXPOSED = "waiting per step for the exchanges of {axis}, and for ranks that come late to them; see below"
_HIDDEN = "time per step in which one is in flight while the rank works; not known on GPUs"
_SATURATED = "share of these states that is half of the largest number of fp16 or bf16, or more, or not finite"
_RMS = "root mean square of the hidden states that a layer returns"
METRICS = (
    Metric("train/loss", "nats per token", "run", "step", "mean loss of the step's tokens"),
    Metric("train/bpb", "bits per byte", "run", "step", "the same loss per byte of text"),
    Metric("train/grad_norm", "", "run", "step", "norm of the whole gradient, before clipping"),
    Metric("train/param_norm", "", "run", "line", "norm of all weights after the step"),
    Metric(
        "train/update_ratio", "", "run", "line", "norm of the step's update over that of the weights; see the manual"
    ),
    Metric("train/lr", "", "run", "step", "learning rate, with the factor of the guard"),
    Metric("train/tokens", "tokens", "run", "step", "tokens from the start of the run to this step"),
    Metric("train/skipped", "", "run", "step", "1 if the update was skipped, or the step's data were passed; else 0"),
    Metric("perf/tokens_per_second", "tokens/s", "run", "line", "of the whole run, mean since the last log line"),
    Metric(
        "perf/mfu", "share", "run", "line", "model FLOPs (forward, backward, causal attention) over the published peak"
    ),
    Metric("run/eta_seconds", "s", "run", "line", "time to the last step, at the speed of this log line"),
    Metric("run/trained_seconds", "s", "run", "line", "time of all steps so far that count, of all attempts"),
    Metric("run/goodput", "share", "run", "line", "of the time since the first start, in steps that count (ETTR)"),
    Metric("run/cost_usd", "USD", "run", "line", "cost so far, of all attempts"),
    Metric("run/cost_to_come_usd", "USD", "run", "line", "cost of the steps to come, at the speed of this log line"),
    Metric("experts/load_cv", "", "run", "line", "standard deviation of the load of experts (mean 1), all layers"),
    Metric("experts/max_load", "", "run", "line", "largest load of an expert in any layer"),
    Metric("experts/dropped", "share", "run", "line", "share of assignments beyond the capacity, which were dropped"),
    Metric(
        "experts/fallback", "share", "run", "line", "share of assignments beyond the capacity, to the fallback expert"
    ),
    Metric("experts/route_flips", "share", "run", "check", _FLIPS, "checks"),
    Metric("eval/sanity_loss", "nats per token", "run", "check", "loss of a fixed batch of held-out text", "checks"),
    Metric("layers/{layer}/grad_norm", "", "run", "layers", _NORM, "layers"),
    Metric("layers/{layer}/activation_rms", "", "run", "layers", _RMS, "layers"),
    Metric("layers/{layer}/activation_saturation", "share", "run", "layers", _SATURATED, "layers"),
    Metric("data/{source}/loss", "nats per token", "run", "line", "mean loss of the tokens of a source", "sources"),
    Metric("data/{source}/share", "share", "run", "line", "share of a source in the tokens of a log line", "sources"),
    Metric("perf/step_seconds", "s", "rank", "step", "time of the step, without saves and evaluation"),
    Metric("perf/wait_seconds", "s", "rank", "step", "of it, waiting for other ranks; 0 on GPUs, where no host waits"),
    Metric("perf/pipeline_wait_seconds", "s", "rank", "step", "of these, waiting for a pipeline neighbor"),
    Metric("data/wait_seconds", "s", "rank", "step", "of the step, waiting for the batch"),
    Metric(
        "perf/forward_seconds", "s", "rank", "line", "forward per step: on CPUs without waits, on GPUs by the device"
    ),
    Metric("perf/backward_seconds", "s", "rank", "line", "backward per step, with recomputation, in the same way"),
    Metric("perf/optimizer_seconds", "s", "rank", "line", "update of the weights per step, in the same way"),
    Metric("perf/{axis}/exposed_seconds", "s", "rank", "line", _EXPOSED),
    Metric("perf/{axis}/hidden_seconds", "s", "rank", "line", _HIDDEN),
    Metric("perf/computing_seconds", "s", "rank", "line", "CPU time of the training thread per step"),
    Metric("perf/queued_seconds", "s", "rank", "line", "time per step that the thread was ready without a core"),
    Metric("perf/reading_seconds", "s", "rank", "line", "time per step of waiting for results of the device"),
    Metric("perf/blocked_seconds", "s", "rank", "line", "time per step of other waits"),
    Metric("memory/peak_bytes", "bytes", "rank", "line", "peak memory: of the device, or of the process on a CPU"),
    Metric("checkpoint/stall_seconds", "s", "rank", "step", "time before this step that training waited for a save"),
    Metric(
        "device/utilization", "share", "rank", "time", "share of the time in which the GPU computed something (NVML)"
    ),
    Metric("device/memory_bytes", "bytes", "rank", "time", "memory of the GPU in use, by all processes"),
    Metric("device/power_watts", "W", "rank", "time", "power that the GPU draws"),
    Metric("device/power_limit_watts", "W", "rank", "time", "limit of its power"),
    Metric("device/sm_clock_mhz", "MHz", "rank", "time", "clock of its processors"),
    Metric("device/memory_clock_mhz", "MHz", "rank", "time", "clock of its memory"),
    Metric("device/temperature_celsius", "degrees Celsius", "rank", "time", "temperature of the GPU"),
    Metric("device/throttle_reasons", "", "rank", "time", "why its clocks are lower than they could be: bits of NVML"),
    Metric("device/ecc_corrected", "", "rank", "time", "memory errors since the driver was loaded that were corrected"),
    Metric("device/ecc_uncorrected", "", "rank", "time", "and those that were not"),
)
_LAST_SEGMENTS = 2  # of a level, in which the newest value of a metric is looked for
_BY_NAME = {metric.name: metric for metric in METRICS}
_PATTERNS = [
    (re.compile(re.sub(r"\\{\w+\\}", r"[\\w.-]+", re.escape(metric.name)), re.ASCII), metric)
    for metric in METRICS
    if "{" in metric.name
]


def metric_of(name: str) -> Metric | None:
    """Return the metric that has the name `name`; None for an unknown one."""
    found = _BY_NAME.get(name)
    return found or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


# -- series --


@dataclass(frozen=True)
class Series:
    """A metric over the steps of one lineage, all valid or all void, as arrays of equal length in the order of steps.

    lineage: its number. valid: no later lineage trained these steps again. first, last: int64, the steps of each point.
    time: float64, Unix seconds of its last step. mean, least, most: float64; all three equal the value where first
    equals last. A NaN among the values makes the mean NaN, and has no effect on least and most.
    """

    lineage: int
    valid: bool
    first: np.ndarray
    last: np.ndarray
    time: np.ndarray
    mean: np.ndarray
    least: np.ndarray
    most: np.ndarray


def read_series(
    metrics: Path,
    rank: int | None,
    name: str,
    first_step: int = 1,
    last_step: int | None = None,
    points: int = 1000,
) -> list[Series]:
    """Return the values of a metric in the steps first_step..last_step, by lineage, oldest first.

    metrics: the folder of the numbers. rank: None for metrics of the run. last_step: None for the newest. points: about
    the most that all series have together. If there are fewer rows, each has a point; otherwise a point is a bucket of
    rows, and so it is where rows were removed because of their age. A bucket counts even if only a part of it is within
    these steps.
    """
    lineages, extra = read_lineages(metrics), _extra_table(rank, name)
    parts: list[tuple[Lineage, bool, int, int]] = []
    border = math.inf  # the least first step of later lineages
    for lineage in reversed(lineages):
        newest = newest_step(read_segments(_table(lineage, rank, extra)))
        end = newest if last_step is None else min(newest, last_step)
        begin = max(first_step, lineage.first_step)
        if border <= end:
            parts.append((lineage, False, max(begin, int(border)), end))
            end = int(border) - 1
        parts.append((lineage, True, begin, end))
        border = min(border, lineage.first_step)
    parts = [part for part in reversed(parts) if part[2] <= part[3]]
    total = sum(end - begin + 1 for _, _, begin, end in parts)
    found = []
    for lineage, valid, begin, end in parts:
        share = max(points * (end - begin + 1) // total, 1)
        rows = thinned(_read_rows(_table(lineage, rank, extra), name, begin, end, share), share)
        if len(rows):
            columns = np.moveaxis(rows["values"][:, 0], -1, 0)
            found.append(Series(lineage.number, valid, rows["first"], rows["last"], rows["time"], *columns[1:]))
    return found


def last_value(metrics: Path, rank: int | None, name: str, last_step: int) -> float | None:
    """Return the newest value of a metric up to `last_step`, if it was measured in a step that is valid; None if not.

    Of a bucket it is the largest value. Looks at the newest lineages only, until one has a value.
    """
    extra = _extra_table(rank, name)
    for lineage in reversed(read_lineages(metrics)):
        if lineage.first_step > last_step:
            continue
        for level in read_segments(_table(lineage, rank, extra)):
            for segment in [one for one in level if one.first_step <= last_step][: -_LAST_SEGMENTS - 1 : -1]:
                rows = _column([segment], name, 1, last_step)
                rows = rows[(rows["values"][:, 0, 0] > 0) & (rows["last"] <= last_step)]
                if len(rows):
                    return float(rows["values"][-1, 0, 3])
        last_step = lineage.first_step - 1
    return None


def _extra_table(rank: int | None, name: str) -> str:
    metric = metric_of(name) if rank is None else None
    return metric.table if metric else ""


def _table(lineage: Lineage, rank: int | None, extra: str) -> Path:
    return lineage.folder / extra if extra else lineage.table(rank)


def _read_rows(table: Path, name: str, begin: int, end: int, points: int) -> np.ndarray:
    """Return the rows of a metric that overlap begin..end, as buckets of one name, from the level that has `points`
    rows or more; from others where this one has none."""
    segments = read_segments(table)
    level, every = 0, _steps_per_row(segments[0]) if table.name in EXTRA_TABLES else 1.0
    while level + 1 < LEVELS and (end - begin + 1) // (every * BUCKET ** (level + 1)) >= points:
        level += 1
    found = [_column(segments[level], name, begin, end)]
    for lower in reversed(range(level)):  # the newest steps, whose bucket is not complete
        after = int(found[-1]["last"][-1]) + 1 if len(found[-1]) else begin
        if len(newer := _column(segments[lower], name, after, end)):
            found.append(newer)
    for higher in range(level + 1, LEVELS):  # the oldest ones, whose rows were removed
        before = int(found[0]["first"][0]) - 1 if len(found[0]) else end
        if len(older := _column(segments[higher], name, begin, before)):
            found.insert(0, older)
    rows = np.concatenate(found)
    return rows[rows["values"][:, 0, 0] > 0]


def _steps_per_row(segments: Sequence[Segment]) -> float:
    """Return the mean distance of two rows of level 0 in steps, by the newest segment."""
    for segment in segments[-1:]:
        with open_segment(segment) as opened:
            if opened is not None and opened.rows > 1:
                first, last = (opened.read(at, at + 1)["step"] for at in (0, min(opened.rows, SEGMENT_ROWS) - 1))
                return max(float(last[0] - first[0]) / (min(opened.rows, SEGMENT_ROWS) - 1), 1.0)
    return 1.0


def _column(segments: Sequence[Segment], name: str, begin: int, end: int) -> np.ndarray:
    """Return the rows of these segments of one level that overlap begin..end, as buckets, if they have the name."""
    found = [np.zeros(0, row_type(1, 1))]
    for segment, following in zip_longest(segments, segments[1:]):
        if begin > end or segment.first_step > end or (following is not None and following.first_step <= begin):
            continue
        with open_segment(segment) as opened:
            if opened is None or name not in opened.names:
                continue
            rows = opened.read(0, min(opened.rows, SEGMENT_ROWS))
            column = opened.names.index(name)
        buckets = np.zeros(len(rows), row_type(1, 1))
        if segment.level == 0:
            value = rows["values"][:, column]
            buckets["first"] = buckets["last"] = rows["step"]
            buckets["values"][:, 0] = np.stack((~is_missing(value), value, value, value), axis=-1)
        else:
            buckets["first"], buckets["last"] = rows["first"], rows["last"]
            buckets["values"][:, 0] = rows["values"][:, column]
        buckets["time"] = rows["time"]
        found.append(buckets[(buckets["last"] >= max(begin, 1)) & (buckets["first"] <= end)])
    return np.concatenate(found)


def thinned(rows: np.ndarray, points: int) -> np.ndarray:
    """Return `rows`, buckets of one name, merged into at most `points` buckets of about equally many rows."""
    if len(rows) <= points:
        return rows
    borders = np.linspace(0, len(rows), points + 1).astype(int)
    return np.concatenate([merged(rows[a:b], 1) for a, b in pairwise(borders.tolist())])


# -- the newest rows --


class NewestRow(NamedTuple):
    """The newest row of a rank. time: Unix seconds. values: by name, each the newest that was measured."""

    step: int
    time: float
    values: dict[str, float]


def newest_rows(metrics: Path) -> dict[int, NewestRow]:
    """Return the newest row of every rank of the newest lineage that has rows, by rank.

    Metrics of the run are among the values of rank 0. Empty if nothing is recorded. Reads some kilobytes per rank.
    """
    for lineage in reversed(read_lineages(metrics)):
        found = {rank: row for rank in lineage.ranks() if (row := _newest(lineage.table(rank))) is not None}
        for table in (lineage.table(None), *(lineage.folder / name for name in EXTRA_TABLES)):
            if (run := _newest(table)) is not None:
                own = found.get(0, run)
                found[0] = NewestRow(own.step, own.time, {**run.values, **own.values})
        if found:
            return found
    return {}


def _newest(table: Path) -> NewestRow | None:
    newest: NewestRow | None = None
    for rows, names in _last_rows(table):
        if newest is None:
            newest = NewestRow(int(rows["step"][-1]), float(rows["time"][-1]), {})
        there = ~is_missing(rows["values"])
        last = len(rows) - 1 - np.argmax(there[::-1], axis=0)
        for column, name in enumerate(names):
            if there[:, column].any() and name not in newest.values:
                newest.values[name] = float(rows["values"][last[column], column])
    return newest


def _last_rows(table: Path) -> Iterator[tuple[np.ndarray, tuple[str, ...]]]:
    """Yield the last rows of a table and their names, newest segment first: as many as two log lines have."""
    read = 0
    for segment in reversed(read_segments(table)[0]):
        with open_segment(segment) as opened:
            if opened is None:
                continue
            line = opened.facts.get("line_steps")
            wanted = min(2 * line, SEGMENT_ROWS) if isinstance(line, int) and line > 0 else 1
            rows = opened.read(opened.rows - wanted + read, opened.rows)
            names = opened.names
        rows = rows[rows["step"] >= 1]
        read += len(rows)
        if len(rows):
            yield rows, names
        if read >= wanted:
            return
