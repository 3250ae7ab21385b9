import math

import pytest
import torch

from ingot.schema.guard import MOST_WINDOW, Guard
from ingot.trainer.guard.step_judge import StepJudge, finding

GUARD = Guard(window=32, ready=16)


def calm(steps, seed=0):
    """(loss, gradient norm) of a run that learns: both fall, with noise."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, steps, generator=random, dtype=torch.float64)
    for step in range(steps):
        level = 2 + 3 * math.exp(-step / 100)
        yield level + 0.05 * noise[0, step], level * (0.2 * noise[1, step]).exp()


def scalar(value):
    return torch.as_tensor(value, dtype=torch.float64)


def after(judge, steps):
    for loss, norm in steps:
        take(judge, loss, norm)
    return judge


def take(judge, loss, norm):
    loss, norm = scalar(loss), scalar(norm)
    judged = judge.judge(loss, norm)
    judge.add(loss, norm, judged[0] > 0)
    return finding(tuple(judged.tolist()))


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_has_no_findings(seed):
    judge = StepJudge(Guard(), "cpu")
    assert [found for loss, norm in calm(2000, seed) if (found := take(judge, loss, norm))] == []
    assert judge.count == 2000


@pytest.mark.parametrize(
    ("loss", "norm", "kinds"),
    [
        (9.0, 2.5, ("loss spike",)),
        (2.5, 30.0, ("gradient spike",)),
        (9.0, 900.0, ("loss spike", "gradient spike")),
        (2.5, 900.0, ("gradient spike", "suspected corruption")),
        (math.nan, 2.5, ("loss not finite",)),
        (2.5, math.inf, ("gradient not finite",)),
        (math.inf, math.nan, ("loss not finite", "gradient not finite")),
        (0.1, 1e-9, ()),
    ],
)
def test_each_kind_is_found_and_leaves_the_window_as_it_was(loss, norm, kinds):
    judge = after(StepJudge(GUARD, "cpu"), calm(40))
    before = judge.window.clone()
    found = take(judge, loss, norm)
    assert (found.kinds if found else ()) == kinds
    assert torch.equal(judge.window, before) is bool(kinds) and judge.count == 40 + (not kinds)
    assert judge.window.isfinite().all()


def test_deviations_are_those_of_median_and_median_deviation():
    judge = StepJudge(Guard(window=9, ready=8, loss_spread=1e-6, norm_spread=1e-6), "cpu")
    after(judge, [(float(n), math.exp(n)) for n in (90, 1, 2, 3, 4, 5, 6, 7, 8, 9)])  # the first has left the window
    judged = judge.judge(scalar(15), scalar(math.exp(5)))
    assert judged.tolist() == [0, pytest.approx(10 / (1.4826 * 2)), 0, pytest.approx(1)]


def test_there_is_no_spike_before_the_window_is_ready():
    judge = after(StepJudge(GUARD, "cpu"), calm(15))
    assert take(judge, 9.0, 9.0) is None
    assert take(judge, math.nan, 1.0).kinds == ("loss not finite",)


def test_a_very_calm_window_has_the_smallest_deviation():
    judge = after(StepJudge(GUARD, "cpu"), [(2.0, 1.0)] * 20)
    assert take(judge, 2.0 + 5.9 * GUARD.loss_spread, 1.0) is None
    found = take(judge, 2.0 + 6.1 * GUARD.loss_spread, 1.0)
    assert found.kinds == ("loss spike",) and found.loss_sigmas == pytest.approx(6.1)


def test_another_window_reads_the_same_state():
    wide = after(StepJudge(Guard(window=64), "cpu"), calm(80))
    narrow = StepJudge(GUARD, "cpu")
    for name, tensor in wide.state().items():
        narrow.state()[name].copy_(tensor)
    own = after(StepJudge(GUARD, "cpu"), calm(80))
    values = scalar(3.0), scalar(3.0)
    assert torch.equal(narrow.judge(*values), own.judge(*values)) and wide.window.shape == (2, MOST_WINDOW)


def test_after_forgetting_a_new_level_is_learned():
    judge = after(StepJudge(GUARD, "cpu"), calm(40))
    judge.forget()
    assert all(take(judge, 7.0, 20.0) is None for _ in range(20))
    assert take(judge, 9.0, 20.0).kinds == ("loss spike",)
