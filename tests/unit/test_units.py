"""Quantities of computation are written."""

import pytest

from ingot.errors import ConfigError
from ingot.units import counted, format_flops, format_seconds, format_usd, parse_count, parse_seconds


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


def test_one_of_a_kind_has_no_plural():
    assert [counted(count, "step") for count in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]


def test_centuries_are_years():
    assert format_seconds(88_688 * 86_400) == "243 years"
    assert format_seconds(400 * 86_400) == "400 d"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740993", 2**53 + 1),  # no float
        ("9223372036854775807", 2**63 - 1),
        ("1.5T", 1_500_000_000_000),
        ("1.1k", 1100),
        ("1,234,567", 1_234_567),
        ("1_000k", 10**6),
        ("8Ki", 8192),
        ("2e3", 2000),
        (2.0, 2),
    ],
)
def test_counts_are_exact(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize(
    "text", ["1,5T", "600000.5", "1234567.4", "1e-9", "1.5", "1e9999", "9e307T", "1,00", "x", "", float("nan"), 1e400]
)
def test_what_is_no_whole_number_is_no_count(text):
    with pytest.raises(ConfigError):
        parse_count(text)


def test_durations_have_fractions():
    assert parse_seconds("1.5h") == 5400.0
