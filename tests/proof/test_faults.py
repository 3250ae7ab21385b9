"""A proof that cannot fail proves nothing: each planted error turns the checks red that it should, and no others."""

import pytest

from . import faults, faults_long  # noqa: F401  (they fill FAULTS)
from .cases import case_named, core_cases
from .compare import prove
from .planting import FAULTS

BY_RANKS = sorted(FAULTS, key=lambda name: case_named(FAULTS[name].where).ranks)
# Played by `make test`; the rest with the slow tests. What the faults break has tests of its own.
FEW = ("accumulated_twice", "copies_in_the_norm", "wrong_half", "received_in_the_wrong_order", "wrong_experts")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in BY_RANKS]
)
def test_is_seen(ranks, name: str):
    fault = FAULTS[name]
    case = case_named(fault.where)
    assert case in core_cases()
    outcome = prove(ranks, case, name, timeout=60)
    assert set(outcome.wrong) == fault.shows, outcome.wrong
