"""The state of a run as its events show it, as far as the rules of alerts need it."""

from collections.abc import Mapping
from typing import Any

from ingot.observe.alerts.incidents import Instant
from ingot.schema import events
from ingot.schema.alert_record import YEAR_5000_SECONDS
from ingot.schema.checkpoint import FULL
from ingot.schema.run import RunConfig
from ingot.theory.devices import priced_devices

_LARGEST = 1e18
_LONGEST_GAP_SECONDS = 30 * 86_400.0  # a clock that jumps by more was wrong before or is wrong now


def finite(value: Any) -> float | None:
    """Return a number of an event as a float; None for anything else, for NaN and for infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value)


def time_of(event: Any) -> float | None:
    """Return the Unix seconds of an event; None if it has none that can be."""
    time = finite(event.get("time")) if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
    return time if time is not None and 0 <= time < YEAR_5000_SECONDS else None


class RunState:
    """The run as the events so far show it.

    alive: an attempt started, and neither ended on request nor finished. step: the newest. lines: log lines of this
    attempt. settled: the newest line shows the usual speed, unlike the first one of an attempt, which compiles.
    step_seconds: of the newest line; 0: unknown. adapted: the job has another layout than its run file. saved_step,
    saved_time: of the newest full checkpoint, or of the start of the attempt. save_seconds: how long writing it took.
    saved_bytes: its size. saves: of this attempt. interval_seconds: between two saves, with "auto"; 0: unknown.
    last_time: Unix seconds of the newest event. last_kind: its kind.
    """

    def __init__(self, run: RunConfig):
        self._run = run
        self.alive = self.adapted = self.failed = False
        self.step = self.lines = self.saved_step = self.saves = 0
        self.step_seconds = self.save_seconds = self.interval_seconds = self.usd_per_hour = 0.0
        self.saved_bytes = 0.0
        self.last_time: float | None = None
        self.saved_time: float | None = None
        self.last_kind = ""
        self._elapsed = 0.0

    @property
    def settled(self) -> bool:
        return self.lines > 1

    @property
    def now(self) -> Instant:
        return Instant(self.last_time or 0.0, self._elapsed, self.step, self.usd_per_hour)

    def at(self, time: float) -> Instant:
        """Return the instant `time`, which may be after the newest event."""
        passed = max(time - (self.last_time or time), 0.0)
        return Instant(time, self._elapsed + passed, self.step, self.usd_per_hour)

    def pass_to(self, time: float, kind: str) -> None:
        """Let the time of the next event come."""
        if self.last_time is not None and 0 < time - self.last_time <= _LONGEST_GAP_SECONDS:
            self._elapsed += time - self.last_time
        self.last_time, self.last_kind = time, kind

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event whose time has come. Raises KeyError, TypeError, ValueError or OverflowError for events that
        lack what their kind has."""
        kind, time = event["kind"], event["time"]
        if kind == events.RUN_STARTED:
            self.alive, self.failed, self.lines, self.saves = True, False, 0, 0
            self.step = self.saved_step = int(event["from_step"])
            self.saved_time = time
            devices = priced_devices(int(event["world_size"]), self._run.launch.nodes, on_gpu=event["device"] != "cpu")
            self.usd_per_hour = self._run.cost.usd_per_hour * devices
        elif kind == events.PROGRESS:
            self.step, self.lines = int(event["step"]), self.lines + (event["step_seconds"] is not None)  # None: passed
            self.step_seconds = finite(event["step_seconds"]) or self.step_seconds
            self.alive, self.failed = True, False  # the log of its start may be lost
            self.saved_time = time if self.saved_time is None else self.saved_time
        elif kind == events.CHECKPOINT:
            self.saved_step, self.saved_time, self.saves = int(event["step"]), time, self.saves + 1
            self.save_seconds = finite(event.get("write_seconds")) or finite(event["stall_seconds"]) or 0.0
            self.saved_bytes = finite(event["bytes"]) or 0.0
        elif kind == events.CHECKPOINT_INTERVAL and event.get("what", FULL) == FULL:
            self.interval_seconds = finite(event["seconds"]) or 0.0
        elif kind == events.ROLLED_BACK:
            self.step = int(event["to_step"])
        elif kind == events.LAYOUT:
            self.adapted = bool(event["overrides"])
        elif events.ends_run(kind, event):
            self.alive = self.failed = False
        elif kind in (events.FAULT, events.RANK_STARTED, events.STOPPED):  # the next attempt starts
            self.failed = True
