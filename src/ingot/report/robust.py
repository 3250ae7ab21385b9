"""The range of values that a small chart shows, without the few that would flatten all others."""

from collections.abc import Sequence

_FEWEST = 8  # values of which one can be far from the others
_SHARE = 0.05  # of the values may be beyond the range
_FLAT = 10.0  # the range of all by that of the others


def shown_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value to show. values: finite, at least one. A twentieth of them is beyond if
    the others would have less than a tenth of the height."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    count = max(int(len(ordered) * _SHARE), 1)
    if len(ordered) < _FEWEST:
        return low, high
    inner_high, inner_low = ordered[-1 - count], ordered[count]
    if high - low > _FLAT * (inner_high - low) > 0:
        return low, inner_high
    if high - low > _FLAT * (high - inner_low) > 0:
        return inner_low, high
    return low, high
