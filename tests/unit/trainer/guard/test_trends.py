import math

import numpy as np
import pytest

from ingot.plugins.callback import StepNumbers
from ingot.schema.alert import EXPLOSION, LOSS_RATIO, LOSS_SCALE, PLATEAU, UNIFORM, VANISHED, alert_of, described
from ingot.schema.guard import Guard
from ingot.trainer.guard.trends import Trends

VOCABULARY = 50_000
LATE = 12_000  # steps: the loss falls by less than 1% in the last thousands of them


def power_law(seed, steps=LATE, flat_from=None):
    """The losses of a healthy run: a floor, a power of the number of steps, and noise; flat from a step on."""
    random = np.random.default_rng(seed)
    power, floor, noise = random.uniform(0.05, 0.2), random.uniform(1.5, 2.5), 10 ** random.uniform(-2.5, -1.8)
    at = np.minimum(np.arange(1, steps + 1), flat_from or steps)
    return floor + random.uniform(0.8, 1.2) * ((at + 30) / 10) ** -power + noise * random.standard_normal(steps)


def steps_of(losses, norms=None, first=1):
    norms = np.full(len(losses), 0.5) if norms is None else norms
    pairs = zip(map(float, losses), map(float, norms), strict=True)
    return [StepNumbers(first + i, loss, norm, skipped=False) for i, (loss, norm) in enumerate(pairs)]


def trends_of(settled_after=0, **settings):
    return Trends(Guard(**settings), clip_norm=1.0, vocab_size=VOCABULARY, settled_after=settled_after)


def play(trends, steps, log_every=50):
    lines = [steps[i : i + log_every] for i in range(0, len(steps), log_every)]
    return [alert for line in lines for alert in trends.line(line)]


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_has_no_alert_even_late(seed):
    """The ratio of 0.99 alone is reached: by the halves of the last thousand steps, and of the last half of all."""
    losses = power_law(seed)
    norms = 2 * np.exp(0.2 * np.random.default_rng(seed).standard_normal(LATE))
    assert play(trends_of(), steps_of(losses, norms)) == []
    for window in (losses[-1000:], losses[LATE // 2 :]):
        first, second = np.split(window, 2)
        assert second.mean() >= 0.99 * first.mean()


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_falls_no_more_is_a_plateau(seed):
    """The run has about twice the steps then. The next alert comes when it has a quarter more."""
    (alert, *more) = play(trends_of(), steps_of(power_law(seed, flat_from=4000)))
    assert (alert.alert, alert.limit) == (PLATEAU, 0.99) and 5500 <= alert.step <= 10_000
    assert all(one.alert == PLATEAU and one.step >= alert.step * 1.25 for one in more)
    assert "has not fallen" in described(alert)


def test_a_noisy_window_shows_no_plateau():
    """The noise of small batches hides half of one percent, and the loss of some thousand steps falls by as little."""
    losses = 3.0 - 1e-6 * np.arange(6000) + 0.1 * np.random.default_rng(0).standard_normal(6000)
    assert play(trends_of(), steps_of(losses)) == []


def test_a_plateau_is_found_after_a_restart_and_a_way_back():
    losses = power_law(1, flat_from=4000)
    trends, history = trends_of(), [(step, losses[step - 1]) for step in range(10, 6001, 10)]
    trends.take_up(history, 6000)
    steps = steps_of(losses)
    assert play(trends, steps[6000:6500]) == [] and play(trends, steps[6200:6400]) == []
    found = play(trends, steps[6400:])
    assert found[0].alert == PLATEAU and found[0].step <= 9000
    found = play(trends_of(), steps[6000:])  # what was before is not known
    assert all(alert.step > 9000 for alert in found)


def test_a_run_that_never_learned_stays_at_a_uniform_guess():
    losses = math.log(VOCABULARY) + 0.01 * np.random.default_rng(0).standard_normal(2500)
    found = [(one.alert, one.step, one.since) for one in play(trends_of(), steps_of(losses))]
    assert found[:3] == [(UNIFORM, 1000, 1), (PLATEAU, 2000, 1001), (UNIFORM, 2000, 1001)]
    assert play(trends_of(plateau_window=0), steps_of(losses)) == []


def test_ratio_rules():
    losses, norms = np.full(200, 2.0), np.full(200, 0.5)
    losses[[20, 120]], norms[[20, 150]] = (9.0, 4.5), 3.5  # the first come before the window is ready
    found = play(trends_of(), steps_of(losses, norms))
    assert [(one.alert, one.step) for one in found] == [(LOSS_RATIO, 121), (EXPLOSION, 151)]
    assert found[0].value == pytest.approx(4.5 / 2.07) and found[1].limit == 3.0
    assert play(trends_of(loss_ratio=0, norm_ratio=0), steps_of(losses, norms)) == []
    for settled_after, more in ((150, [EXPLOSION]), (151, [])):
        found = play(trends_of(settled_after), steps_of(losses, norms))
        assert [one.alert for one in found] == [LOSS_RATIO, *more]
    assert play(trends_of(), steps_of(np.full(200, 2.0), np.full(200, 9.0))) == []  # its norm is always that large


@pytest.mark.parametrize("norm", [0.0, 1e-6])
def test_a_gradient_that_vanished(norm):
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(300))
    norms[120:] = norm
    norms[100:105] = 0  # too few
    found = play(trends_of(), steps_of(np.full(300, 3.0), norms))
    assert (found[0].alert, found[0].step, found[0].since) == (VANISHED, 130, 121)
    assert play(trends_of(), steps_of(np.full(300, 3.0), np.geomspace(1, 1e-6, 300))) == []  # it fell slowly


def test_a_model_that_was_dead_from_its_start():
    found = play(trends_of(), steps_of(np.full(50, 3.0), np.zeros(50)))
    assert [(one.alert, one.step, one.since) for one in found] == [(VANISHED, 10, 1)]


def scales(trends, values, log_every=10):
    found = []
    for i, scale in enumerate(values):
        line = steps_of(np.full(log_every, 3.0), first=1 + i * log_every)
        found += [(one.alert, one.step, one.value) for one in trends.line(line, scale)]
    return found


def test_a_loss_scale_that_collapses():
    """A fall at the start, and one halving per two thousand steps after it, are healthy."""
    healthy = [2.0**e for e in (16, 13, 9)] + [2.0**9] * 200 + [2.0**8] * 200
    assert scales(trends_of(plateau_window=0), healthy) == []
    fast = scales(trends_of(plateau_window=0), [2.0**11] * 20 + [2.0**e for e in range(10, 4, -1)])
    assert fast == [(LOSS_SCALE, 260, 2.0**5)]
    slow = scales(trends_of(plateau_window=0, scale_window=50), [2.0 ** (5 - i // 10) for i in range(70)])
    assert slow[0] == (LOSS_SCALE, 610, 0.5)


def test_an_event_of_an_alert_is_the_alert():
    (alert,) = play(trends_of(), steps_of(np.full(10, 3.0), np.zeros(10)))
    assert alert_of(vars(alert)) == alert
    with pytest.raises(ValueError, match="mood"):
        alert_of(vars(alert) | {"alert": "mood"})
