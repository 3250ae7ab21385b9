import pytest
import torch

from ingot.optim.clip import clip_grad_norm


def parameters(*gradients):
    made = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(len(gradient), dtype=torch.float64))
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        made.append(parameter)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # one that got no gradient


def test_scales_to_the_norm_and_reports_the_one_before():
    made = parameters([3.0, 0.0], [4.0])
    assert clip_grad_norm(made, 1.0).item() == pytest.approx(5.0)
    assert clip_grad_norm(made, 0.0).item() == pytest.approx(1.0, rel=1e-6)


def test_small_gradients_stay_as_they_are():
    made = parameters([0.3, 0.4])
    assert clip_grad_norm(made, 1.0).item() == pytest.approx(0.5)
    assert made[0].grad is not None and made[0].grad.tolist() == [0.3, 0.4]


def test_zero_only_measures():
    made = parameters([30.0, 40.0])
    assert clip_grad_norm(made, 0.0).item() == pytest.approx(50.0)
    assert made[0].grad is not None and made[0].grad.tolist() == [30.0, 40.0]


def test_a_broken_gradient_shows_in_the_norm():
    assert not clip_grad_norm(parameters([1.0, float("nan")]), 1.0).isfinite()
    assert not clip_grad_norm(parameters([float("inf")]), 1.0).isfinite()
