"""The uncertainty of a ratio of medians, by the bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap,
chapter 13: percentile intervals)."""

import random
import statistics
from collections.abc import Sequence

_SAMPLES = 2_000


def ratio_in_percent(parts: Sequence[Sequence[float]], whole: Sequence[float]) -> dict[str, object]:
    """Return the sum of the medians of `parts` over the median of `whole`, in percent, and its 95% interval.

    Each of them is measured in the same rounds, and rounds are drawn together.
    """
    rounds, draw = range(len(whole)), random.Random(0)

    def ratio(chosen: Sequence[int]) -> float:
        total = sum(statistics.median(part[i] for i in chosen) for part in parts)
        return 100 * total / statistics.median(whole[i] for i in chosen)

    drawn = sorted(ratio(draw.choices(rounds, k=len(rounds))) for _ in range(_SAMPLES))
    low, high = drawn[_SAMPLES // 40], drawn[-(_SAMPLES // 40) - 1]
    return {"percent": round(ratio(rounds), 3), "95% interval": [round(low, 3), round(high, 3)], "rounds": len(rounds)}
