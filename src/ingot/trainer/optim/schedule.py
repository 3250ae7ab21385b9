"""The learning rate, a pure function of the step: a resumed run follows the same curve."""

from collections.abc import Callable

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
        return part.rate(step, steps, peak, schedule, options)

    return rate
