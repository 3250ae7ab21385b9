"""What no limit of a quality rule may be."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any


def problems_of_limits(rules: Any) -> Iterator[tuple[str, str]]:
    """(field, message) for limits below 0, and for pairs of least and most that exclude everything."""
    for name, value in ((field.name, getattr(rules, field.name)) for field in fields(rules)):
        if isinstance(value, tuple):
            if not 0 <= value[0] <= value[1]:
                yield name, f"is {value[0]:g} to {value[1]:g}, must be at least 0 and not fall"
        elif isinstance(value, (int, float)) and not value >= 0:
            yield name, f"is {value:g}, must be at least 0"
