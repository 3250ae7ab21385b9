"""Slow ranks, found from the time that each rank spends on its own work. No torch.

In a step all ranks wait for the slowest one, so all have steps of the same length; the slow rank is the one whose own
time, a step without its waits for others, is longer than that of its peers. Peers are ranks with the same work: those
of the same pipeline rank and the same part of the sequence.

The excess of a rank is the logarithm of its own time, divided by the median of its peers. A cumulative sum (Page 1954,
the standard test for a change) decides: it adds how far the excess of each step is above the tolerated one, and never
falls below 0. Jitter cancels out in it, a lasting excess adds up, and one pause is worth at most STEP_WEIGHT.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

Phase = Literal["data", "compute"]
# A step adds at most this much, so the least sum takes four slow steps however slow they were.
STEP_WEIGHT = 0.8
LEAST_SUM = 3.0
# A factor is the median of at least this many steps: of eight with 20% of jitter it is within 15% in 8 of 10 cases, and
# they leave two of the ten steps within which a rank that is twice as slow is named.
LEAST_STEPS = 8
# One false alarm in this many steps of a rank, for jitter with normal tails: the sum that jitter alone reaches so
# rarely is log(steps x ranks) x variance / (2 x tolerated excess) (Siegmund 1985).
FALSE_ALARM_STEPS = 1e7
_LINES = 64  # kept, the newest ones
_CHANGED = 0.5  # a factor that differs by this share from the reported one is reported again


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank. factor: its own time, divided by the median of its peers. phase: the part that is longer. since: the
    first slow step. seconds: how much longer its own time of a step is. ended: it is slow no more. slowdown: the factor
    by which steps are longer because of it, once its machine may be drained for it (slow_machines.py); None before."""

    rank: int
    factor: float
    phase: Phase
    since: int
    seconds: float
    ended: bool = False
    slowdown: float | None = None


@dataclass
class Suspect:
    """The sum of a rank, and what was seen since it was last 0. lines: (last step, steps, own seconds, data seconds,
    the same two of its peers) of each log line. named: what was reported; then the newest lines alone decide."""

    total: float = 0.0
    lines: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_LINES))
    named: Straggler | None = None

    @property
    def steps(self) -> int:
        return int(sum(line[1] for line in self.lines))

    def keep(self, steps: int) -> None:
        """Forget the oldest lines that are not needed for as many steps."""
        while self.lines and self.steps - self.lines[0][1] >= steps:
            self.lines.popleft()

    def describe(self, rank: int) -> Straggler:
        """Return the rank as it was in these lines: by medians, of two middle values the lower one, so that no value is
        between those before and after a change."""
        last, steps, *seconds = np.array(self.lines).T
        own, data, typical, typical_data = (
            float(np.quantile(np.repeat(each, steps.astype(int)), 0.5, method="lower")) for each in seconds
        )
        in_data = data - typical_data > (own - data) - (typical - typical_data)
        return Straggler(
            rank=rank,
            factor=own / typical,
            phase="data" if in_data else "compute",
            since=int(last[0] - steps[0]) + 1,
            seconds=own - typical,
        )


