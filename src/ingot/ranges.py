"""The ranges of numbers in files of settings. The dataclass of a section names the range of each of its fields:

    steps: Steps
    weights: dict[str, Weight]

`ingot.config` refuses a value outside the range, before any rule computes with it. The limits are far beyond every run
that exists; they stop mistakes (a wrong unit, a misplaced exponent) and numbers that would keep a command busy.
"""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {_shown(self.low)} to {_shown(self.high)}"


def _shown(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


_DAY = 86_400.0

# Any number
Seed = Annotated[int, Range(-(2**63), 2**63 - 1)]
Share = Annotated[float, Range(0.0, 1.0)]
Buckets = Annotated[int, Range(1, 2**31)]  # of a hash
Limit = Annotated[float, Range(0.0, 1e9)]  # of a rule: a share, a mean or a score
Count = Annotated[int, Range(0, 10**15)]
PositiveCount = Annotated[int, Range(1, 10**15)]
Weight = Annotated[float, Range(0.0, 1e12)]  # of a source, relative to those of the others
# Quantities with a unit
Bytes = Annotated[int, Range(0, 2**60)]
PositiveBytes = Annotated[int, Range(1, 2**60)]
Seconds = Annotated[float, Range(0.0, 365 * _DAY)]
Deadline = Annotated[float, Range(0.01, 30 * _DAY)]
Rate = Annotated[float, Range(0.0, 1e24)]  # bytes or operations per second
Usd = Annotated[float, Range(0.0, 1e6)]
Budget = Annotated[float, Range(0.0, 1e12)]  # US dollars of a whole run
Watts = Annotated[float, Range(0.0, 1e6)]
Port = Annotated[int, Range(1, 65_535)]  # of a server
# Training
Steps = Annotated[int, Range(0, 10**9)]
PositiveSteps = Annotated[int, Range(1, 10**9)]
Tokens = Annotated[int, Range(1, 10**9)]  # of a sequence, a sample or an evaluation
Sequences = Annotated[int, Range(1, 10**9)]  # of a batch
LearningRate = Annotated[float, Range(1e-12, 100.0)]
Factor = Annotated[float, Range(0.0, 1e6)]  # weights of losses, norms, decay
Positive = Annotated[float, Range(1e-30, 1e15)]
Queue = Annotated[int, Range(0, 10_000)]  # things kept or fetched ahead
PositiveQueue = Annotated[int, Range(1, 10_000)]
# The model
Width = Annotated[int, Range(0, 10**7)]
PositiveWidth = Annotated[int, Range(1, 10**7)]
Heads = Annotated[int, Range(1, 100_000)]
Layers = Annotated[int, Range(0, 10_000)]
PositiveLayers = Annotated[int, Range(1, 10_000)]
Vocabulary = Annotated[int, Range(1, 10**8)]
Experts = Annotated[int, Range(0, 100_000)]
PositiveExperts = Annotated[int, Range(1, 100_000)]
# The machines
Degree = Annotated[int, Range(0, 10**6)]
PositiveDegree = Annotated[int, Range(1, 10**6)]
