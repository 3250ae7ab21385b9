"""The goodput of a run: the share of its time in which steps were trained that count, from its events.

Two meters use `goodput_share`: that of alerts and comparisons is here, where the first start of a run and the time
between a stop on request and the next start count for nothing. That of metrics (trainer/telemetry/goodput.py) counts
all time since the first start, so it is the effective training time ratio (ETTR).

Lost are the time of restarts, of steps that are trained again, of saves that training waits for, and of evaluations.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from ingot.schema import events

_SAMPLES = 64  # of a window
_LONGEST_GAP_SECONDS = 30 * 86_400.0  # a clock that jumps by more was wrong before or is wrong now


def goodput_share(productive_seconds: float, seconds: float) -> float | None:
    """Return the goodput, from 0 to 1: the share of `seconds` in which steps were trained that count; None if no time
    has passed. Clocks that disagree make it no more than 1."""
    return min(productive_seconds / seconds, 1.0) if seconds > 0 else None


class GoodputMeter:
    """The goodput over the last `window_seconds`. Its memory is bounded; clocks that jump back count as standing.

    elapsed: seconds of the run so far. productive: those of steps that were trained for the first time.
    """

    def __init__(self, window_seconds: float):
        self._window = window_seconds
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES + 1)  # elapsed, productive
        self._last: float | None = None  # Unix seconds of the newest event; None: the run does not run, or not yet
        self._newest_step = 0
        self.elapsed = self.productive = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in the next event of the log."""
        kind, time = event["kind"], float(event["time"])
        if events.ends_run(kind, event):
            self._pass(time)
            self._last = None
        elif kind == events.RUN_STARTED and (self._last is not None or self.elapsed):
            self._pass(time)
        elif kind == events.PROGRESS:
            step, passed = int(event["step"]), int(event.get("passed") or 0)
            seconds = math.nan if event["step_seconds"] is None else float(event["step_seconds"])
            if not (math.isfinite(seconds) and seconds > 0):
                self._newest_step = max(step, self._newest_step) if passed else self._newest_step
                return
            if self._last is None and not self.elapsed:  # what came before is the start of the run
                self._last, self._newest_step = time, step
                return
            before = self.elapsed
            self._pass(time)
            new = max(step - self._newest_step - passed, 0) * seconds
            since = self.elapsed - before
            self.productive += min(new, since) if since else new
            self.elapsed += 0.0 if since else new  # the clock was set back
            self._newest_step = max(step, self._newest_step)
            self._sample()

    def share(self, after_seconds: float) -> float | None:
        """Return the goodput of the window, from 0 to 1; None before `after_seconds` of the run have passed."""
        if self.elapsed < after_seconds:
            return None
        begin = (0.0, 0.0)
        for sample in self._samples:
            if sample[0] > self.elapsed - self._window:
                break
            begin = sample
        return goodput_share(self.productive - begin[1], self.elapsed - begin[0])

    def _pass(self, time: float) -> None:
        if self._last is not None and 0 < time - self._last <= _LONGEST_GAP_SECONDS:
            self.elapsed += time - self._last
        self._last = time

    def _sample(self) -> None:
        if not self._samples or self.elapsed - self._samples[-1][0] >= self._window / _SAMPLES:
            self._samples.append((self.elapsed, self.productive))
