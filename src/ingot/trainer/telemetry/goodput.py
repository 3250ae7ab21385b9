"""The goodput of a run: the share of the time since its first start that went into steps which still count. No torch.

Starts, saves, evaluation, pauses and steps that a roll-back made void are the rest. Reports of large runs call the same
share the effective training time ratio (ETTR).
"""

from pathlib import Path

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.metrics import last_value, read_series
from ingot.theory.goodput import goodput_share

TRAINED = "run/trained_seconds"


class Goodput:
    """The goodput, counted on rank 0 at log lines.

    metrics, log: the folder of the numbers and the event log of the run, which have what earlier attempts did.
    first_step: the next step. now: Unix seconds.
    """

    def __init__(self, metrics: Path, log: Path, first_step: int, now: float):
        self._metrics = metrics
        first = next(read_events(log, events.RUN_STARTED), None)
        self._began = float(first["time"]) if first else now
        self._lines = [(first_step - 1, _trained_seconds(metrics, first_step - 1))]

    def add(self, step: int, seconds: float) -> None:
        """Count the steps of a log line, whose last one is `step`. seconds: of all of them."""
        self._lines.append((step, self._lines[-1][1] + seconds))

    def went_back(self, step: int) -> None:
        """Count what was trained after `step` no more. Within a log line, all of it is lost."""
        while self._lines and self._lines[-1][0] > step:
            self._lines.pop()
        if not self._lines:
            self._lines.append((step, _trained_seconds(self._metrics, step)))

    @property
    def trained_seconds(self) -> float:
        """The seconds of all steps so far that count."""
        return self._lines[-1][1]

    def share(self, now: float) -> float | None:
        """Return the goodput at the time `now`; None if the clock was set back to before the run."""
        return goodput_share(self.trained_seconds, now - self._began)


def _trained_seconds(metrics: Path, last_step: int) -> float:
    """Return the seconds of the valid steps up to `last_step`, on rank 0, as the last log line counted them; runs of an
    earlier version have no such number, and their steps are added up."""
    try:
        if last_step and (counted := last_value(metrics, None, TRAINED, last_step)) is not None:
            return counted
        found = read_series(metrics, 0, "perf/step_seconds", 1, last_step) if last_step else []
    except (OSError, ValueError):  # a disk that fails, or a file that is not ours: goodput is less, the run goes on
        return 0.0
    return sum(float(((one.last - one.first + 1) * one.mean).sum()) for one in found if one.valid)
