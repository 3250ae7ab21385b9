"""A schedule's time without its timeline is that of the full simulation."""

import random

import pytest

from ingot.theory.schedule import build_table, pipeline_seconds, simulate

CASES = [
    ("gpipe", 4, 0),
    ("1f1b", 8, 0),
    ("interleaved", 4, 6),
    ("interleaved", 2, 24),
    ("looped_bfs", 4, 2),
    ("zb_h1", 8, 0),
    ("zb_h2", 8, 0),
    ("zb_2p", 8, 0),
    ("interleaved_zb", 4, 3),
    ("zb_v", 4, 0),
    ("dualpipe_v", 4, 0),
    ("dualpipe", 4, 0),
]


def stages_of(name: str, pp: int, each: int) -> int:
    return pp * (each or (2 if name in ("zb_v", "dualpipe_v", "dualpipe") else 1))


def whole(name: str, pp: int, m: int, each: int, times, send: float) -> float:
    forward, inputs, weights = times
    table = build_table(name, pp, m, each)
    timeline = simulate(table, forward=forward, backward_input=inputs, backward_weight=weights, send=send)
    return timeline.span if name in ("zb_h2", "zb_2p") else timeline.step_time


# Qi et al. 2023, table 4 (times in ms, of the profile of 1.5B and 6.2B on 8 ranks) and table 5.
PROFILES = {"1.5B": (18.522, 18.086, 9.337, 0.601), "6.2B": (29.718, 29.444, 19.927, 0.527)}


@pytest.mark.parametrize(
    ("name", "model", "m", "share"),
    [
        ("1f1b", "1.5B", 24, 0.2431),
        ("1f1b", "6.2B", 64, 0.1091),
        ("zb_h1", "1.5B", 24, 0.1585),
        ("zb_h1", "6.2B", 24, 0.1323),
        ("zb_h1", "6.2B", 64, 0.0554),
        ("zb_2p", "1.5B", 24, 0.0433),
        ("zb_2p", "1.5B", 32, 0.0039),
        ("zb_2p", "6.2B", 24, 0.0029),
        ("zb_2p", "6.2B", 64, 0.0010),
    ],
)
def test_published_bubbles_of_measured_times_come_out_within_two_points(name, model, m, share):
    f, i, w, send = PROFILES[model]
    whole_step = pipeline_seconds(name, 8, m, 0, ([f] * 8, [i] * 8, [w] * 8), send)
    assert 1 - m * (f + i + w) / whole_step == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(("name", "pp", "each"), CASES)
@pytest.mark.parametrize("rounds", [1, 2, 3, 9])
def test_equal_stages_take_exactly_what_is_simulated(name, pp, each, rounds):
    stages, m = stages_of(name, pp, each), rounds * pp * (2 if name.startswith("dualpipe") else 1)
    times = [1.0] * stages, [1.3] * stages, [0.8] * stages
    assert pipeline_seconds(name, pp, m, each, times) == pytest.approx(whole(name, pp, m, each, times, 0.0), rel=1e-9)


@pytest.mark.parametrize(("name", "pp", "each"), CASES)
def test_ends_that_take_longer_and_messages_are_simulated_too(name, pp, each):
    stages, m = stages_of(name, pp, each), 10 * pp
    times = [1.0] * (stages - 1) + [1.7], [1.6] + [1.2] * (stages - 1), [0.9] * stages
    found, exact = pipeline_seconds(name, pp, m, each, times, 0.05), whole(name, pp, m, each, times, 0.05)
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("name", "pp", "each"), CASES)
def test_stages_of_any_times_are_off_by_little(name, pp, each):
    draw, stages, m = random.Random(3), stages_of(name, pp, each), 10 * pp
    times = tuple([draw.uniform(0.9, 1.1) for _ in range(stages)] for _ in range(3))
    found, exact = pipeline_seconds(name, pp, m, each, times, 0.02), whole(name, pp, m, each, times, 0.02)
    assert found == pytest.approx(exact, rel=0.02)
