from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.schema.run import Schedule
from ingot.trainer.optim.schedule import learning_rate


def curve(steps, schedule, peak=1.0):
    rate = learning_rate(steps, peak, schedule)
    return [rate(step) for step in range(1, steps + 1)]


def test_cosine_warms_up_peaks_and_ends_at_its_floor():
    lr = curve(100, Schedule(warmup_steps=10, final_fraction=0.1), peak=2.0)
    assert lr[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert max(lr) == lr[9] == 2.0
    assert lr[54] == pytest.approx(1.1)  # halfway between peak and floor
    assert lr[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(lr[9:]))


def test_wsd_is_flat_then_linear():
    lr = curve(100, Schedule(kind="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.0))
    assert set(lr[9:80]) == {1.0}
    assert lr[80:] == pytest.approx([1 - n / 20 for n in range(1, 21)])


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_edges(kind, warmup):
    # Warm-up and decay that fill the whole run, and runs of one step.
    schedule = Schedule(kind=kind, warmup_steps=warmup, decay_steps=1)
    assert learning_rate(warmup + 1, 1.0, schedule)(warmup + 1) == pytest.approx(0.1)
    if warmup:
        assert learning_rate(warmup, 1.0, schedule)(warmup) == 1.0


@given(st.data())
def test_never_above_the_peak_or_below_zero(data):
    steps = data.draw(st.integers(2, 300))
    warmup = data.draw(st.integers(0, steps - 1))
    schedule = Schedule(
        kind=data.draw(st.sampled_from(["cosine", "wsd"])),
        warmup_steps=warmup,
        decay_steps=data.draw(st.integers(1, steps - warmup)),
        final_fraction=data.draw(st.floats(0, 1)),
    )
    assert all(0 <= lr <= 1 + 1e-12 for lr in curve(steps, schedule))
