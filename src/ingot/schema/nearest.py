"""The legal values next to one that was refused."""

from collections.abc import Iterable


def nearest(value: int, legal: Iterable[int]) -> str:
    """The legal values next to `value`: "2 or 4"."""
    numbers = set(legal)
    below = max((n for n in numbers if n < value), default=None)
    above = min((n for n in numbers if n > value), default=None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def multiples(value: int, of: int) -> str:
    """The multiples of `of` next to `value`: "8 or 12"."""
    low = max(value // of, 1) * of
    return f"{low} or {low + of}"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
