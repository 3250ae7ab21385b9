"""The examples of examples/extend for the trainer, beside their formulas; and the guard of a schedule's rates."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.expect import refused

from ingot.plugins.callback import CALLBACKS, StepNumbers, Verdict
from ingot.plugins.load import load_plugins
from ingot.plugins.optimizer import OPTIMIZERS
from ingot.plugins.piece import ParameterShard
from ingot.plugins.registry import options_of
from ingot.plugins.schedule import SCHEDULES, SchedulePart
from ingot.schema.run import Optim, Schedule
from ingot.trainer.optim.build import optimizer_rules
from ingot.trainer.optim.schedule import learning_rate

EXAMPLES = Path(__file__).parents[3] / "examples" / "extend"


@pytest.fixture(autouse=True)
def examples(process):
    load_plugins(["muon", "inverse_sqrt", "noise_scale", "loss_metric"], EXAMPLES)


def test_the_inverse_square_root():
    rate = learning_rate(1000, 1e-2, Schedule(kind="inverse_sqrt", warmup_steps=10, options={"timescale": 50}))
    assert [rate(step) for step in (5, 10, 60, 210)] == pytest.approx([5e-3, 1e-2, 1e-2 / 2**0.5, 1e-2 / 5**0.5])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -1e-3, "1e-3", 1j])
def test_a_schedule_returns_rates(value):
    SCHEDULES.register(SchedulePart(name="odd", rate=lambda step, *_: value if step > 3 else 0.0))
    rate = learning_rate(10, 1e-2, Schedule(kind="odd", warmup_steps=1))
    assert [rate(1), rate(2)] == [1e-2, 0.0]
    with refused("E-SCHEDULE-RATE", schedule="odd", step=4):
        rate(4)


def test_muon_makes_directions_nearly_orthogonal():
    rule = optimizer_rules(Optim(kind="muon"))("blocks.0.mlp.up.weight", (32, 16))
    for shape in ((32, 16), (16, 32)):
        update = rule.of_matrix(torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
        sizes = torch.linalg.svdvals(update) / (0.2 * 32**0.5)
        assert sizes.min() > 0.6 and sizes.max() < 1.3


def test_muon_declares_its_state():
    part, rules = OPTIMIZERS["muon"], optimizer_rules(Optim(kind="muon"))
    for name, shape in (("embed.weight", (48, 16)), ("norm.weight", (16,)), ("blocks.0.attention.q.weight", (16, 16))):
        assert len(rules(name, shape).state) == part.moments(name, len(shape))


def noise_scale():
    piece = ParameterShard("w", (4,), (0,), (4,), torch.zeros(4), True)
    run = SimpleNamespace(
        pieces=[piece],
        device=torch.device("cpu"),
        sum_over_ranks=torch.clone,
        loss_scale=None,
        config=SimpleNamespace(tokens_per_step=8),
    )
    part = CALLBACKS["noise_scale"]
    return piece, part.make(run, options_of(part, {"smoothing": 0.5}))


def test_the_noise_scale_is_noise_over_signal():
    piece, callback = noise_scale()
    first, second = torch.tensor([1.0, 0, 0, 0]), torch.tensor([1.0, 2, 0, 0])
    for step, gradient in enumerate((first, second), 1):
        assert callback.on_line([]) == {}
        piece.grad = gradient
        callback.on_gradients(step)
    # signal: first . second = 1; noise: |second - first|^2 / 2 = 2 per batch of 8 tokens
    assert callback.on_line([]) == {"noise_scale_tokens": pytest.approx(2 * 8 / 1)}


def test_a_broken_gradient_does_not_break_the_noise_scale():
    piece, callback = noise_scale()
    for step in range(1, 7):
        piece.grad = torch.full((4,), math.nan if step == 3 else 1.0)
        callback.on_gradients(step)
    assert torch.isfinite(callback.squares).all()
    assert callback.on_line([])["noise_scale_tokens"] == 0


def test_the_best_loss_asks_for_a_stop_when_patience_ends():
    part = CALLBACKS["best_loss"]
    callback = part.make(None, options_of(part, {"patience": 3}))
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.0, 2.0), 1):
        metrics = callback.on_line(line := [StepNumbers(step=step, loss=loss, grad_norm=1.0, skipped=False)])
        assert callback.verdict(line) is (Verdict.STOP if step == 5 else Verdict.CONTINUE)
    assert metrics == {"mean_loss": 2.0, "lowest_loss": 1.0, "lowest_step": 2}
    other = part.make(None, options_of(part, {}))
    other.restore(callback.record())
    assert other.on_line([]) == metrics and other.verdict(line) is Verdict.CONTINUE
