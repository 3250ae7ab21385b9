"""Planted errors: a function of the real code is replaced on every rank for one case."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from unittest.mock import patch

Patches = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Fault:
    """what: in words. plant: makes it, within the stack."""

    what: str
    where: str
    shows: frozenset[str]
    plant: Patches


FAULTS: dict[str, Fault] = {}


def fault(what: str, where: str, shows: str) -> Callable[[Patches], Patches]:
    def add(plant: Patches) -> Patches:
        FAULTS[plant.__name__] = Fault(what, where, frozenset(shows.split()), plant)
        return plant

    return add


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        FAULTS[name].plant(stack)
        yield


def replaced(stack: ExitStack, owner, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace owner.name by make(original function)."""
    original = getattr(owner, name)
    stack.enter_context(patch.object(owner, name, wraps(original)(make(original))))
