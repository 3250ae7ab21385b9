import math
from itertools import pairwise
from statistics import median_low

import pytest
import torch

from ingot.schema.guard import Guard
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


def test_the_unit_is_the_noise_between_steps_and_not_how_fast_the_loss_falls():
    judge = StepJudge(Guard(window=9, level=3, ready=8, loss_spread=1e-6, norm_spread=1e-6), "cpu")
    # The first step has left the window. Changes are -5 and -3 in turn: their median is -5, deviations are 0 and 2.
    losses = [900, 100, 95, 92, 87, 84, 79, 76, 71, 68]
    after(judge, [(float(loss), math.exp(loss / 10)) for loss in losses])
    judged = judge.judge(scalar(80.0), scalar(math.exp(7.1)))
    assert judged.tolist() == pytest.approx([4, (80 - 71) / 1e-6, 0, 1], rel=1e-6)
    other = StepJudge(judge.guard, "cpu")
    for loss in (0, 1, 3, 6, 10, 15, 21, 28, 36):
        other.add(scalar(loss), scalar(1.0), torch.tensor(False))
    # Changes 1 to 8: median 4, deviations 3 2 1 0 1 2 3 4, whose lower median is 2.
    assert other.judge(scalar(38.0), scalar(1.0))[1] == pytest.approx((38 - 28) / (2 * 1.4826 / math.sqrt(2)))


def plain(judge, loss, norm):
    """The deviations of a step and its factor, by numbers of Python: zeros before the window is ready."""
    found = []
    for value, window, least in zip((loss, norm.log()), judge.values(), (0.02, 0.15), strict=True):
        if len(window) < judge.guard.ready:
            return [0.0, 0.0, 0.0]
        changes = [new - old for old, new in pairwise(window)]
        middle = median_low(changes)
        spread = max(1.4826 / math.sqrt(2) * median_low(abs(change - middle) for change in changes), least)
        distance = float(value) - median_low(window[-judge.guard.level :])
        found.append(distance / spread)
    return [*found, float(scalar(distance).exp())]


@pytest.mark.parametrize("seed", range(3))
def test_each_step_is_judged_as_plain_numbers_are(seed):
    judge = StepJudge(GUARD, "cpu")
    for number, (loss, norm) in enumerate(calm(100, seed)):
        loss, norm = (loss + 9, norm * 500) if number % 23 == 22 else (loss, norm)
        expected = plain(judge, loss, norm)
        judged = judge.judge(loss, norm)
        assert judged.tolist()[1:] == expected
        other = loss + 0.01 if number % 7 == 6 else loss  # a step may be judged, and another one added
        judge.add(other, norm, judged[0] > 0)
        assert judged[0] > 0 or judge.values()[0][-1] == other


def test_there_is_no_spike_before_the_window_is_ready():
    judge = after(StepJudge(GUARD, "cpu"), calm(15))
    assert take(judge, 9.0, 9.0) is None
    assert take(judge, math.nan, 1.0).kinds == ("loss not finite",)
    judge = after(judge, calm(15))
    assert [judge.judge(scalar(9.0), scalar(9.0), settled=settled)[0] > 0 for settled in (False, True)] == [False, True]
    assert judge.judge(scalar(9.0), scalar(math.inf), settled=False)[0] > 0


def test_a_very_calm_window_has_the_smallest_deviation():
    judge = after(StepJudge(GUARD, "cpu"), [(2.0, 1.0)] * 20)
    assert take(judge, 2.0 + 5.9 * GUARD.loss_spread, 1.0) is None
    found = take(judge, 2.0 + 6.1 * GUARD.loss_spread, 1.0)
    assert found.kinds == ("loss spike",) and found.loss_sigmas == pytest.approx(6.1)


def test_another_window_takes_over_the_same_values():
    wide = after(StepJudge(Guard(window=64), "cpu"), calm(80))
    narrow = StepJudge(GUARD, "cpu")
    narrow.restore(*wide.values())
    own = after(StepJudge(GUARD, "cpu"), calm(80))
    values = scalar(3.0), scalar(3.0)
    assert torch.equal(narrow.judge(*values), own.judge(*values)) and narrow.values() == own.values()
    short = StepJudge(GUARD, "cpu")
    short.restore(*(each[-5:] for each in own.values()))
    assert short.values() == tuple(each[-5:] for each in own.values()) and short.count == 5
    short.restore((), ())
    assert short.count == 0


def test_after_forgetting_a_new_level_is_learned():
    judge, other = after(StepJudge(GUARD, "cpu"), calm(40)), after(StepJudge(GUARD, "cpu"), calm(20, 1))
    judge.forget()
    after(judge, calm(20, 1))
    values = scalar(3.0), scalar(3.0)
    assert torch.equal(judge.judge(*values), other.judge(*values))
    judge.forget()
    assert all(take(judge, 7.0, 20.0) is None for _ in range(20))
    assert take(judge, 9.0, 20.0).kinds == ("loss spike",)
