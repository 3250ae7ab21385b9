"""What a step's time is made of, and the pipeline in it."""

from dataclasses import dataclass
from functools import cached_property

from ingot.schema.plan import Communication
from ingot.theory.schedule import pipeline_seconds
from ingot.theory.term import Term


@dataclass(frozen=True)
class StepTime:
    """terms: parts that sum to `seconds`, each with its formula, of the busiest pipeline rank and the time it waits for
    others. communication: by line of the mesh. bubble: share of a step that pipeline ranks wait for each other."""

    terms: dict[str, Term]
    communication: dict[str, Communication]
    bubble: float = 0.0
    pipeline: "Pipeline | None" = None

    @cached_property
    def seconds(self) -> float:
        return sum(term.value for term in self.terms.values())

    @cached_property
    def schedule_bubble(self) -> float:
        """What `bubble` would be if all stages took as long as the median one: the figure that authors of schedules
        print. The rest is that stages are uneven."""
        return self.pipeline.even_bubble if self.pipeline else 0.0


@dataclass(frozen=True)
class Pipeline:
    """A schedule and what it is played with: seconds of F, I and W of every stage, and of a message."""

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
