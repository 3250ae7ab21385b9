"""Slow ranks whose machines may be drained: the evidence that this needs, beyond that of a report. No torch.

A report costs a line, a drain a restart and a machine. So the rank has to be slow in its computation, which its machine
causes, without a break, until the others have waited as long for it as a drain takes; and the other machines have to be
as fast as each other, because a fleet that is slow together has another cause.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ingot.trainer.telemetry.stragglers import LEAST_STEPS, Straggler, StragglerWatch, Suspect

# A break shows in the median of the newest steps, so many: with 20% of jitter, a rank that is 1.3 times as slow looks
# recovered in one of a hundred medians of 15 steps, by which reports end, but in none of 60.
LONG_STEPS = 60


@dataclass
class _Count:
    """The costs of a slow rank, without a break. since: its first slow step. newest: its lines, as of a suspect. steps:
    their number; passed: their seconds; waited: those of them that others waited for it. settled: it was reported."""

    since: int
    newest: Suspect = field(default_factory=Suspect)
    steps: int = 0
    waited: float = 0.0
    passed: float = 0.0
    settled: bool = False

    def add(self, step: int, steps: int, step_seconds: float, line: Sequence[float], rank: int) -> Straggler:
        """Take in a line. Returns the rank as it was in the newest steps."""
        self.newest.lines.append((step, steps, *line))
        self.newest.keep(LONG_STEPS)
        own, _, typical, _ = line
        self.steps += steps
        self.waited += steps * (own - typical)
        self.passed += steps * step_seconds
        return self.newest.describe(rank)

    @property
    def slowdown(self) -> float:
        return self.passed / max(self.passed - self.waited, self.passed / 100)


class SlowMachines:
    """Decides after each log line for which slow ranks the machine may be drained.

    seconds: how long others have to have waited for a rank. factor: as of StragglerWatch. ranks: of each machine;
    machines: their number.
    """

    def __init__(self, seconds: float, factor: float, ranks: int, machines: int):
        self._seconds, self._factor, self._ranks, self._machines = seconds, factor, ranks, machines
        self._counts: dict[int, _Count] = {}

    def take(
        self, step: int, steps: int, step_seconds: float, watch: StragglerWatch, news: Sequence[Straggler]
    ) -> list[Straggler]:
        """Take in a log line. Returns `news` and the ranks whose machines may be drained from now on, or no more; each
        with its slowdown if its machine may be.

        step, steps, step_seconds: its last step, their number, and the mean length of one. watch: has taken in the
        line; news: what it reported.
        """
        named = {one.rank: one for one in watch.named()}
        for rank, one in named.items():
            if one.factor > self._factor:
                self._counts.setdefault(rank, _Count(one.since))
        now = {
            rank: count.add(step, steps, step_seconds, watch.seconds_of(rank), rank)
            for rank, count in self._counts.items()
        }
        slow = [rank for rank, one in now.items() if one.phase == "compute" and self._lasts(rank, one)]
        machines = len({rank // self._ranks for rank in slow})
        if machines > 1 and 2 * machines >= self._machines:
            slow = []
        over = [
            replace(now[rank], ended=rank not in named)
            for rank, count in self._counts.items()
            if count.settled and rank not in slow
        ]
        self._counts = {rank: self._counts[rank] for rank in slow}
        settled = [self._settle(rank, now[rank]) for rank in slow if self._is_enough(rank, now[rank])]
        # Reports end by fewer steps. While the machine may be drained, none says that the rank is slow no more.
        news = [one for one in news if not (one.ended and self._slowdown(one.rank))]
        found = {one.rank: one for one in (*over, *news, *settled)}
        return [replace(one, slowdown=self._slowdown(rank)) for rank, one in found.items()]

    def _lasts(self, rank: int, now: Straggler) -> bool:
        """Check that a rank has not recovered, as reports define that, in so many steps that jitter does not matter."""
        return self._counts[rank].steps < 2 * LEAST_STEPS or now.factor >= math.sqrt(self._factor)

    def _is_enough(self, rank: int, now: Straggler) -> bool:
        count = self._counts[rank]
        long = count.steps >= LONG_STEPS and count.waited >= self._seconds
        return long and not count.settled and now.factor > self._factor

    def _settle(self, rank: int, now: Straggler) -> Straggler:
        count = self._counts[rank]
        count.settled = True
        return replace(now, since=count.since)

    def _slowdown(self, rank: int) -> float | None:
        count = self._counts.get(rank)
        return count.slowdown if count and count.settled else None
