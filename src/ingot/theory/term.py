"""A derived number and the formula it came from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """`formula` is the calculation with its values filled in, so that every printed number can be questioned."""

    value: float
    formula: str
