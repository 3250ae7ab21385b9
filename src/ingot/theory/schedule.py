"""Pipeline schedules as tables: for every rank, what it does in which order. The planner simulates a table, the trainer
plays the same one."""

from dataclasses import dataclass
from typing import Literal

# F forward; B backward, whole; I backward for the inputs only; W the weights' gradients that I left.
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Table:
    """rows[r]: the actions of pipeline rank r, in order. ranks_of_stage[s]: the rank that holds stage s."""

    name: str
    stages: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)
