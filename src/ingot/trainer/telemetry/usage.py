"""The resources that a rank uses: peak memory, US dollars, and the time between two log lines by what it was spent on.

The kernel counts how long a thread computed and how long it was ready but had no core; for the rest of the wall-clock
time the thread was blocked. Two kinds of blocking have clocks of their own: waiting for the loader's next batch, and
for other ranks. On a GPU the host only starts work, and blocks where it reads results.
"""

import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ingot.events import read_events
from ingot.schema import events

if TYPE_CHECKING:
    import torch

# -- memory and cost --


def peak_memory_bytes(device: "torch.device") -> int:
    """Return the peak memory: on a GPU as the planner counts it, on a CPU the peak resident size of this process."""
    if device.type == "cuda":
        import torch  # the rest of this module works without it, for readers of logs

        free, total = torch.cuda.mem_get_info(device)
        # Device context, libraries, NCCL buffers: memory that the caching allocator does not know of.
        outside = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(outside, 0)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak also counts what the parent held when it started this process.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class CostMeter:
    """The cost of a run: from now on, plus the cost of earlier attempts in its log (lost work was paid for, too)."""

    def __init__(self, usd_per_hour: float, devices: int, log: Path):
        """Start the clock. usd_per_hour: the price of one device, 0 if unknown. log: the run's event log."""
        self._usd_per_second = usd_per_hour * devices / 3600
        self._began = time.monotonic()
        earlier = [e["cost_usd"] for e in read_events(log, events.PROGRESS) if e.get("cost_usd") is not None]
        self._spent_usd = max(earlier, default=0.0)

    def usd(self) -> float | None:
        """Return the cost so far in US dollars; None if the price is unknown."""
        if not self._usd_per_second:
            return None
        return self._spent_usd + (time.monotonic() - self._began) * self._usd_per_second

    def usd_of(self, seconds: float) -> float | None:
        """Return the cost of `seconds` in US dollars; None if the price is unknown."""
        return seconds * self._usd_per_second if self._usd_per_second else None


# -- time --


_SCHEDULER = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and ready without one (Linux)


@dataclass(frozen=True)
class ThreadTime:
    """The clocks of the calling thread, seconds since an arbitrary origin. queued: ready to run, but without a core."""

    wall: float
    computing: float
    queued: float

    @classmethod
    def now(cls) -> "ThreadTime":
        """Read the clocks."""
        return cls(time.monotonic(), time.thread_time(), _queued_seconds())

    def since(self, before: "ThreadTime") -> "ThreadTime":
        """Return the time that passed since `before`."""
        return ThreadTime(self.wall - before.wall, self.computing - before.computing, self.queued - before.queued)


def _queued_seconds() -> float:
    """Return the seconds that this thread was ready without a core; 0 if the kernel does not count them."""
    try:
        return int(_SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The wall-clock seconds of one rank in one interval, divided by use.

    data: waiting for the loader. pipeline: waiting for a neighbor's message. collectives: waiting in collectives, and
    until messages are sent. On GPUs the host waits for neither. reading: waiting for the results of the interval, on a
    GPU until the device has computed them. computing: on a core. queued: ready, but without a core. blocked: waiting
    for anything else.
    """

    data: float
    pipeline: float
    collectives: float
    reading: float
    computing: float
    queued: float
    blocked: float

    @classmethod
    def of(cls, passed: ThreadTime, *, data: float, pipeline: float, collectives: float, reading: float) -> "Waits":
        """Divide the time `passed` by use; the remainder is `blocked`."""
        known = passed.computing + passed.queued + data + pipeline + collectives + reading
        return cls(
            data=data,
            pipeline=pipeline,
            collectives=collectives,
            reading=reading,
            computing=passed.computing,
            queued=passed.queued,
            blocked=max(passed.wall - known, 0.0),
        )

    def row(self) -> np.ndarray:
        """Return the seconds in the order of KINDS, float64 [kinds]."""
        return np.array([getattr(self, name) for name in KINDS])


KINDS = tuple(Waits.__dataclass_fields__)


def summary(rows: np.ndarray, kinds: Sequence[str], steps: int) -> dict[str, dict[str, float]]:
    """Return the fields of a `waits` event: seconds per step by kind, without those that are not known (NaN).

    rows: the seconds of `steps` steps of each rank, [ranks, kinds].
    """
    found = {}
    for kind, column in zip(kinds, (rows / steps).T, strict=True):
        if np.isnan(column).any():
            continue
        found[kind] = {"mean": _rounded(column.mean()), "least": _rounded(column.min()), "most": _rounded(column.max())}
        found[kind]["rank"] = int(column.argmax())
    return found


def summary_by_axis(rows: np.ndarray, axes: Sequence[str], steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return axis -> its communication, seconds per step (summary). rows: exposed and hidden seconds of each axis and
    rank, [ranks, 2 x axes]."""
    found = {}
    for number, axis in enumerate(axes):
        found[axis] = summary(rows[:, 2 * number : 2 * number + 2], ("exposed", "hidden"), steps)
    return found


def _rounded(seconds: float) -> float:
    return round(float(seconds), 7)
