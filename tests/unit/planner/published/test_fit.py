"""The fit finds constants that made the data, stays near its priors without data, and has few of them."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ingot.planner.predict.time.constants import PRIOR, Constants, error_band, error_ratios, fitted
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.published.fit import NAMES, Fit, fit, residuals, timed
from ingot.planner.published.run import published_runs, shipped_rows


@pytest.fixture(scope="module")
def few():
    """Small runs of three families, without pipelines, so that a prediction takes no time."""
    wanted = ("mpt-7b-a100-80-8-s2048", "mpt-1b-h100-8-s2048", "tt-8b-fsdp-8", "nemo2407-llama2-7b", "nemo2407-gpt3-5b")
    found = [row for row in shipped_rows() if row.id.startswith(wanted)]
    return timed(published_runs(found))


def as_made_by(published_runs, constants):
    """The same runs, timed by the model itself."""
    made = []
    for one in published_runs:
        time = estimate(one.run, one.cluster, one.software, constants)
        assert time is not None
        made.append(replace(one, measured=replace(one.measured, step_seconds=time.seconds * one.scale)))
    return made


def test_few_constants_and_none_for_a_family():
    assert len(fields(Constants)) <= 16
    words = {word for row in shipped_rows() for word in (row.family, row.family.split("_")[0])}
    assert not [name for name in NAMES if any(word in name for word in words)]


def test_every_constant_has_a_prior_inside_of_its_bounds():
    for constant in fields(Constants):
        low, high = constant.metadata["low"], constant.metadata["high"]
        assert low <= constant.default <= high
        assert constant.metadata["sigma"] > 0
        assert low <= getattr(fitted(), constant.name) <= high


def test_residuals_are_logarithms_of_measured_over_predicted(few):
    made = as_made_by(few, PRIOR)
    assert residuals(made, PRIOR) == pytest.approx(np.zeros(len(made)), abs=1e-9)
    slower = [replace(s, measured=replace(s.measured, step_seconds=2 * s.measured.step_seconds)) for s in made]
    assert residuals(slower, PRIOR) == pytest.approx(np.full(len(made), np.log(2)))


def test_data_that_the_priors_explain_moves_nothing(few):
    found = fit(as_made_by(few, PRIOR))
    assert all(getattr(found, name) == pytest.approx(getattr(PRIOR, name), rel=1e-6) for name in NAMES)


def test_constants_move_towards_those_that_made_the_data(few):
    """Not all the way: priors hold them, and other constants explain a part."""
    truth = replace(PRIOR, matmul_share=PRIOR.matmul_share * 0.85)
    made = as_made_by(few, truth)
    found = fit(made)
    before, after = residuals(made, PRIOR), residuals(made, found)
    assert np.abs(after).mean() < 0.7 * np.abs(before).mean()
    assert truth.matmul_share < found.matmul_share < PRIOR.matmul_share


def test_a_family_that_is_left_out_has_no_say(few):
    family = "nemo"
    assert any(one.family == family for one in few)
    spoilt = [
        replace(one, measured=replace(one.measured, step_seconds=7.0)) if one.family == family else one for one in few
    ]
    assert Fit(tuple(few)).without(family) == Fit(tuple(spoilt)).without(family)
    assert Fit(tuple(few)).all() != Fit(tuple(spoilt)).all()


def test_the_band_holds_most_of_what_was_left_out(few):
    whole = Fit(tuple(few))
    low, high = whole.error_band(dict.fromkeys(whole.families, PRIOR))
    ratio = np.exp(residuals(few, PRIOR))
    assert min(ratio) <= low < high <= max(ratio)


def test_the_band_that_ships():
    low, high = error_ratios()
    assert 0.7 < low < 1 < high < 1.5
    assert error_band(10.0) == pytest.approx((10 * low, 10 * high))
