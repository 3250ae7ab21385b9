import pytest
import torch

from ingot.trainer.optim import optimizer as optimizer_module
from ingot.trainer.optim.adamw import adamw_rules
from ingot.trainer.optim.optimizer import Optimizer


def torch_adamw(blocks, optim):
    """The same shards as parameters of PyTorch's own class."""
    parameters = {b.name: torch.nn.Parameter(b.value.clone()) for b in blocks}
    groups = [
        {"params": [parameters[b.name] for b in blocks if b.decays], "weight_decay": optim.weight_decay},
        {"params": [parameters[b.name] for b in blocks if not b.decays], "weight_decay": 0.0},
    ]
    return parameters, torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_as_torch(blocks, gradients, optim, dtype):
    mine = blocks(dtype)
    parameters, reference = torch_adamw(mine, optim)
    optimizer = Optimizer(mine, adamw_rules(optim))
    for step in range(1, 6):
        gradients(mine, step)
        for block in mine:
            parameters[block.name].grad = block.grad.clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 * step
        reference.step()
        optimizer.step(0.01 * step)
    for block in mine:
        assert torch.equal(block.value, parameters[block.name]), block.name
        if not block.value.numel():
            continue
        state, theirs = optimizer.moments()[block.name], reference.state[parameters[block.name]]
        assert state.keys() == theirs.keys()
        assert all(torch.equal(state[kind], theirs[kind]) for kind in state)
        assert state["step"].dtype == torch.float32 and state["step"].item() == 5


def test_one_step_is_the_published_update(optim, blocks):
    (block,) = (b for b in blocks(torch.float64) if b.name == "up")
    block.value.fill_(2.0)
    optimizer = Optimizer([block], adamw_rules(optim))
    w, m, v = 2.0, 0.0, 0.0
    for step, g in enumerate((0.5, -0.2, 0.1), 1):
        block.grad = torch.full_like(block.value, g)
        optimizer.step(0.01 * step)
        m, v, lr = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g, 0.01 * step
        w -= lr * 0.1 * w + lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-8)
    assert (block.value - w).abs().max() < 1e-12


def test_matrices_decay_and_norms_do_not(blocks, optim):
    mine = blocks()
    before = {b.name: b.value.clone() for b in mine}
    for block in mine:
        block.grad = torch.zeros_like(block.value)
    Optimizer(mine, adamw_rules(optim)).step(0.1)
    for block in mine:
        kept = 1.0 if block.name == "norm" else 1 - 0.1 * optim.weight_decay
        assert torch.allclose(block.value, before[block.name] * kept), block.name


def test_a_vetoed_step_leaves_everything_but_gradients(blocks, gradients, optim):
    mine, same = blocks(), blocks()
    optimizer, reference = Optimizer(mine, adamw_rules(optim)), Optimizer(same, adamw_rules(optim))
    for step, veto in ((1, False), (2, True), (3, False)):
        gradients(mine, step)
        gradients(same, step)
        if veto:
            mine[0].grad[0, 0] = float("nan")
        else:
            reference.step(0.01)
        optimizer.step(0.01, found_inf=torch.tensor(veto))
        assert all(b.grad is None for b in mine if b.value.numel())
    assert all(torch.equal(a.value, b.value) for a, b in zip(mine, same, strict=True))
    assert all(torch.equal(s["step"], torch.tensor(2.0)) for s in optimizer.moments().values())
    assert all(torch.equal(s["exp_avg"], reference.moments()[n]["exp_avg"]) for n, s in optimizer.moments().items())


def test_scale_is_a_factor_of_the_gradients(blocks, gradients, optim):
    mine, same = blocks(), blocks()
    gradients(mine, 1)
    gradients(same, 1)
    for block in same:
        block.grad.mul_(0.37)
    Optimizer(mine, adamw_rules(optim)).step(0.01, scale=torch.tensor(0.37))
    Optimizer(same, adamw_rules(optim)).step(0.01)
    assert all(torch.equal(a.value, b.value) for a, b in zip(mine, same, strict=True))


def test_low_precision_gradients_are_converted_in_parts(blocks, gradients, optim, monkeypatch):
    mine, same = blocks(), blocks()
    gradients(mine, 1, torch.bfloat16)
    for a, b in zip(mine, same, strict=True):
        b.grad = a.grad.float()
    monkeypatch.setattr(optimizer_module, "CONVERT_BYTES", 4000)
    assert len(list(optimizer_module._batches(mine))) > 2
    Optimizer(mine, adamw_rules(optim)).step(0.01, scale=torch.tensor(0.37))
    Optimizer(same, adamw_rules(optim)).step(0.01, scale=torch.tensor(0.37))
    assert all(torch.equal(a.value, b.value) for a, b in zip(mine, same, strict=True))


def test_moments_are_there_before_the_first_step_and_can_be_put(blocks, gradients, optim):
    mine, other = blocks(), blocks(seed=5)
    optimizer, restored = Optimizer(mine, adamw_rules(optim)), Optimizer(other, adamw_rules(optim))
    live = restored.moments()
    assert set(live) == {"embed", "up", "norm", "down"}
    assert all(not t.any() and t.is_contiguous() for s in live.values() for t in s.values())
    for step in (1, 2, 3):
        gradients(mine, step)
        optimizer.step(0.01)
        if step == 2:
            saved = {n: {k: t.clone().double() for k, t in s.items()} for n, s in optimizer.moments().items()}
            saved["up"]["step"] = saved["up"]["step"].reshape(1)
            values = [b.value.clone() for b in mine]
    for block, value in zip(other, values, strict=True):
        block.value.copy_(value)
    restored.put_moments(saved)
    assert live["up"]["exp_avg"] is restored.moments()["up"]["exp_avg"]
    gradients(other, 3)
    restored.step(0.01)
    assert all(torch.equal(a.value, b.value) for a, b in zip(mine, other, strict=True))


def test_a_missing_gradient_is_not_passed_over(blocks, gradients, optim):
    mine = blocks()
    gradients(mine, 1)
    mine[1].grad = None
    with pytest.raises(AssertionError, match="up has no gradient"):
        Optimizer(mine, adamw_rules(optim)).step(0.01)
