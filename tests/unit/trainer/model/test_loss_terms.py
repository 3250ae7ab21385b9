"""Loss terms of plug-ins: their derivative joins that of the cross entropy, their values are only reported."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.expect import refused

from ingot.plugins.registry import Registry
from ingot.schema.arch import Arch
from ingot.trainer.model.loss import LossTerm, Readout

ARCH = Arch(vocab_size=12, d_model=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, d_ffn=8)
EXAMPLE = Path(__file__).parents[4] / "examples" / "extend" / "z_loss.py"


@pytest.fixture
def z_term():
    term = runpy.run_path(str(EXAMPLE))["z_loss"]
    yield LossTerm("z", 0.25, lambda logits, targets, vocabulary: term(logits, targets, vocabulary, None))
    for registry in Registry.every:
        registry.forget("__main__")


def inputs():
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (9, 12))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.arange(9) % 12


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_gradients_are_those_of_nats_plus_the_weighted_term(z_term, softcap):
    readout = Readout(replace(ARCH, logit_softcap=softcap))
    readout.terms = [z_term]
    hidden, weight, targets = inputs()
    nats = readout(hidden, weight, targets)
    nats.backward()
    ours = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    cross_entropy, z = F.cross_entropy(logits, targets, reduction="sum"), logits.logsumexp(-1).square().sum()
    (cross_entropy + 0.25 * z).backward()
    assert torch.allclose(nats, cross_entropy)  # the reported loss stays the cross entropy
    assert torch.allclose(ours[0], hidden.grad, rtol=1e-10) and torch.allclose(ours[1], weight.grad, rtol=1e-10)
    assert z_term.take().tolist() == pytest.approx([z.item(), 9.0]) and z_term.take().tolist() == [0.0, 0.0]


def test_evaluation_does_not_count(z_term):
    readout = Readout(ARCH)
    readout.terms = [z_term]
    readout.nats(*inputs())
    assert z_term.take().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_term_may_return_its_logits_as_slope(softcap):
    readout = Readout(replace(ARCH, logit_softcap=softcap))
    readout.terms = [
        LossTerm("square", 0.25, lambda logits, targets, vocabulary: (logits.square().sum(-1) / 2, logits))
    ]
    hidden, weight, targets = inputs()
    readout(hidden, weight, targets).backward()
    ours, hidden.grad = hidden.grad.clone(), None
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    (F.cross_entropy(logits, targets, reduction="sum") + 0.25 * logits.square().sum() / 2).backward()
    assert torch.allclose(ours, hidden.grad, rtol=1e-10)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    "term",
    [
        lambda logits, targets, vocabulary: (logits.mean(), logits),
        lambda logits, targets, vocabulary: (logits.mean(-1), logits.mean(-1)),
        lambda logits, targets, vocabulary: (logits.mean(-1), logits[:, :5]),
    ],
)
def test_wrong_shapes_are_refused(softcap, term):
    readout = Readout(replace(ARCH, logit_softcap=softcap))
    readout.terms = [LossTerm("mean", 1.0, term)]
    with refused("E-LOSS-TERM", term="mean"):
        readout(*inputs())


def test_a_small_term_survives_bf16(z_term):
    """The gradient without the term is subtracted; what is left has to point along the exact gradient of the term."""
    z_term.weight, targets = 1e-4, torch.arange(256)
    generator = torch.Generator().manual_seed(5)
    hidden_16, weight_16 = (torch.randn(n, 8, generator=generator).bfloat16() for n in (256, 512))

    def gradient(terms):
        readout = Readout(replace(ARCH, vocab_size=512))
        readout.terms = terms
        hidden = hidden_16.clone().requires_grad_()
        readout(hidden, weight_16.clone().requires_grad_(), targets).backward()
        return hidden.grad.double()

    wide = hidden_16.double().requires_grad_()
    (1e-4 * (wide @ weight_16.double().T).logsumexp(-1).square().sum()).backward()
    found = gradient([z_term]) - gradient([])
    assert float((found * wide.grad).sum() / wide.grad.square().sum()) == pytest.approx(1.0, abs=0.3)
