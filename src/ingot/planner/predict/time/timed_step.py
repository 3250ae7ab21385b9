"""The result of a step-time prediction: its terms, its pipeline, and the bubble of 1F1B in closed form.

The literature uses the name "bubble" for two numbers: the share of a step in which ranks wait, (p-1)/(v m + p-1), and
the waiting time divided by the time of work, (p-1)/(v m). theory/schedule/build.py has the bubbles of the other
schedules. p: pipeline ranks, v: stages per rank, m: micro-batches.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ingot.schema.plan import Communication
from ingot.theory.memory import Term
from ingot.theory.schedule import PUBLISHED, pipeline_seconds


@dataclass(frozen=True)
class StepTime:
    """A predicted step time.

    terms: the parts of `seconds`, each with its formula: the work of the busiest pipeline rank and its waiting times.
    communication: communication by line of the mesh. bubble: share of a step in which pipeline ranks wait.
    """

    terms: dict[str, Term]
    communication: dict[str, Communication]
    bubble: float = 0.0
    pipeline: "TimedPipeline | None" = None

    @cached_property
    def seconds(self) -> float:
        return sum(term.value for term in self.terms.values())

    @cached_property
    def schedule_bubble(self) -> float:
        """The bubble if all stages took as long as the median stage, which is the number that papers on schedules
        report. The rest of `bubble` is due to uneven stages.
        """
        return self.pipeline.even_bubble if self.pipeline else 0.0


@dataclass(frozen=True)
class TimedPipeline:
    """A pipeline schedule with its times. times: seconds of F (forward), I (backward for inputs) and W (backward for
    weights), each a list over stages. send: seconds of a message between stages."""

    schedule: str
    ranks: int
    micro_batches: int
    stages_per_rank: int
    times: tuple[list[float], list[float], list[float]]
    send: float

    def seconds(self, times: tuple[list[float], list[float], list[float]]) -> float:
        return pipeline_seconds(self.schedule, self.ranks, self.micro_batches, self.stages_per_rank, times, self.send)

    @property
    def even_bubble(self) -> float:
        by_work = sorted(zip(*self.times, strict=True), key=sum)
        f, i, w = by_work[len(by_work) // 2]
        stages = len(by_work)
        work = self.micro_batches * (f + i + w) * stages / self.ranks
        return 1 - work / self.seconds(([f] * stages, [i] * stages, [w] * stages))


def bubble_overhead(ranks: int, micro_batches: float, stages_per_rank: int = 1) -> float:
    """Return the time of waiting / time of work, (p-1)/(v m), for 1F1B with stages of equal time."""
    stage = 1 / stages_per_rank
    return PUBLISHED["1f1b"].bubble(ranks, stage / 3, stage / 3, stage / 3, 2 * stage / 3) / micro_batches


def bubble_share(ranks: int, micro_batches: float, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which ranks wait, (p-1)/(v m + p-1), for 1F1B with stages of equal time."""
    overhead = bubble_overhead(ranks, micro_batches, stages_per_rank)
    return overhead / (1 + overhead)


def micro_batches_for(ranks: int, share: float, stages_per_rank: int = 1) -> int:
    """Return the smallest number of micro-batches with which ranks wait for at most `share` of a step."""
    exact = bubble_overhead(ranks, 1, stages_per_rank) * (1 - share) / share
    return max(math.ceil(exact - 1e-9), 1)
