"""The range of values that a small chart shows, without the few that would flatten all others."""

from collections.abc import Sequence

_FEWEST = 8  # values of which one can be far from the others
_SHARE = 0.05  # of the values may be beyond the range, but always one
_FLAT = 10.0  # the range of all by that of the others


def shown_range(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """Return the lowest and the highest value to show. values: finite, at least one. from_zero: the range has 0 in it.

    Of 8 values or more, a twentieth, but at least one, is beyond if the others would have less than a tenth of the
    height."""
    ordered = sorted(values)
    count = max(int(len(ordered) * _SHARE), 1)
    inner = ordered[count:-count] if len(ordered) >= _FEWEST else ordered
    zero = (0.0,) if from_zero else ()
    low, high = min((ordered[0], *zero)), max((ordered[-1], *zero))
    inner_low, inner_high = min((inner[0], *zero)), max((inner[-1], *zero))
    if high - low > _FLAT * (inner_high - low) > 0:
        return low, inner_high
    if high - low > _FLAT * (high - inner_low) > 0:
        return inner_low, high
    return low, high
