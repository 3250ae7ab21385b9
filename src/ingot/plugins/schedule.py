"""Learning-rate schedules: the rate as a function of the step, so that a resumed run follows the same curve."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ingot.plugins.registry import Part, Registry
from ingot.schema.run import Schedule

Problems = Iterator[tuple[str, str]]


def _no_problems(schedule: Schedule, steps: int) -> Problems:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class SchedulePart(Part):
    """A learning-rate schedule, chosen by `schedule.kind`.

    rate(step, steps, peak, schedule, options): the rate of optimizer step 1..steps, a pure function. It is called for
      the steps after the linear warm-up, which is the same for every schedule. peak: optim.lr. schedule: the section
      of the run file. options: an instance of `settings`, None without settings.
    problems(schedule, steps): yields (field of [schedule], problem and fix) for values that do not fit together.
    """

    rate: Callable[[int, int, float, Schedule, Any], float]
    problems: Callable[[Schedule, int], Problems] = _no_problems


def cosine(step: int, steps: int, peak: float, schedule: Schedule, options: None = None) -> float:
    """Return half a cosine from the peak to peak * final_fraction (Loshchilov & Hutter 2017, eq. 5, one cycle)."""
    floor = peak * schedule.final_fraction
    done = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def wsd(step: int, steps: int, peak: float, schedule: Schedule, options: None = None) -> float:
    """Return the peak, then a line to peak * final_fraction over the last decay_steps (Hu et al. 2024, sec. 4)."""
    floor = peak * schedule.final_fraction
    left = min((steps - step) / schedule.decay_steps, 1.0)
    return floor + (peak - floor) * left


def _wsd_problems(schedule: Schedule, steps: int) -> Problems:
    if schedule.decay_steps < 1:
        yield "decay_steps", "WSD needs decay_steps of at least 1 (about 10-20% of the steps)"
    if schedule.warmup_steps <= steps < schedule.warmup_steps + schedule.decay_steps:
        yield "warmup_steps", f"warm-up and decay are longer than the {steps} steps of the run"


SCHEDULES = Registry(
    "learning-rate schedule",
    "schedule.kind",
    (
        SchedulePart(name="cosine", rate=cosine),
        SchedulePart(name="wsd", rate=wsd, problems=_wsd_problems),
    ),
)
