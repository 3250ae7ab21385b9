"""How quantities of computation are written."""

import pytest

from ingot.units import format_flops


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (989e12, "989 TFLOP"),
        (7_912e12, "7.91 PFLOP"),
        (45.0e9, "45 GFLOP"),
        (999.9e9, "1,000 GFLOP"),
        (3.1e25, "31,000,000 EFLOP"),
        (2.5e6, "2.5 MFLOP"),
        (0, "0 MFLOP"),
    ],
)
def test_flops(value, text):
    assert format_flops(value) == text
