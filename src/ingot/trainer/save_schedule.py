"""When a run saves: after so many steps, after so much time on the clock of rank 0, or by Daly's interval from the
measured stall of its saves."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from ingot.schema import events
from ingot.schema.checkpoint import FULL, WEIGHTS
from ingot.schema.run import RunConfig
from ingot.schema.save_interval import SaveInterval
from ingot.theory.failures import assumed_rate, job_mttf_seconds, save_interval
from ingot.trainer.mesh.start import RankInfo
from ingot.units import format_seconds

_BIT = {FULL: 1, WEIGHTS: 2}  # in the vote of rank 0
# The first save of an attempt, and the next one after a save that failed, come after at most this time: a run with an
# interval of an hour that fails every half hour would otherwise have no checkpoint and begin again for ever.
SOON_SECONDS = 600.0
_FIRST_SECONDS = 60.0  # the interval with "auto" until a save has been measured
_LEAST_SECONDS = 1.0  # with "auto"
_MEASURED = 5  # the stalls of this many saves count
_NOTABLE = 1.25  # another interval is announced if it is longer or shorter by this factor


class _Timer:
    """The interval of one kind of save, and when the next one is due.

    steps: the interval in steps; 0 if it is a time. seconds: the interval in seconds; 0 if it is counted in steps.
    next_seconds: the time from `began` to the next save.
    """

    def __init__(self, interval: SaveInterval, now: float):
        self.steps, self.is_auto = interval.steps, interval.is_auto
        self.seconds = _FIRST_SECONDS if interval.is_auto else interval.seconds
        self.stalls: deque[float] = deque(maxlen=_MEASURED)
        self.restart(now, SOON_SECONDS)

    def restart(self, now: float, most: float | None = None) -> None:
        """Begin another interval. most: its longest length, seconds; None for the whole interval."""
        self.began, self.next_seconds = now, self.seconds if most is None else min(self.seconds, most)

    def is_due(self, now: float) -> bool:
        return self.seconds > 0 and now - self.began >= self.next_seconds


class SaveSchedule:
    """The schedule of both kinds of saves, FULL and WEIGHTS. A full save counts as one of the weights, too.

    The clock of rank 0 decides alone; the ranks hear of it in the vote that they have anyway (resilience/stop_vote.py),
    and save after the next step. `take`, `begun` and `left_out` do the same on every rank.

    owes_full: a full save was due while the weights were written, and takes the place of the next save of the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        place: RankInfo,
        first_step: int,
        log: Callable[..., None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._decides, self._log, self._say, self._clock = place.is_first, log, say, clock
        self._timers = {FULL: _Timer(config.checkpoint.interval, clock())}
        if (interval := config.checkpoint.weights_interval) is not None:
            self._timers[WEIGHTS] = _Timer(interval, clock())
        self._nodes = max(place.world_size // place.local_world_size, 1)
        devices = place.local_world_size if place.device.type == "cuda" else 0
        self._rate = assumed_rate(devices, config.launch.failures_per_node_day or None)
        self._agreed = 0
        self._last_begun = FULL
        self.owes_full = False
        for kind, timer in self._timers.items():
            if timer.is_auto:
                self._announce(kind, first_step - 1, None, "no save has been measured yet")

    def vote(self, writing: bool) -> int:
        """Return what is due after a time, on rank 0; 0 on others. writing: a save of this rank is in flight."""
        if not self._decides:
            return 0
        now = self._clock()
        due = sum(_BIT[kind] for kind, timer in self._timers.items() if timer.is_due(now))
        if self.owes_full:
            due |= _BIT[FULL]
        if writing and self._last_begun == WEIGHTS:
            due &= ~_BIT[FULL]  # it begins when they are written
        return due

    def agree(self, due: int) -> None:
        """Take in the result of a vote: these saves are made after the next step."""
        self._agreed = due

    def take(self, step: int) -> str:
        """Return the kind of save that is due after `step`, "" if none is, and begin another interval."""
        due, self._agreed = self._agreed, 0
        for kind, timer in self._timers.items():
            if timer.steps and step % timer.steps == 0:
                due |= _BIT[kind]
        if not due:
            return ""
        kind = FULL if due & _BIT[FULL] or self.owes_full else WEIGHTS
        self.owes_full = False  # before the vote on the next step
        for restarted in (FULL, WEIGHTS) if kind == FULL else (WEIGHTS,):
            if restarted in self._timers:
                self._timers[restarted].restart(self._clock())
        return kind

    def begun(self, kind: str) -> None:
        """Take in that a save began."""
        self._last_begun = kind

    def left_out(self, kind: str) -> None:
        """Take in that a save was left out, because another one was being written."""
        if kind == FULL and self._last_begun == WEIGHTS:
            self.owes_full = True

    def failed(self, kind: str) -> None:
        """Take in that a save failed: another one is tried soon."""
        if timer := self._timers.get(kind):
            timer.restart(self._clock(), SOON_SECONDS)

    def measured(self, kind: str, step: int, stall: float, write: float) -> None:
        """Decide on the interval again, after the save of `step` stopped training for `stall` seconds and was written
        in `write` seconds while training went on."""
        timer = self._timers.get(kind)
        if timer is None or not timer.is_auto or not self._decides:
            return
        timer.stalls.append(stall)
        stall, mttf = median(timer.stalls), job_mttf_seconds(self._nodes, self._rate.value)
        least, why = max((write, "the write itself"), (_LEAST_SECONDS, "the least"))
        best = save_interval(mttf, stall, least, why)
        if len(timer.stalls) == 1 or not 1 / _NOTABLE <= best.value / timer.seconds <= _NOTABLE:
            timer.seconds = timer.next_seconds = best.value
            self._announce(kind, step, stall, best.formula)

    def _announce(self, kind: str, step: int, stall: float | None, formula: str) -> None:
        seconds = self._timers[kind].seconds
        rate = f"{self._nodes:,} nodes x {self._rate.value:.3%} failures a day ({self._rate.formula})"
        self._log(
            events.CHECKPOINT_INTERVAL,
            step=step,
            what=kind,
            seconds=seconds,
            stall_seconds=stall,
            nodes=self._nodes,
            failures_per_node_day=self._rate.value,
            formula=f"{formula}; {rate}",
        )
        what = "a checkpoint" if kind == FULL else "the weights"
        self._say(f"interval  {what} every {format_seconds(seconds)}: {formula}; {rate}")
