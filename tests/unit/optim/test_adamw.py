import torch

from ingot.model.init import initialize
from ingot.model.transformer import Transformer
from ingot.optim.adamw import build_adamw, set_learning_rate
from ingot.schema.arch import Arch
from ingot.schema.run import Optim

ARCH = Arch(
    vocab_size=11, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, d_ffn=8, tied_embeddings=False
)


def test_matrices_decay_and_norms_do_not():
    model = Transformer(ARCH)
    initialize(model, ARCH, 1)
    optimizer = build_adamw(model, Optim(lr=0.1, weight_decay=0.5))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1.0 if "norm" in name else 1 - 0.1 * 0.5
        assert torch.allclose(parameter, before[name] * kept), name


def test_one_step_is_the_published_update():
    model = torch.nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer = build_adamw(model, Optim(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
    gradients, w, m, v = (0.5, -0.2, 0.1), 2.0, 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        set_learning_rate(optimizer, 0.01 * step)
        model.weight.grad = torch.full_like(model.weight, g)
        optimizer.step()
        m, v, lr = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g, 0.01 * step
        w -= lr * 0.1 * w + lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-8)
    assert abs(model.weight.item() - w) < 1e-12


def test_every_parameter_is_in_exactly_one_group():
    model = Transformer(ARCH)
    groups = build_adamw(model, Optim()).param_groups
    ids = [id(p) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted(map(id, model.parameters()))
