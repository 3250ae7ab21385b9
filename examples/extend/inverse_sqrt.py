"""The inverse square root schedule (Vaswani et al. 2017, section 5.3). Run file: schedule.kind = "inverse_sqrt"."""

from dataclasses import dataclass

from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.ranges import PositiveSteps


@dataclass(frozen=True, kw_only=True)
class Options:
    timescale: PositiveSteps = 1000  # steps after warm-up until the rate has fallen to 1/sqrt(2)


def rate(step, steps, peak, schedule, options):
    return peak * (1 + (step - schedule.warmup_steps) / options.timescale) ** -0.5


SCHEDULES.register(SchedulePart(name="inverse_sqrt", rate=rate, settings=Options))