class StragglerWatch:
    """Decides after each log line which ranks are slow.

    peers: the groups of ranks with the same work; a rank without peers is not judged. factor: the largest one that is
    tolerated, above 1.
    """

    def __init__(self, peers: Sequence[Sequence[int]], factor: float):
        self._groups = [np.array(group) for group in peers if len(group) > 1]
        self._judged = np.concatenate([*self._groups, np.zeros(0, int)])  # ranks, in the order of the groups
        self._tolerated = math.log(factor)
        self._lines = 0
        self._excesses: deque[tuple[int, np.ndarray]] = deque(maxlen=_LINES)
        self._newest = np.zeros((4, len(self._judged)))  # [own, data, the same two of the peers]
        self._suspects: dict[int, Suspect] = {}

    def take(self, step: int, steps: int, own_R: np.ndarray, data_R: np.ndarray) -> list[Straggler]:
        """Take in a log line, and return what is new: ranks that are slow, slow in another way, or slow no more.

        step: its last step; steps: their number. own_R, data_R: the median seconds of a step of each rank that are not
        spent waiting for others, and those of them that it waits for its data; float64 [ranks]. The first line of an
        attempt does not count: its steps compile and connect.
        """
        self._lines += 1
        if self._lines == 1 or not len(self._judged):
            return []
        own, data = own_R[self._judged], data_R[self._judged]
        typical, typical_data = (
            np.concatenate([median_of_others(values[group]) for group in self._groups]) for values in (own_R, data_R)
        )
        self._newest = np.stack([own, data, typical, typical_data])
        measured = (own > 0) & (typical > 0)
        excess = np.log(np.where(measured, own, 1.0) / np.where(measured, typical, 1.0))
        self._excesses.append((steps, excess))
        threshold, found = self._threshold(), []
        above = steps * np.clip(excess - self._tolerated, -STEP_WEIGHT, STEP_WEIGHT)
        for place, rank in enumerate(self._judged.tolist()):
            if above[place] <= 0 and rank not in self._suspects:
                continue  # all but a few
            suspect = self._suspects.setdefault(rank, Suspect())
            suspect.lines.append((step, steps, own[place], data[place], typical[place], typical_data[place]))
            if suspect.named:
                news = self._named(rank, suspect)
            else:
                news = self._unnamed(rank, suspect, float(above[place]), threshold)
            found += [news] if news else []
        return found

    def _unnamed(self, rank: int, suspect: Suspect, above: float, threshold: float) -> Straggler | None:
        """Add the newest line to the sum of a rank. Returns the rank if it is slow."""
        suspect.total += above
        if suspect.total <= 0.0:
            del self._suspects[rank]
        elif suspect.total > threshold and suspect.steps >= LEAST_STEPS:
            suspect.named = suspect.describe(rank)
            return suspect.named
        return None

    def _named(self, rank: int, suspect: Suspect) -> Straggler | None:
        """Return what is new about a rank that was reported: another factor or phase, or its end."""
        suspect.keep(2 * LEAST_STEPS - 1)
        now, before = suspect.describe(rank), suspect.named
        assert before is not None
        excess = math.log(now.factor)
        if excess < self._tolerated / 2:
            del self._suspects[rank]
            return replace(before, ended=True)
        changed = before.phase != now.phase or abs(excess - math.log(before.factor)) > math.log(1 + _CHANGED)
        if changed and excess > self._tolerated:
            suspect.named = now
            return now
        return None

    def named(self) -> list[Straggler]:
        """Return each rank that was reported and has not recovered, as it is in the newest steps."""
        return [suspect.describe(rank) for rank, suspect in self._suspects.items() if suspect.named]

    def seconds_of(self, rank: int) -> list[float]:
        """Return of the newest line: own seconds and data seconds of a judged rank, and the same two of its peers."""
        return self._newest[:, self._judged == rank][:, 0].tolist()

    def _threshold(self) -> float:
        """Return the sum above which a rank is slow: LEAST_SUM, or more if times differ much from line to line.

        Jitter is measured between neighboring lines, so a rank that becomes slow does not add to it.
        """
        if len(self._excesses) < 2:
            return math.inf
        changes = np.diff([excesses for _, excesses in self._excesses], axis=0)
        jitter = 1.4826 * float(np.median(np.abs(changes))) / math.sqrt(2)  # the standard deviation of normal values
        variance = float(np.median([steps for steps, _ in self._excesses])) * jitter**2  # of one step
        rare = math.log(FALSE_ALARM_STEPS * len(self._judged))
        return max(LEAST_SUM, rare * variance / (2 * self._tolerated))


def median_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each of `values` [n], n > 1, the median of the others: float64 [n]."""
    ordered = np.sort(values)
    place = np.empty(len(values), int)
    place[np.argsort(values, kind="stable")] = np.arange(len(values))
    others = len(values) - 1
    low, high = (others - 1) // 2, others // 2  # the middle of the others, which are shifted after the left-out one
    return (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
