"""When saves are due, as a run file says it: every so many steps, every so many minutes, or as failures demand."""

import re
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.units import format_seconds, parse_duration

AUTO = "auto"
NEVER = ("", "0 steps")  # the texts by which a kind of save that a run can do without is switched off
_STEPS = re.compile(r"([0-9]{1,10}) ?steps?")
_MOST_STEPS = 10**9
_MOST_SECONDS = 365 * 86_400


@dataclass(frozen=True)
class SaveInterval:
    """The interval between two saves: `steps` or `seconds`, the other one is 0. Both are 0 for "auto", with which the
    run decides (theory/failures.py)."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def is_auto(self) -> bool:
        return not self.steps and not self.seconds

    def falls_on_each_of(self, other: "SaveInterval") -> bool:
        """Return whether a save at this interval falls on each step of another one."""
        return self.steps > 0 and other.steps > 0 and other.steps % self.steps == 0

    def in_steps(self, step_seconds: float) -> int:
        """Return the interval in steps of `step_seconds`, at least 1; 0 for "auto"."""
        if self.is_auto:
            return 0
        return self.steps or max(round(self.seconds / step_seconds), 1)

    def in_seconds(self, step_seconds: float) -> float:
        """Return the interval in seconds; 0 for "auto"."""
        return self.seconds or self.steps * step_seconds

    def __str__(self) -> str:
        if self.is_auto:
            return AUTO
        return f"{self.steps:,} steps" if self.steps else format_seconds(self.seconds)


def parse_interval(text: str) -> SaveInterval:
    """Parse "500 steps", "60 min", "1 h", "30 s" or "auto". Raises ConfigError for anything else, and for intervals
    that are not from 1 step to 10^9 steps or from 1 s to 365 days."""
    rule = (
        'a save interval is a number with its unit, like "500 steps", "60 min", "1 h" or "30 s", or "auto"; "" is none'
    )
    clean = text.strip().lower()
    if clean == AUTO:
        return SaveInterval()
    if match := _STEPS.fullmatch(clean):
        steps = int(match[1])
        if 1 <= steps <= _MOST_STEPS:
            return SaveInterval(steps=steps)
        raise ConfigError("E-QUANTITY", f"{text!r} is not from 1 to {_MOST_STEPS:,} steps", rule=rule, value=text)
    try:
        seconds = parse_duration(clean)
    except ConfigError:
        raise ConfigError("E-QUANTITY", f"{text!r} is not a save interval", rule=rule, value=text) from None
    if not 1 <= seconds <= _MOST_SECONDS:
        raise ConfigError("E-QUANTITY", f"{text!r} is not from 1 s to 365 days", rule=rule, value=text)
    return SaveInterval(seconds=seconds)
