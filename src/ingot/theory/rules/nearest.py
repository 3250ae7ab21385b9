"""The legal values that are nearest to a refused value."""

import math
from collections.abc import Iterable


def nearest(value: int, legal: Iterable[int]) -> str:
    """Return the nearest legal values below and above `value`, as text: "2 or 4"."""
    numbers = set(legal)
    below = max((n for n in numbers if n < value), default=None)
    above = min((n for n in numbers if n > value), default=None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def multiples(value: int, of: int) -> str:
    """Return two neighboring positive multiples of `of` as text, like "8 or 12": the largest that does not exceed
    `value`, and the next one; `of` and 2 * `of` if `value` is smaller than `of`."""
    low = max(value // of, 1) * of
    return f"{low} or {low + of}"


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


# A batch may differ by this share from a batch that is known to work well.
_BATCH_MOVES = 0.05


def shareable_batch(batch: int, devices: int) -> int:
    """Return a batch near `batch` that many numbers of ranks divide evenly.

    The result is a multiple of the odd factor of `devices`, times the largest power of two that divides `devices` and
    lets the batch change by at most 5%. If there is no such power, the batch may change by more, and the power is 1.
    """
    odd = devices // (devices & -devices)
    parts = [odd * 2**n for n in range((devices & -devices).bit_length())]
    near = [max(round(batch / part), 1) * part for part in parts]
    return next((size for size in reversed(near) if abs(size - batch) <= _BATCH_MOVES * batch), near[0])
