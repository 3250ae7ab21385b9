"""Slow ranks whose machines may be drained: the evidence that this needs, beyond that of a report. No torch.

A report costs a line, a drain a restart and a machine. So the rank has to be slow in its computation, which its machine
causes, in every log line, until the others have waited as long for it as a drain takes; and the other machines have to
be as fast as each other, because a fleet that is slow together has another cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.trainer.telemetry.stragglers import Straggler

# The median of the newest 15 steps says in each log line that a rank is slow: four of them share no step.
LEAST_STEPS = 60


@dataclass
class _Count:
    """The costs of a slow rank, without a break. since: its first slow step. steps: their number; passed:
    their seconds; waited: those of them that others waited for it. settled: it was reported."""

    since: int
    steps: int = 0
    waited: float = 0.0
    passed: float = 0.0
    settled: bool = False

    @property
    def slowdown(self) -> float:
        return self.passed / max(self.passed - self.waited, self.passed / 100)


class SlowMachines:
    """Decides after each log line for which slow ranks the machine may be drained.

    seconds: how long others have to have waited for a rank. ranks: of each machine; machines: their number.
    """

    def __init__(self, seconds: float, ranks: int, machines: int):
        self._seconds, self._ranks, self._machines = seconds, ranks, machines
        self._counts: dict[int, _Count] = {}

    def take(
        self, steps: int, step_seconds: float, named: Sequence[Straggler], news: Sequence[Straggler]
    ) -> list[Straggler]:
        """Take in a log line. Returns `news` and the ranks whose machines may be drained from now on, each with its
        slowdown if its machine may be.

        steps, step_seconds: their number and the mean length of one. named: the ranks that are slow in the newest
        steps. news: what this line reports.
        """
        slow = {one.rank: one for one in named if one.phase == "compute"}
        machines = len({rank // self._ranks for rank in slow})
        if machines > 1 and 2 * machines >= self._machines:
            slow = {}
        self._counts = {rank: self._counts.get(rank) or _Count(one.since) for rank, one in slow.items()}
        settled = []
        for rank, count in self._counts.items():
            count.steps += steps
            count.waited += steps * slow[rank].seconds
            count.passed += steps * step_seconds
            if not count.settled and count.steps >= LEAST_STEPS and count.waited >= self._seconds:
                count.settled = True
                settled.append(replace(slow[rank], since=count.since))
        found = {one.rank: one for one in (*news, *settled)}
        return [replace(one, slowdown=self._slowdown(rank)) for rank, one in found.items()]

    def _slowdown(self, rank: int) -> float | None:
        count = self._counts.get(rank)
        return count.slowdown if count and count.settled else None
