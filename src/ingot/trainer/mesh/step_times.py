"""The time of a rank's steps by phase: forward, backward and update.

On a CPU the host computes, and its clock runs except while it waits for other ranks. On a GPU the host only starts
work, so events in the stream of the device mark the borders. They are read at log lines, and communication that no
computation hides is in the time of the phase that waits for it.
"""

import time
from collections import defaultdict
from typing import Literal, Protocol

import torch

StepPhase = Literal["forward", "backward", "optimizer"]


class WaitedSeconds(Protocol):
    """The total of a rank's waits for others (mesh/waiting.py)."""

    seconds: float


class StepTimes:
    """The seconds of each phase since the last `take`. Phases do not overlap."""

    def __init__(self, device: torch.device, waits: WaitedSeconds):
        self._on_gpu, self._waits = device.type == "cuda", waits
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[StepPhase, torch.cuda.Event, torch.cuda.Event]] = []

    def phase(self, phase: StepPhase) -> "_Timed":
        """Return the context in which time counts as `phase`. The host does not wait."""
        return _Timed(self, phase)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. On a GPU the host waits for the events."""
        for phase, began, ended in self._events:
            ended.synchronize()
            self._seconds[phase] += began.elapsed_time(ended) / 1000
        self._events.clear()
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    def now(self) -> float:
        """Return the time of this rank's host without its waits."""
        return time.monotonic() - self._waits.seconds


class _Timed:
    def __init__(self, times: StepTimes, phase: StepPhase):
        self._times = times
        self._phase: StepPhase = phase
        self._began: float | torch.cuda.Event = 0.0

    def __enter__(self) -> None:
        times = self._times
        self._began = marked() if times._on_gpu else times.now()

    def __exit__(self, *_) -> None:
        times, began = self._times, self._began
        if isinstance(began, torch.cuda.Event):
            times._events.append((self._phase, began, marked()))
        else:
            times._seconds[self._phase] += times.now() - began


def marked() -> torch.cuda.Event:
    """Return an event that was recorded now in the current stream of the GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
