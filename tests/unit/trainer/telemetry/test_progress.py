import re

import pytest

from ingot.trainer.telemetry.progress import LINE_PATTERN, ProgressLine, format_line

USUAL = {
    "step": 100,
    "steps": 880,
    "loss": 6.6441,
    "bpb": 2.4412,
    "grad_norm": 1.13,
    "lr": 6e-4,
    "tokens": 409_600,
    "tokens_per_second": 41_032.0,
    "mfu": None,
    "data_wait_seconds": 0.0001,
    "step_seconds": 0.1,
    "eta_seconds": 80.2,
    "cost_usd": None,
    "peak_memory_bytes": 1 << 28,
}


def line(**changes):
    return format_line(ProgressLine(**(USUAL | changes)))


def test_a_line_of_steps_that_all_were_passed_shows_no_numbers():
    names = ("loss", "bpb", "grad_norm", "tokens_per_second", "data_wait_seconds", "step_seconds", "eta_seconds")
    assert line(**dict.fromkeys(names), passed=10) == "step 100/880  passed 10 steps without training"


EVEN = {"load_cv": 0.31, "max_load": 2.149}


def test_a_usual_line():
    text = line()
    assert text == "step 100/880  loss 6.644 bpb 2.44 gn 1.1  lr 6.0e-4    41k tok/s mfu n/a data  0%  eta 1m20s"


def test_a_line_of_a_model_with_experts():
    before, after = line().split("  eta")
    assert line(**EVEN) == f"{before}  load cv 0.31 max  2.1x  eta{after}"
    assert line(**EVEN, dropped=0.0123) == f"{before}  load cv 0.31 max  2.1x drop  1.2%  eta{after}"
    assert line(**EVEN, fallback=0.0123) == f"{before}  load cv 0.31 max  2.1x over  1.2%  eta{after}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVEN,
        {"load_cv": 15.97, "max_load": 256.0, "dropped": 0.996, "eta_seconds": 86_400 * 9.0, "mfu": 0.41},
        {"load_cv": 15.97, "max_load": 256.0, "fallback": 1.0, "eta_seconds": 86_400 * 9.0, "mfu": 0.41},
        {"load_cv": 0.0, "max_load": 1.0, "dropped": 0.0},
        {"step": 1, "loss": 11.762},
        {"step": 880, "eta_seconds": 0.0},
        {"steps": 99_999, "mfu": 0.4123},
        {"loss": float("nan"), "bpb": float("nan"), "grad_norm": float("inf")},
        {"loss": 0.0004, "grad_norm": 1.2e-7, "lr": 0.0},
        {"grad_norm": 12345.0, "tokens_per_second": 12_345_678.0},
        {"step": 1_000_000, "steps": 2_000_000, "mfu": 0.5, "eta_seconds": 86_400 * 99.0, "cost_usd": 12.0},
        {"data_wait_seconds": 0.1},
        {"cost_usd": 0.0512},
    ],
    ids=str,
)
def test_one_pattern_reads_every_line(changes):
    values = USUAL | changes
    text = line(**changes)
    match = LINE_PATTERN.fullmatch(text)
    assert match, text
    # A million steps at a known price is the one line that may be longer.
    assert len(text) < (100 if values["steps"] < 10**6 else 120) + 40 * ("load_cv" in values), text
    assert int(match["step"]) == values["step"] and int(match["steps"]) == values["steps"]
    assert float(match["loss"]) == pytest.approx(values["loss"], rel=1e-3, abs=6e-4, nan_ok=True)
    assert float(match["lr"]) == pytest.approx(values["lr"], rel=0.06)
    assert (match["mfu"] == "n/a") == (values["mfu"] is None)
    assert (match["cost"] is None) == (values["cost_usd"] is None)
    for name, size in (("load_cv", 1), ("max_load", 1), ("dropped", 100), ("fallback", 100)):
        assert (match[name] is None) == (name not in values)
        assert match[name] is None or float(match[name]) == pytest.approx(values[name] * size, abs=0.051)


@pytest.mark.parametrize("lr, expected", [(6e-4, "6.0e-4 "), (0.05, "5.0e-2 "), (13.0, "1.3e1  "), (0.0, "0.0e0  ")])
def test_learning_rates_have_one_format_and_width(lr, expected):
    assert f" lr {expected}   41k tok/s" in line(lr=lr)


def test_columns_stay_in_place():
    lines = [line(step=s, loss=x, grad_norm=g) for s, x, g in ((1, 11.76, 3.0), (99, 8.1, 0.51), (880, 0.5, 12.0))]
    for word in ("loss", "bpb", "lr", "tok/s", "mfu", "data"):
        assert len({text.index(word) for text in lines}) == 1, lines


@pytest.mark.parametrize("seconds, expected", [(0, "0s"), (59.4, "59s"), (80, "1m20s"), (4000, "1h06m"), (-1, "0s")])
def test_clock(seconds, expected):
    assert re.search(r"eta (\w+)", line(eta_seconds=seconds))[1] == expected
