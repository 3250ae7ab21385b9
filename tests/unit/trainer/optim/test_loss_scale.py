import torch

from ingot.trainer.optim.gradients import GROWTH_INTERVAL, LossScale

FINE, OVERFLOW = torch.tensor(False), torch.tensor(True)


def test_starts_high_and_halves_on_overflow():
    scale = LossScale("cpu")
    assert scale.scale.item() == 2**16 and scale.growth_interval == GROWTH_INTERVAL == 2000
    scale.update(OVERFLOW)
    scale.update(torch.ones(1))
    assert scale.scale.item() == 2**14


def test_doubles_after_good_steps_in_a_row():
    scale = LossScale("cpu", growth_interval=3)
    seen = []
    for found in (FINE, FINE, OVERFLOW, FINE, FINE, FINE, FINE, FINE, FINE, FINE):
        scale.update(found)
        seen.append(scale.scale.item() / 2**16)
    assert seen == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 2]


def test_state_continues_where_it_was():
    scale, other = LossScale("cpu", growth_interval=3), LossScale("cpu", growth_interval=3)
    tensors = other.state()
    for found in (OVERFLOW, FINE, FINE):
        scale.update(found)
    for name, live in tensors.items():  # as a checkpoint fills them
        live.copy_(scale.state()[name])
    other.update(FINE)
    assert other.scale.item() == 2**16 and other.good_steps.item() == 0
    assert tensors["loss_scale"] is other.scale


def test_it_finds_the_scale_at_which_float16_gradients_fit():
    weight = torch.full((4,), 3.0, dtype=torch.float16, requires_grad=True)
    scale = LossScale("cpu")
    for _ in range(20):
        weight.grad = None
        (weight * 0.5 * scale.scale.half()).sum().mul(100.0).backward()
        scale.update(~weight.grad.isfinite().all())
    assert weight.grad.isfinite().all() and (weight.grad / scale.scale).tolist() == [50.0] * 4
    assert 50.0 * scale.scale.item() <= 65504
