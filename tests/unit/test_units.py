"""Quantities of computation are written."""

import pytest

from ingot.units import format_flops, format_seconds, format_usd


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


@pytest.mark.parametrize(
    ("dollars", "text"), [(47_678_751.05, "$47.7M"), (1234.5, "$1,234"), (12.5, "$12.50"), (0.004, "under $0.01")]
)
def test_usd(dollars, text):
    assert format_usd(dollars) == text


def test_centuries_are_years():
    assert format_seconds(88_688 * 86_400) == "243 years"
    assert format_seconds(400 * 86_400) == "400 d"
