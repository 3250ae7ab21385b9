"""The time in which a run that trains has written no log line, if that is longer than usual: one rule for all."""

from collections.abc import Mapping
from typing import Any

from ingot.report.readable import is_finite, is_passed_line
from ingot.schema import events as kinds
from ingot.schema.run import RunConfig
from ingot.theory.late_lines import late_after_seconds

# The events from which on the next attempt is expected to write a log line.
_BEGINS = (kinds.RANK_STARTED, kinds.RUN_STARTED, kinds.FAULT, kinds.PLANNED_RESTART, kinds.STOPPED)


class LogSilence:
    """The time of the newest log line of an attempt, or of the start of one without a line, from the events of a run,
    which the caller passes in order to `see`."""

    def __init__(self) -> None:
        self._since: float | None = None  # Unix seconds; None: nothing is expected
        self._has_line = False
        self._step_seconds = 0.0  # of the newest line, also of an earlier attempt

    def see(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        kind = event.get("kind")
        if not is_finite(event.get("time")):
            return
        if kinds.ends_run(kind, event):
            self._since = None
        elif kind == kinds.PROGRESS:
            seconds = event.get("step_seconds")
            self._since, self._has_line = event["time"], True
            if not is_passed_line(event):
                self._step_seconds = seconds if is_finite(seconds) else 0.0
        elif kind in _BEGINS:
            self._since, self._has_line = event["time"], False

    def seconds(self, run: RunConfig, now: float) -> float | None:
        """Return the time since the newest log line, or since the start of an attempt that has none, if the next line
        is late; else None. A start may take as long as the watchdog permits. now: Unix seconds."""
        if self._since is None:
            return None
        limit = late_after_seconds(run.watch.log_every, self._step_seconds)
        if not (self._has_line and self._step_seconds):
            limit = max(limit, run.launch.watchdog_other_seconds)
        seconds = now - self._since
        return seconds if seconds > limit else None
