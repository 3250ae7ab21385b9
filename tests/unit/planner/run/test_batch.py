"""Rules of batches and learning rates against published figures, and the noise scale against drawn gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.planner.run.batch import (
    PUBLISHED_RUNS,
    batch_ramp,
    kaplan_critical_batch,
    kaplan_learning_rate,
    nearest_runs,
    noise_scale_of_batches,
    simple_noise_scale,
    step_factor,
    token_factor,
    warmup_steps,
)


def test_critical_batches_of_kaplan():
    """Kaplan et al. 2020, figure 10: about 1-2M tokens at the largest models' loss of 2.5 to 3."""
    assert kaplan_critical_batch(3.0) == pytest.approx(1.07e6, rel=0.01)
    assert kaplan_critical_batch(2.5) == pytest.approx(2.55e6, rel=0.01)


def test_kaplan_learning_rate_falls_and_ends():
    """Appendix D.6: it would be 0 at about 1.2e10 parameters."""
    assert kaplan_learning_rate(125e6) == pytest.approx(6.4e-4, rel=0.01)
    assert kaplan_learning_rate(1e10) == pytest.approx(2.7e-5, rel=0.02)
    assert kaplan_learning_rate(1.3e10) == 0.0


@given(st.floats(1e-3, 1e3))
def test_steps_and_tokens_trade_along_a_hyperbola(ratio):
    """McCandlish et al. 2018, eq. 2.11: (S/S_min - 1)(E/E_min - 1) = 1, and both are twice the least at B_crit."""
    assert (step_factor(ratio, 1) - 1) * (token_factor(ratio, 1) - 1) == pytest.approx(1)
    assert step_factor(1, 1) == token_factor(1, 1) == 2


def test_the_noise_scale_is_found_from_two_batch_sizes():
    rng, size = np.random.default_rng(5), 64
    mean, deviation = rng.normal(size=size), 3.0
    true = simple_noise_scale(size * deviation**2, float(mean @ mean))
    norms = {
        batch: float(np.mean(np.sum((mean + deviation * rng.normal(size=(4000, size)) / batch**0.5) ** 2, axis=1)))
        for batch in (2, 32)
    }
    assert noise_scale_of_batches(2, norms[2], 32, norms[32]) == pytest.approx(true, rel=0.1)
    assert noise_scale_of_batches(2, 10.0, 32, 0.1) == float("inf")  # the small batch is all noise


def test_nearest_runs_are_of_the_same_kind_and_size():
    assert nearest_runs(8.03e9)[0].name == "Llama 3 8B"
    assert nearest_runs(175e9)[0].name == "GPT-3 175B"
    assert nearest_runs(20e9, experts=True)[0].name == "DeepSeek-V3"
    assert not any(run.experts for run in nearest_runs(37e9)[: len(PUBLISHED_RUNS) - 1])
    assert len(nearest_runs(1e9)) == len(PUBLISHED_RUNS)


@given(st.floats(1e4, 1e8), st.floats(1e9, 1e14))
def test_a_ramp_ends_with_the_whole_batch_and_all_tokens(batch, tokens):
    ramp = batch_ramp(batch, tokens)
    assert ramp[-1] == (batch, tokens)
    assert [size for size, _ in ramp] == sorted(size for size, _ in ramp)
    assert [until for _, until in ramp] == sorted(until for _, until in ramp)


def test_palm_went_from_one_to_four_million():
    assert [size for size, _ in batch_ramp(4e6, 780e9)] == [1e6, 2e6, 4e6]


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (100, 5), (40_000, 2000), (10**6, 2000)])
def test_warmup(steps, warmup):
    assert warmup_steps(steps) == warmup
