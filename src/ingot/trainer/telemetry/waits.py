"""Where a rank's time goes between two log lines, from clocks that cost nothing: no device is asked, nothing is traced.

The kernel knows how long a thread computed and how long it was ready but had no core; what is left of the wall clock it
was blocked. Two of the reasons to block have clocks of their own: the loader's next batch, and the neighbour in the
pipeline. On a CPU the rest are collectives. On a GPU the host only starts work: it blocks where it reads results.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and ready without one (Linux)


@dataclass(frozen=True)
class ThreadTime:
    """Clocks of the calling thread, in seconds since some moment. queued: ready to run, but without a core."""

    wall: float
    computing: float
    queued: float

    @classmethod
    def now(cls) -> "ThreadTime":
        return cls(time.monotonic(), time.thread_time(), _queued_seconds())

    def since(self, before: "ThreadTime") -> "ThreadTime":
        return ThreadTime(self.wall - before.wall, self.computing - before.computing, self.queued - before.queued)


def _queued_seconds() -> float:
    """0 where the kernel does not count it."""
    try:
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Seconds of one rank in one interval, which add up to `wall`.

    data: for the loader. pipeline: for a neighbour's message (0 on GPUs, where the host does not wait for it). reading:
    for the results of the interval: on a GPU until the device has come this far. blocked: for anything else.
    """

    data: float
    pipeline: float
    reading: float
    computing: float
    queued: float
    blocked: float

    @classmethod
    def of(cls, passed: ThreadTime, *, data: float, pipeline: float, reading: float) -> "Waits":
        known = passed.computing + passed.queued + data + pipeline + reading
        return cls(
            data=data,
            pipeline=pipeline,
            reading=reading,
            computing=passed.computing,
            queued=passed.queued,
            blocked=max(passed.wall - known, 0.0),
        )

    def row(self) -> np.ndarray:
        return np.array([getattr(self, name) for name in KINDS])


KINDS = tuple(Waits.__dataclass_fields__)


def summary(rows: np.ndarray, steps: int) -> dict[str, dict[str, float]]:
    """Facts of a `waits` event: by kind, seconds per step. rows: [ranks, kinds], of one interval."""
    found = {}
    for kind, column in zip(KINDS, (rows / steps).T, strict=True):
        found[kind] = {"mean": _rounded(column.mean()), "least": _rounded(column.min()), "most": _rounded(column.max())}
        found[kind]["rank"] = int(column.argmax())
    return found


def _rounded(seconds: float) -> float:
    return round(float(seconds), 7)
