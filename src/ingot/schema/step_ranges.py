"""Ranges of steps in the run file and in records: "120" or "120-122", inclusive."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ingot.errors import ConfigError

RULE = 'steps are one number, like "120", or the first and the last, like "120-122", counted from 1'


@dataclass(frozen=True, order=True)
class StepSpan:
    """The steps first..last, inclusive."""

    first: int
    last: int

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def parse_step_range(text: str) -> StepSpan:
    """Return the range that `text` names. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError("E-STEPS", f"{text!r} is no range of steps", rule=RULE, fix='write "120-122"', steps=text)
    return StepSpan(first, last)


def number_of(ranges: Iterable[StepSpan], first: int, last: int) -> int:
    """Return how many of the steps first..last are in one of `ranges`."""
    number, begin = 0, first
    for one in sorted(ranges):
        begin = max(begin, one.first)
        end = min(one.last, last)
        if begin <= end:
            number, begin = number + end - begin + 1, end + 1
    return number


def merged(ranges: Iterable[StepSpan], after: int = 0) -> list[StepSpan]:
    """Return the steps of `ranges` after step `after` as ranges that do not touch, in order."""
    found: list[StepSpan] = []
    for one in sorted(ranges):
        first = max(one.first, after + 1)
        if found and first <= found[-1].last + 1:
            found[-1] = StepSpan(found[-1].first, max(found[-1].last, one.last))
        elif first <= one.last:
            found.append(StepSpan(first, one.last))
    return found


def among(step: int, ranges: Iterable[StepSpan]) -> bool:
    """Return whether `step` is in one of `ranges`."""
    return any(step in one for one in ranges)


def spans_of(steps: Iterable[int]) -> list[StepSpan]:
    """Return consecutive steps, in order, as ranges."""
    spans: list[StepSpan] = []
    for step in steps:
        if spans and step == spans[-1].last + 1:
            spans[-1] = StepSpan(spans[-1].first, step)
        else:
            spans.append(StepSpan(step, step))
    return spans


def steps_text(steps: Sequence[int]) -> str:
    """Return consecutive steps as ranges: "4, 7-9"."""
    return ", ".join(map(str, spans_of(steps)))
