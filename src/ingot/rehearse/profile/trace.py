"""The spans of a trace in Chrome's JSON format, as torch.profiler exports it. No torch.

Times are microseconds on the clock of the trace. The ranges that a profile adds have names with a prefix (`RANGE`), so
that no range of torch, of a compiler or of a plug-in is taken for one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import DataError

RANGE = "ingot "
WINDOW, DATA, OPTIMIZING = f"{RANGE}profiled steps", f"{RANGE}data", f"{RANGE}optimizer"
WAIT, STEP, LAYER = f"{RANGE}wait ", f"{RANGE}step ", f"{RANGE}layer "
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
HOST_SPANS = ("cpu_op", "user_annotation", *RUNTIME)
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class TraceSpan:
    """An event of a trace with a duration. thread: the (process, thread) of the host, or the stream of the device."""

    name: str
    category: str
    thread: tuple[Any, Any]
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correlation(self) -> int | None:
        """The number that a launch and its kernel share."""
        return self.facts.get("correlation")


def read_spans(events: Iterable[Any]) -> list[TraceSpan]:
    """Return the spans of the categories that a profile uses, in the order of their begins, outer ones first."""
    found = [
        TraceSpan(
            str(event.get("name", "")),
            str(event["cat"]),
            (event.get("pid"), event.get("tid")),
            float(event["ts"]),
            float(event["ts"]) + float(event.get("dur", 0.0)),
            event.get("args") or {},
        )
        for event in events
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in (*HOST_SPANS, *DEVICE)
    ]
    return sorted(found, key=lambda span: (span.begin, -span.end))


def window_of(spans: Sequence[TraceSpan]) -> TraceSpan:
    """Return the range of the profiled steps: the last one, if the steps that warmed the profiler up are in the trace,
    too. Raises DataError if the trace has none."""
    found = next((span for span in reversed(spans) if span.category == "user_annotation" and span.name == WINDOW), None)
    if found is None or found.end <= found.begin:
        raise DataError(
            "E-PROFILE-TRACE",
            f"the trace has {len(spans):,} spans, but not the range of the profiled steps",
            rule="torch's profiler writes each range that began and ended while it ran",
            fix="run the command again; with a torch that is not 2.11 or 2.13, report its version",
            spans=len(spans),
        )
    return found


# -- sets of intervals --


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif end > begin:
            merged.append([begin, end])
    return [(begin, end) for begin, end in merged]


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions."""
    return list(_common(first, second))


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> Iterator[Interval]:
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > begin:
            yield begin, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
