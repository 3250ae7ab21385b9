"""The bubble of 1F1B and its interleaved form in closed form, where all stages take the same time.

Texts print two different numbers under one name: the share of a step in which ranks wait, (p-1)/(v m + p-1), and the
time that waiting adds to the ideal step, (p-1)/(v m). theory/schedule/published.py has those of the other schedules.
"""

import math

from ingot.theory.schedule import PUBLISHED


def bubble_overhead(ranks: int, micro_batches: float, stages_per_rank: int = 1) -> float:
    """Time of waiting over time of work, (p-1)/(v m)."""
    stage = 1 / stages_per_rank
    return PUBLISHED["1f1b"].bubble(ranks, stage / 3, stage / 3, stage / 3, 2 * stage / 3) / micro_batches


def bubble_share(ranks: int, micro_batches: float, stages_per_rank: int = 1) -> float:
    """Share of a step's time, (p-1)/(v m + p-1)."""
    overhead = bubble_overhead(ranks, micro_batches, stages_per_rank)
    return overhead / (1 + overhead)


def micro_batches_for(ranks: int, share: float, stages_per_rank: int = 1) -> int:
    """The fewest with which ranks wait at most `share` of a step."""
    exact = bubble_overhead(ranks, 1, stages_per_rank) * (1 - share) / share
    return max(math.ceil(exact - 1e-9), 1)
