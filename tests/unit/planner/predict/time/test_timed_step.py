"""Closed forms of the bubble against simulated tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.planner.predict.time.timed_step import bubble_overhead, bubble_share, micro_batches_for
from ingot.theory.schedule import build_table, simulate


@pytest.mark.parametrize(("pp", "count"), [(1, 4), (2, 1), (4, 4), (8, 8), (8, 64), (16, 32)])
def test_share_and_overhead_are_those_of_a_simulated_1f1b(pp, count):
    line = simulate(build_table("1f1b", pp, count), forward=1, backward_input=1, backward_weight=1)
    assert bubble_share(pp, count) == pytest.approx(line.bubble_fraction)
    assert bubble_overhead(pp, count) == pytest.approx(line.step_time / (3 * count) - 1)


@pytest.mark.parametrize(("pp", "count", "stages"), [(4, 8, 2), (4, 16, 3), (8, 16, 4)])
def test_interleaved_stages_divide_it(pp, count, stages):
    line = simulate(build_table("interleaved", pp, count, stages), forward=1, backward_input=1, backward_weight=1)
    assert bubble_share(pp, count, stages) == pytest.approx(line.bubble_fraction)
    assert bubble_overhead(pp, count, stages) == pytest.approx(bubble_overhead(pp, count) / stages)


@given(st.integers(2, 64), st.floats(0.01, 0.9), st.integers(1, 8))
def test_the_fewest_micro_batches_for_a_share(pp, share, stages):
    count = micro_batches_for(pp, share, stages)
    assert bubble_share(pp, count, stages) <= share + 1e-9
    assert count == 1 or bubble_share(pp, count - 1, stages) > share
