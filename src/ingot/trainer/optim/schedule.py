"""The learning rate, a pure function of the step: a resumed run follows the same curve."""

import math
from collections.abc import Callable
from numbers import Real

from ingot.errors import RunFailed
from ingot.plugins.registry import options_of
from ingot.plugins.schedule import SCHEDULES
from ingot.schema.run import Schedule


def learning_rate(steps: int, peak: float, schedule: Schedule) -> Callable[[int], float]:
    """Return the function from optimizer step 1..steps to its learning rate: linear warm-up, then `schedule.kind`.

    The rate reaches `peak` at the end of warm-up; ingot's own schedules end at peak * final_fraction.
    """
    part = SCHEDULES[schedule.kind]
    options = options_of(part, schedule.options)

    def rate(step: int) -> float:
        if step <= schedule.warmup_steps:
            return peak * step / schedule.warmup_steps
        return _checked(part.rate(step, steps, peak, schedule, options), step, part.name)

    return rate


def _checked(rate: object, step: int, name: str) -> float:
    if isinstance(rate, Real) and 0 <= float(rate) < math.inf:
        return float(rate)
    raise RunFailed(
        "E-SCHEDULE-RATE",
        f"schedule {name!r} returned {rate!r} for step {step}",
        rule="a learning rate is a finite number of at least 0 (plugins/schedule.py)",
        fix="correct `rate` of the plug-in",
        schedule=name,
        step=step,
    )
