"""The time of GPUs by phase, from the record of a run.

Events in the stream of a device mark the borders (trainer/mesh/step_times.py).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.schema.metrics import read_series

_RANKS = 64  # are read, evenly spaced
_POINTS = 64  # of each
_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Spread:
    """Seconds per step over ranks: mean, minimum, maximum, and the rank with the maximum."""

    mean: float
    least: float
    most: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Seconds per step of each phase over `ranks` ranks. Communication that no computation hides is in its phase."""

    ranks: int
    forward: Spread
    backward: Spread
    optimizer: Spread

    def idle(self, step_seconds: float) -> float:
        """Return the mean seconds of a step in which a device is in no phase."""
        return max(step_seconds - self.forward.mean - self.backward.mean - self.optimizer.mean, 0.0)


def device_times(metrics: Path, ranks: int) -> DeviceTimes | None:
    """Return the times of the phases of the steps that count; None if the record has none. metrics: the folder of the
    numbers. ranks: of the run. Of each rank it is the median over log lines, so the first line has no weight."""
    chosen = sorted({round(one) for one in np.linspace(0, ranks - 1, min(ranks, _RANKS))})
    found: dict[str, dict[int, float]] = {}
    for phase in _PHASES:
        for rank in chosen:
            series = read_series(metrics, rank, f"perf/{phase}_seconds", points=_POINTS)
            means = [one.mean for one in series if one.valid]
            values = np.concatenate(means) if means else np.empty(0)
            if np.isfinite(values).any():
                found.setdefault(phase, {})[rank] = float(np.nanmedian(values))
    if len(found) < len(_PHASES):
        return None
    spreads = {phase: _spread(by_rank) for phase, by_rank in found.items()}
    return DeviceTimes(ranks=len(found["forward"]), **spreads)


def _spread(by_rank: dict[int, float]) -> Spread:
    values = [*by_rank.values()]
    slowest = max(by_rank, key=by_rank.__getitem__)
    return Spread(sum(values) / len(values), min(values), max(values), slowest)
