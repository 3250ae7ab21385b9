"""The legal values next to one that was refused."""

from collections.abc import Iterable


def nearest(value: int, legal: Iterable[int]) -> str:
    """Return the legal values next to `value`: "2 or 4"."""
    numbers = set(legal)
    below = max((n for n in numbers if n < value), default=None)
    above = min((n for n in numbers if n > value), default=None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def multiples(value: int, of: int) -> str:
    """Return the multiples of `of` next to `value`: "8 or 12"."""
    low = max(value // of, 1) * of
    return f"{low} or {low + of}"


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


# A batch that differs by at most this share from a batch that is known to work is as good.
_BATCH_MOVES = 0.05


def shareable_batch(batch: int, devices: int) -> int:
    """Return a batch near `batch` that many numbers of ranks divide: a multiple of the largest part of `devices` that
    changes the batch by at most 5%.

    Parts keep the odd factor of `devices`, which a batch would not have by chance.
    """
    odd = devices // (devices & -devices)
    parts = [odd * 2**n for n in range((devices & -devices).bit_length())]
    near = [max(round(batch / part), 1) * part for part in parts]
    return next((size for size in reversed(near) if abs(size - batch) <= _BATCH_MOVES * batch), near[0])
