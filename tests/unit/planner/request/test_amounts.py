"""Amounts as people write them: one spelling for one meaning, and the way out of every other."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import named, refused

from ingot.errors import ConfigError, IngotError
from ingot.planner.request.amounts import (
    Budget,
    parse_batch,
    parse_budget,
    parse_failures,
    parse_parameters,
    parse_price,
    parse_share,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("6e23flop", Budget(flops=6e23)),
        ("1.2 ZFLOPs", Budget(flops=1.2e21)),
        ("$2M", Budget(usd=2e6)),
        ("2_000_000 USD", Budget(usd=2e6)),
        ("2M$", Budget(usd=2e6)),
        ("$12.50", Budget(usd=12.5)),
        ("1.5 gpu-hours", Budget(device_hours=1.5)),
        ("24h", Budget(seconds=86400)),
        ("30 d", Budget(seconds=30 * 86400)),
        ("2 weeks", Budget(seconds=14 * 86400)),
        ("90min", Budget(seconds=5400)),
        ("1M gpu-hours", Budget(device_hours=1e6)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("2M", "2musd"),
        ("24", "24h"),
        ("M", "'$2M'"),  # what a shell leaves of $2M
        ("", "'$2M'"),
        ("-3h", ""),  # nothing is meant
        ("nan", "6e23flop"),
        ("infh", "6e23flop"),
        ("500 TFLOP/s", "500tflop"),
        ("3T tokens", "--tokens 3t"),
    ],
)
def test_a_budget_that_is_none_says_what_may_have_been_meant(text, way_out):
    with refused("E-BUDGET-FORMAT", budget=text) as caught:
        parse_budget(text)
    assert named([caught.value.fix], way_out)


@pytest.mark.parametrize("text", ["0h", "$0", "1e999flop"])
def test_a_budget_is_above_0_and_finite(text):
    with refused("E-OPTION-RANGE", option="--budget", value=text):
        parse_budget(text)


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_crash(text):
    parsers = [parse_budget, parse_tokens, parse_parameters, parse_price, lambda t: parse_share("--mfu", t)]
    for parse in (*parsers, lambda t: parse_batch(t, 2048)):
        with contextlib.suppress(IngotError):
            parse(text)


def test_tokens_and_parameters_are_no_bytes():
    assert parse_tokens("1.5T") == parse_tokens("1.5T tokens") == 1_500_000_000_000
    assert parse_parameters("70b") == parse_parameters("70B") == 70_000_000_000
    for text in ("1.5TB", "1.5 TiB", "3gb"):
        with refused("E-COUNT-BYTES", option="--tokens"):
            parse_tokens(text)
        with refused("E-COUNT-BYTES", option="--params"):
            parse_parameters(text)
    with refused("E-OPTION-RANGE", option="--tokens"):
        parse_tokens("0")
    with pytest.raises(ConfigError):
        parse_tokens("many")
    with refused("E-PARAMS-FORMAT"):
        parse_parameters("-5")


def test_shares_and_prices():
    assert parse_share("--failures", "0", none=True) == 0  # "what if nothing failed" is a question
    assert parse_share("--mfu", "45%") == parse_share("--mfu", "0.45") == parse_share("--mfu", 0.45) == 0.45
    assert parse_share("--failures", "0.38%") == pytest.approx(0.0038)
    with refused("E-OPTION-RANGE", option="--mfu") as caught:
        parse_share("--mfu", "45")
    assert caught.value.fix == "--mfu 45%, or --mfu 0.45"
    for wrong in ("0", "-1", "nan", "inf", "x", "120%"):
        with refused("E-OPTION-RANGE", option="--mfu"):
            parse_share("--mfu", wrong)
    assert parse_price("4") == parse_price("$4") == parse_price("4/h") == parse_price("4USD/gpu-hour") == 4
    for wrong in ("0", "-1", "nan", "4€", ""):
        with refused("E-OPTION-RANGE", option="--price"):
            parse_price(wrong)


def test_a_batch_counts_sequences_and_with_a_unit_tokens():
    assert parse_batch("512", 8192) == (512, "as asked for")
    assert (
        parse_batch("4M", 8192)[0] == parse_batch("4M-tokens", 8192)[0] == parse_batch("4194304 tokens", 8192)[0] == 512
    )
    assert parse_batch("4M", 2000)[0] == 2000  # divides as it is
    assert parse_batch("4M", 3000)[0] == 1333
    with refused("E-BATCH-SHORT", seq_len=8192):
        parse_batch("2k", 8192)
    for wrong, code in (
        ("0", "E-OPTION-RANGE"),
        ("-3", "E-BATCH-FORMAT"),
        ("x", "E-BATCH-FORMAT"),
        ("4MB", "E-BATCH-FORMAT"),
    ):
        with refused(code):
            parse_batch(wrong, 8192)


def test_failures_without_a_percent_sign_are_asked_about():
    assert parse_failures("--failures", "0.38%") == pytest.approx(0.0038)
    assert parse_failures("--failures", 0.0038) == 0.0038
    assert parse_failures("--failures", "38%") == 0.38
    assert parse_failures("--failures", "0") == 0
    with refused("E-FAILURES-PERCENT", option="--failures", share=0.38):
        parse_failures("--failures", "0.38")


@pytest.mark.parametrize("text", ["0", "0.0", "0e9"])
def test_a_budget_of_zero_is_out_of_range_and_no_unit_is_suggested(text):
    with refused("E-OPTION-RANGE", option="--budget", value=text) as caught:
        parse_budget(text)
    assert f"{text}usd" not in caught.value.fix
