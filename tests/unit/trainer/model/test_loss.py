import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.schema.arch import Arch
from ingot.trainer.model import loss as loss_module
from ingot.trainer.model.loss import Readout


def readout(softcap=0.0):
    shape = {
        "vocab_size": 53,
        "d_model": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "d_ffn": 8,
    }
    return Readout(Arch(**shape, logit_softcap=softcap))


def case(dtype=torch.float64, tokens=37, vocab=53, dim=8):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_equals_the_plain_form_in_value_and_gradients(chunk, monkeypatch):
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda vocab, device: chunk)
    hidden, weight, targets = case()
    ours = readout()(hidden, weight, targets) / 7
    our_grads = torch.autograd.grad(ours, (hidden, weight))
    plain = F.cross_entropy(hidden @ weight.T, targets, reduction="sum") / 7
    assert torch.allclose(ours, plain, rtol=1e-14)
    for mine, reference in zip(our_grads, torch.autograd.grad(plain, (hidden, weight)), strict=True):
        assert torch.allclose(mine, reference, rtol=1e-12, atol=1e-14)


def test_a_weight_that_is_used_elsewhere_gets_both_gradients():
    # Tied embeddings: the same matrix is looked up and multiplied with.
    _, weight, targets = case()
    ids = torch.arange(37) % 53
    ours = torch.autograd.grad(readout()(weight[ids], weight, targets), weight)[0]
    plain = torch.autograd.grad(F.cross_entropy(weight[ids] @ weight.T, targets, reduction="sum"), weight)[0]
    assert torch.allclose(ours, plain, rtol=1e-12)


def test_bf16_sums_in_float32():
    hidden, weight, targets = case(torch.bfloat16, tokens=600)
    loss = readout()(hidden, weight, targets)
    plain = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, plain, rtol=1e-6)
    ours, theirs = torch.autograd.grad(loss, weight)[0], torch.autograd.grad(plain, weight)[0]
    assert ours.dtype == torch.bfloat16
    assert (ours - theirs).abs().max() / theirs.abs().max() < 0.02


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = readout()(hidden, weight, torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_token_nats_add_up_to_the_loss():
    hidden, weight, targets = case()
    nats = readout().nats(hidden, weight, targets)
    assert nats.shape == (37,)
    assert torch.allclose(nats.sum(), readout()(hidden, weight, targets), rtol=1e-13)


@pytest.mark.parametrize("chunk", [5, 64])
def test_softcapped_logits_have_the_gradients_of_the_plain_form(chunk, monkeypatch):
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda vocab, device: chunk)
    hidden, weight, targets = case()
    ours = readout(1.5)(hidden, weight, targets) / 7
    logits = 1.5 * torch.tanh(F.linear(hidden, weight) / 1.5)
    plain = F.cross_entropy(logits, targets, reduction="sum") / 7
    assert torch.allclose(ours, plain, rtol=1e-13)
    assert not torch.allclose(ours, readout()(hidden, weight, targets) / 7, rtol=1e-3)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, plain)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-13)
    assert torch.allclose(readout(1.5).nats(hidden, weight, targets).sum(), ours * 7, rtol=1e-13)
    assert torch.equal(readout(1.5).logits(hidden, weight), logits)


def test_softcapped_logits_of_a_narrow_dtype_are_rounded_once():
    hidden, weight, targets = case(torch.bfloat16)
    logits = F.linear(hidden, weight)
    expected = (1.5 * torch.tanh(logits.float() / 1.5)).bfloat16()
    assert torch.equal(readout(1.5).logits(hidden, weight), expected)
    nats = readout(1.5).nats(hidden, weight, targets)
    assert nats.dtype == torch.float32 and nats.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_late_loss_keeps_no_gradient_of_the_head_and_has_the_same_bits(dtype, monkeypatch):
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda vocab, device: 5)
    results = []
    for late in (False, True):
        hidden, weight, targets = case(dtype)
        ours, kept = readout(1.5), []
        ours.late, ours.keeps_nats = late, True

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = ours(hidden, weight, targets)
        own = [tensor for tensor in kept if tensor.shape == weight.shape and tensor.data_ptr() != weight.data_ptr()]
        assert len(own) == (not late)
        assert ((first := total.detach().clone()) == 0) == late
        (total / 7).backward()
        assert late or torch.equal(first, total.detach())
        results.append((total.detach(), ours.kept_nats, hidden.grad, weight.grad))
    for eager, afterwards in zip(*results, strict=True):
        assert torch.equal(eager, afterwards)


def test_no_chunk_makes_a_gradient_of_the_head_in_the_dtype_of_the_sum(monkeypatch):
    """The products of float32 and float64 are added in place. A narrow product is one tensor at a time."""
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda vocab, device: 5)

    class Made(TorchDispatchMode):
        """Count the operations whose result is a new tensor of the shape of the head."""

        def __init__(self):
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            of_head = isinstance(made, torch.Tensor) and made.shape == (53, 8)
            self.products += of_head and func is torch.ops.aten.mm.default
            return made

    for dtype, chunks in ((torch.float64, 0), (torch.float32, 0), (torch.bfloat16, 8)):
        with Made() as made:
            readout()(*case(dtype))
        assert made.products == chunks
