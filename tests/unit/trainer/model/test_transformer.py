import pytest
import torch

from ingot.schema.arch import Arch
from ingot.trainer.model.init import initial_value, initialize
from ingot.trainer.model.layers import rotary_tables, rotate
from ingot.trainer.model.transformer import Transformer

SMALL = {
    "vocab_size": 97,
    "d_model": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ffn": 48,
    "max_seq_len": 64,
}


def build(seed=1, dtype=torch.float64, **changes):
    arch = Arch(**(SMALL | changes))
    model = Transformer(arch).to(dtype)
    initialize(model, arch, seed)
    # Spread the weights, so that norms, rotary angles and residuals all matter to the result.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
    return arch, model


def tokens(arch, batch=2, length=17, seed=3):
    return torch.randint(0, arch.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": False}, {"qk_norm": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1, "rope_theta": 5e5}],
    ids=str,
)
def test_logits_equal_the_reference_implementation(transformers_twin, changes):
    arch, model = build(**changes)
    x, (twin, _) = tokens(arch), transformers_twin(arch, model)
    with torch.no_grad():
        ours, theirs = model(x), twin(x).logits
    assert ours.dtype == theirs.dtype == torch.float64
    assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rotation_and_its_gradient_are_those_of_the_formula_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x_BNTH = torch.randn(2, 5, 3, 8, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
    slope = torch.randn(2, 3, 5, 8, generator=generator).to(dtype)
    tables = rotary_tables(torch.arange(5) + 1000, 8, 10_000.0)
    exact = x_BNTH.detach().double().requires_grad_()
    (first, second), (cos, sin) = exact.chunk(2, dim=-1), (table.double() for table in tables)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    expected.backward(slope.double())
    found = rotate(x_BNTH, *tables)
    found.backward(slope)
    bound = 2e-7 if dtype == torch.float32 else 0  # of float32 alone: products are rounded before the sum
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=4 * bound)
    torch.testing.assert_close(x_BNTH.grad, exact.grad.to(dtype), rtol=0, atol=4 * bound)
    assert found.is_contiguous() and found.dtype == x_BNTH.grad.dtype == dtype


def test_parameter_names_are_the_contract():
    _, model = build(num_layers=1, qk_norm=True, tied_embeddings=False)
    assert {n for n, _ in model.named_parameters()} == {
        "embed.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.q.weight",
        "blocks.0.attention.k.weight",
        "blocks.0.attention.v.weight",
        "blocks.0.attention.o.weight",
        "blocks.0.attention.q_norm.weight",
        "blocks.0.attention.k_norm.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
        "head.weight",
    }
    assert "head.weight" not in dict(build()[1].named_parameters())
    assert not list(model.buffers())


def test_parameter_count_is_the_planners():
    from ingot.theory.params import count_parameters

    for changes in ({}, {"tied_embeddings": False, "qk_norm": True}):
        arch, model = build(**changes)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(arch)


def test_loss_is_the_cross_entropy_of_the_logits():
    arch, model = build()
    x, y = tokens(arch), tokens(arch, seed=4)
    expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    assert torch.allclose(model(x, y), expected, rtol=1e-13)


def test_a_token_sees_nothing_later():
    arch, model = build()
    x = tokens(arch)
    changed = x.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % arch.vocab_size
    with torch.no_grad():
        assert torch.equal(model(x)[:, :10], model(changed)[:, :10])
        assert not torch.equal(model(x)[:, 10:], model(changed)[:, 10:])


def test_document_mask_hides_earlier_documents():
    arch, model = build()
    x = tokens(arch, batch=1, length=12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    changed = x.clone()
    changed[:, :5] = (changed[:, :5] + 1) % arch.vocab_size
    with torch.no_grad():
        masked, masked_changed = model(x, None, documents), model(changed, None, documents)
        assert torch.equal(masked[:, 5:], masked_changed[:, 5:])
        assert not torch.equal(masked[:, :5], masked_changed[:, :5])
        assert not torch.allclose(model(x)[:, 5:], masked[:, 5:])  # without the mask, the first document shows
        whole = model(x, None, torch.zeros_like(x))
    assert torch.allclose(model(x), whole, rtol=1e-12, atol=1e-12)  # one document: the mask is plain causality


def test_attend_is_passed_in():
    arch = Arch(**SMALL)
    shapes = []

    def attend(q, k, v, sight):
        shapes.append((tuple(q.shape), tuple(k.shape), sight.positions_T.tolist()))
        return torch.zeros_like(q)

    Transformer(arch, attend)(tokens(arch, batch=1, length=5))
    assert shapes == [((1, 4, 5, 8), (1, 2, 5, 8), [0, 1, 2, 3, 4])] * 3


@pytest.mark.parametrize("dtype, expected", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_the_loss_is_wide(dtype, expected):
    arch, model = build(dtype=dtype)
    loss = model(tokens(arch), tokens(arch, seed=4))
    assert loss.dtype == expected and loss.isfinite()


def test_first_weights_depend_on_seed_and_name_alone():
    arch = Arch(**SMALL)
    shape = torch.Size((32, 32))
    value = initial_value("blocks.0.attention.q.weight", shape, arch, 7)
    torch.manual_seed(123)  # the global stream plays no part
    assert torch.equal(value, initial_value("blocks.0.attention.q.weight", shape, arch, 7))
    assert not torch.equal(value, initial_value("blocks.1.attention.q.weight", shape, arch, 7))
    assert not torch.equal(value, initial_value("blocks.0.attention.q.weight", shape, arch, 8))


def test_residual_writers_start_smaller():
    arch = Arch(**SMALL)
    shape = torch.Size((300, 300))
    plain = initial_value("blocks.0.mlp.up.weight", shape, arch, 1).std()
    writer = initial_value("blocks.0.mlp.down.weight", shape, arch, 1).std()
    assert writer / plain == pytest.approx(1 / (2 * arch.num_layers) ** 0.5, rel=0.02)
    assert torch.equal(initial_value("norm.weight", torch.Size((4,)), arch, 1), torch.ones(4))
