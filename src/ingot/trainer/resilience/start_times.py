"""The time of a start or a restart by phase: from the fault to steps of the usual length. No torch.

Each phase is measured where it happens. The supervisor knows when a rank was lost and when its job was gone; the fork
server imports for all ranks; the rest happens in the ranks. The clock is the monotonic one, which is one for all
processes of a machine. What one process knows reaches the next as JSON in START_VARIABLE, and rank 0 writes all of it
as one event.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, replace

START_VARIABLE = "INGOT_START"
# Phases in their order: from the fault until it was seen, then until no rank was left, the back-off and the wait for
# machines, the check of machines, from the order to start until a rank's first instruction, imports, process groups,
# model and data, the loading of the state, and the extra time of the first steps.
PHASES = ("detect", "kill", "wait", "check", "schedule", "import", "groups", "build", "load", "warm_up")


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """The knowledge of a launcher about an attempt. Times are seconds of time.monotonic().

    detect, kill: the seconds of these phases; None at the first start, or if the moment of the fault is not known.
    gone_at: when the last attempt was gone; None at the first start. ordered_at: when this one was ordered. check: the
    seconds in which machines were checked (launch/checking.py); None if they were not.
    imported: the seconds in which the fork server imported for the ranks.
    """

    detect: float | None = None
    kill: float | None = None
    gone_at: float | None = None
    ordered_at: float | None = None
    check: float | None = None
    imported: float = 0.0

    def after_imports(self, seconds: float) -> "Ordered":
        return replace(self, imported=seconds)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "Ordered":
        return cls(**json.loads(text))


FIRST = Ordered()  # there was no attempt before


class StartClock:
    """The clock of one rank: `end` closes a phase, which may come in several pieces.

    ordered: what happened before the first instruction of this process.
    """

    def __init__(self, ordered: Ordered | None = None):
        given = ordered or FIRST
        self._last = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._first_line: tuple[float, int] | None = None
        self._is_reported = False
        if given.detect is not None:
            self._seconds["detect"] = given.detect
        if given.check is not None:
            self._seconds["check"] = given.check
        if given.kill is not None:
            self._seconds["kill"] = given.kill
        if given.ordered_at is not None:
            if given.gone_at is not None:
                self._seconds["wait"] = given.ordered_at - given.gone_at - (given.check or 0.0)
            self._seconds["schedule"] = self._last - given.ordered_at - given.imported
            self._seconds["import"] = given.imported

    def end(self, phase: str) -> None:
        """Count the time since the end of the last phase as one of `phase`."""
        now = time.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def line(self, seconds: float, steps: int) -> dict[str, float | None] | None:
        """Take in a log line: its steps and their seconds. Returns the phases once, at the second line of the attempt.

        The warm-up is what the steps of the first line took longer than as many of the second one.
        """
        if self._first_line is None:
            self._first_line = seconds, steps
            return None
        if self._is_reported:
            return None
        first, count = self._first_line
        self._seconds["warm_up"] = max(first - count * seconds / steps, 0.0)
        return self.report()

    def report(self) -> dict[str, float | None] | None:
        """Return the seconds by phase, None for a phase that was not measured. Returns None if they were returned."""
        if self._is_reported:
            return None
        self._is_reported = True
        return {name: None if (s := self._seconds.get(name)) is None else round(s, 4) for name in PHASES}


def open_start_clock() -> StartClock:
    """Return the clock of this process, a rank. Call it in the first instructions."""
    text = os.environ.get(START_VARIABLE)
    return StartClock(Ordered.of_text(text) if text else None)


def phases_text(seconds: dict[str, float | None]) -> str:
    """Return the phases that took time, for people: "detect 0.02 s, kill 0.11 s, ..."."""
    shown = [(name, s) for name in PHASES if (s := seconds.get(name)) is not None and s >= 0.005]
    return ", ".join(f"{name.replace('_', ' ')} {s:.2f} s" for name, s in shown)
