"""What a user should know of a whole run before it starts: storage that is too slow, checkpoints too far apart."""

from collections.abc import Iterator

from ingot.planner.run.outlook import Assumptions
from ingot.planner.run.reading import data_reading
from ingot.schema.plan import Outlook
from ingot.schema.run import RunConfig
from ingot.theory.failures import DAY_SECONDS, daly_interval, goodput
from ingot.units import format_seconds

# Of the clock's time: below it, how often a run saves is not worth a word.
_WORTH_A_WORD = 0.01


def outlook_warnings(
    run: RunConfig, step_seconds: float, found: Outlook, assumptions: Assumptions | None
) -> Iterator[str]:
    """step_seconds: predicted, without waiting for storage."""
    given = assumptions or Assumptions()
    reading = data_reading(run, step_seconds, given.storage_read_bytes_per_second)
    if reading.is_limit:
        yield f"the run takes {reading.share:,.1f} times as long as its steps: {reading.formula}"
    if given.checkpoint_every_steps and found.failures and not given.asynchronous:
        yield from _interval(step_seconds * max(reading.share, 1.0), run.train.steps, found)


def loses_time(found: Outlook, best: Outlook) -> bool:
    """Whether checkpoints as in `found`, instead of as in `best`, cost enough of the clock's time to be told."""
    return best.goodput - found.goodput > _WORTH_A_WORD


def _interval(step_seconds: float, most: int, found: Outlook) -> Iterator[str]:
    mttf = found.days * DAY_SECONDS / found.failures
    stall, every = found.checkpoint_stall_seconds, found.checkpoint_every_seconds
    steps = max(min(round(daly_interval(mttf, stall) / step_seconds), most), 1)
    best = goodput(mttf, stall, steps * step_seconds, found.restart_seconds).value
    if best - found.goodput > _WORTH_A_WORD:
        yield (
            f"with a failure every {format_seconds(mttf)}, a checkpoint every {format_seconds(every)} leaves a goodput"
            f" of {found.goodput:.1%}: checkpoint.every_steps = {steps} gives {best:.1%} (Daly 2006)"
        )
