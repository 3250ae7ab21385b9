"""The learning rate, a pure function of the step: a resumed run follows the same curve."""

import math

from ingot.schema.run import Schedule


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the learning rate of optimizer step 1..steps.

    The rate reaches `peak` at the end of warm-up and peak * final_fraction at the last step.

    cosine: half a cosine after warm-up (Loshchilov & Hutter 2017, eq. 5, one cycle).
    wsd: constant after warm-up, then linear over the last `decay_steps` (Hu et al. 2024, MiniCPM, section 4).
    """
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = peak * schedule.final_fraction
    if schedule.kind == "wsd":
        left = min((steps - step) / schedule.decay_steps, 1.0)
        return floor + (peak - floor) * left
    done = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
