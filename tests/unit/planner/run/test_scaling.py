"""Scaling laws against the figures that their authors print."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import ConfigError
from ingot.planner.run.scaling import (
    BESIROGLU,
    HOFFMANN,
    LossFit,
    cheapest_to_serve,
    compute_optimal,
    compute_optimal_tokens,
    overtraining,
)
from ingot.theory.flops import train_flops_6nd

# Hoffmann et al.'s fit with the third digit of its exponents, which Sardana et al. use.
THREE_DIGITS = LossFit(1.69, 406.4, 410.7, 0.336, 0.283, "Sardana et al. 2024")
MODELS, TOKENS = st.floats(1e7, 1e12), st.floats(1e9, 1e14)


def test_chinchilla_is_the_optimum_of_its_own_budget():
    """Hoffmann et al. 2022, table 3: 67B on 1.5T for 5.76e23 FLOPs; the model trained was 70B on 1.4T."""
    parameters, tokens = compute_optimal(5.76e23)
    assert parameters == pytest.approx(67e9, rel=0.04)
    assert tokens == pytest.approx(1.4e12, rel=0.02)
    assert compute_optimal_tokens(70_000_000_000) == 1_400_000_000_000


def test_the_corrected_fit_agrees_with_twenty_tokens_per_parameter():
    """Besiroglu et al. 2024: as approaches 1 and 2; the printed fit asks for 70 and more at Chinchilla's budget."""
    for fit, low, high in ((BESIROGLU, 15, 26), (HOFFMANN, 70, 110)):
        parameters, tokens = fit.optimum(5.76e23)
        assert low < tokens / parameters < high


@given(st.floats(1e18, 1e27), st.floats(0.3, 3))
def test_no_other_split_of_the_budget_has_less_loss(flops, shift):
    for fit in (HOFFMANN, BESIROGLU):
        parameters, tokens = fit.optimum(flops)
        assert train_flops_6nd(parameters, tokens) == pytest.approx(flops)
        assert fit.loss(parameters, tokens) <= fit.loss(parameters * shift, tokens / shift) + 1e-12


@given(MODELS, TOKENS)
def test_the_cheapest_model_of_a_loss_is_the_best_of_its_budget(parameters, tokens):
    loss = BESIROGLU.loss(parameters, tokens)
    cheapest = BESIROGLU.cheapest(loss)
    assert BESIROGLU.loss(*cheapest) == pytest.approx(loss)
    assert BESIROGLU.optimum(train_flops_6nd(*cheapest)) == pytest.approx(cheapest, rel=1e-6)
    assert train_flops_6nd(*cheapest) <= train_flops_6nd(parameters, tokens) * (1 + 1e-9)


def test_a_model_that_is_too_small_never_reaches_the_loss():
    loss = BESIROGLU.loss(8e9, 15e12)
    smallest = BESIROGLU.smallest(loss)
    assert BESIROGLU.tokens_for(smallest * 0.999, loss) == math.inf
    assert BESIROGLU.loss(smallest * 1.01, BESIROGLU.tokens_for(smallest * 1.01, loss)) == pytest.approx(loss)


def test_a_loss_below_the_text_entropy_is_refused():
    with pytest.raises(ConfigError, match=r"above 1\.8172"):
        BESIROGLU.cheapest(1.8)


def test_llama3_8b_on_15_trillion_tokens():
    """94 times 20 tokens per parameter costs 0.05 nats against the best model of those FLOPs, ten times larger."""
    over = overtraining(8e9, 15e12)
    assert over.multiple == pytest.approx(93.75)
    assert over.best_parameters == pytest.approx(81e9, rel=0.01)
    assert over.loss - over.best_loss == pytest.approx(0.054, abs=0.001)
    assert over.wasted == pytest.approx(0.82, abs=0.005)


@pytest.mark.parametrize(
    ("usual", "served", "parameters", "saved"),
    [(13e9, 2e12, 7e9, 0.17), (30e9, 1e13, 13.6e9, 0.28)],
)
def test_published_sizes_for_serving(usual, served, parameters, saved):
    """Sardana et al. 2024, figure 1 and section 3: a 7B instead of a 13B for 2T tokens saves 17% (1.7e22 FLOPs), 13.6B
    instead of 30B for 10T tokens 28%."""
    loss = THREE_DIGITS.loss(*_optimal_with(usual))
    found = cheapest_to_serve(loss, served, fit=THREE_DIGITS)
    assert found.usual_parameters == pytest.approx(usual, rel=1e-6)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.saved == pytest.approx(saved, abs=0.005)
    assert THREE_DIGITS.loss(found.parameters, found.tokens) == pytest.approx(loss)
    if usual == 13e9:
        assert found.usual_flops - found.flops == pytest.approx(1.7e22, rel=0.01)


def _optimal_with(parameters: float) -> tuple[float, float]:
    """Tokens that make this size the optimum: alpha A/N^alpha = beta B/D^beta."""
    fit = THREE_DIGITS
    return parameters, (fit.beta * fit.b * parameters**fit.alpha / (fit.alpha * fit.a)) ** (1 / fit.beta)


@given(st.floats(1e9, 2e12), st.floats(1e9, 1e14), st.floats(1.1, 50))
def test_more_serving_asks_for_smaller_models(parameters, served, more):
    loss = BESIROGLU.loss(parameters, 20 * parameters)
    found, further = cheapest_to_serve(loss, served), cheapest_to_serve(loss, served * more)
    assert further.parameters <= found.parameters * (1 + 1e-6) <= found.usual_parameters * (1 + 2e-6)
    assert found.saved >= -1e-9
    weighed = cheapest_to_serve(loss, served, weight=more)
    assert weighed.parameters == pytest.approx(further.parameters, rel=1e-5)


def test_nothing_served_is_the_cheapest_to_train():
    loss = BESIROGLU.loss(13e9, 260e9)
    found = cheapest_to_serve(loss, 0)
    assert found.parameters == pytest.approx(found.usual_parameters, rel=1e-3)
    assert found.saved == pytest.approx(0, abs=1e-6)
