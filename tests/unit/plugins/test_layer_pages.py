"""The examples with settings on the pages about layers and loss terms compute their formulas, and count right."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from ingot.plugins.layers import ATTENTIONS, BLOCKS, FEED_FORWARDS, LAYERS, NORMS
from ingot.plugins.loss import LOSS_TERMS, VocabularyPart
from ingot.plugins.registry import MAIN, Registry, options_of
from ingot.rehearse.proof.ranks import wrong_slope
from ingot.schema.arch import Arch
from ingot.schema.run import Data, RunConfig, Train
from ingot.trainer.model.attention import Attention, AttentionMaskSpec, attend_locally
from ingot.trainer.model.init import initialize
from ingot.trainer.model.layers import rotary_tables
from ingot.trainer.model.transformer import Transformer, TransformerBlock

PAGES = Path(__file__).parents[3] / "docs" / "extend"
ARCH = {"vocab_size": 11, "d_model": 10, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "head_dim": 4, "d_ffn": 7}
OWN = {"feed_forward": "power_relu", "norm": "dynamic_tanh", "attention": "clipped", "block": "sandwich"}
X = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def example():
    """`example(page)` runs the page's example that has settings."""

    def run(page: str) -> None:
        text = (PAGES / f"{page}.md").read_text()
        (code,) = [
            one for one in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if "Options" in one
        ]
        exec(code, {"__name__": "page"})

    yield run
    for registry in Registry.every:
        registry.forget(MAIN)


def random(module):
    """Give every parameter of the module large random values."""
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def test_the_feed_forward(example):
    example("feed_forward")
    part = FEED_FORWARDS["power_relu"]
    module = random(part.make(10, 7, options_of(part, {"power": 3.0})))
    expected = (X @ module.up.weight.T).clamp(min=0) ** 3 @ module.down.weight.T
    torch.testing.assert_close(module(X), expected)


def test_the_norm(example):
    example("norm")
    part = NORMS["dynamic_tanh"]
    module = random(part.make(10, 1e-5, options_of(part, {"scale": 0.8})))
    torch.testing.assert_close(module(X), torch.tanh(0.8 * X) * module.weight + module.bias)


def test_the_attention(example):
    example("attention")
    part, arch = ATTENTIONS["clipped"], Arch(**ARCH)
    module = random(part.make(arch, attend_locally, options_of(part, {"limit": 0.7})))
    plain = Attention(arch, attend_locally)
    plain.load_state_dict(module.state_dict())
    given = rotary_tables(torch.arange(5), 4, 10_000.0), AttentionMaskSpec(torch.arange(5))
    assert not torch.allclose(module(X, *given), plain(X, *given))
    seen = []
    for name in ("q", "k", "v"):
        original = getattr(plain, name)
        clipped = lambda x, original=original: seen.append(original(x)) or original(x).clamp(-0.7, 0.7)  # noqa: E731
        plain.__dict__["_modules"].pop(name)
        object.__setattr__(plain, name, clipped)
    torch.testing.assert_close(module(X, *given), plain(X, *given))
    assert part.saved(arch, None) * 2 * 5 == sum(tensor.numel() for tensor in seen)


def test_the_block(example):
    example("block")
    plain = TransformerBlock(Arch(**ARCH), 0, attend_locally, None)
    block = random(BLOCKS["sandwich"].make(Arch(**ARCH, block="sandwich", options={"sandwich": {"scale": 0.3}}), 0,
                                           attend_locally, None))  # fmt: skip
    weights = block.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    given = rotary_tables(torch.arange(5), 4, 10_000.0), AttentionMaskSpec(torch.arange(5))

    def normed(x, name):
        return F.rms_norm(x, (10,), weights[f"{name}.weight"], 1e-5)

    x = X + 0.3 * normed(plain.attention(normed(X, "attention_norm"), *given), "attention_out_norm")
    x = x + 0.3 * normed(plain.mlp(normed(x, "mlp_norm")), "mlp_out_norm")
    torch.testing.assert_close(block(X, *given), x)


def test_a_model_of_all_examples_is_what_it_declares(example):
    for page in OWN:
        example(page)
    arch = Arch(**ARCH, **OWN, options={"clipped": {"limit": 2.0}})
    assert all(name in LAYERS[key] for key, name in OWN.items())
    model = Transformer(arch)
    initialize(model, arch, 1)
    nats = model(torch.arange(5)[None], torch.arange(5)[None]) / 5
    assert nats.item() == pytest.approx(math.log(11), rel=0.1)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_loss_term(example, power):
    example("loss")
    part, logits, targets = LOSS_TERMS["poly"], 2 * X[0], torch.tensor([0, 9, 4, 5, 2])
    whole = VocabularyPart(0, torch.clone, torch.clone)
    values, slope = part.term(logits, targets, whole, options_of(part, {"power": power}))
    logits = logits.clone().requires_grad_()
    expected = (1 - logits.softmax(-1)[torch.arange(5), targets]) ** power
    expected.sum().backward()
    torch.testing.assert_close(values, expected.detach())
    torch.testing.assert_close(slope, logits.grad)
    train = Train(steps=1, seq_len=4, global_batch=1, micro_batch=1)
    loss = {"poly": {"weight": 1.0, "power": power}}
    assert wrong_slope(RunConfig(name="x", model=Arch(**ARCH), data=Data(tokens=""), train=train, loss=loss)) == ""


def test_the_loss_term_over_parts_of_the_vocabulary(example):
    """Two parts, with the sums and the largest values that ranks would exchange, in the order of the calls."""
    example("loss")
    part, logits, targets = LOSS_TERMS["poly"], 2 * X[0], torch.tensor([0, 9, 4, 5, 2])
    options = options_of(part, {"power": 2})
    values, slope = part.term(logits, targets, VocabularyPart(0, torch.clone, torch.clone), options)
    known = []
    for last in range(4):  # the results of the first calls are known; the next one is completed
        mine = [collect(part, logits[:, columns], targets, columns.start, known, options) for columns in HALVES]
        if last < 3:
            known.append(torch.maximum(*(m[0][last] for m in mine)) if last == 0 else sum(m[0][last] for m in mine))
    torch.testing.assert_close(mine[0][1], values)
    torch.testing.assert_close(mine[1][1], values)
    torch.testing.assert_close(torch.cat([m[2] for m in mine], 1), slope)


HALVES = (slice(0, 4), slice(4, 10))


def collect(part, logits, targets, first, known, options):
    asked = []

    def exchange(own):
        asked.append(own)
        return known[len(asked) - 1] if len(asked) <= len(known) else own

    return asked, *part.term(logits, targets, VocabularyPart(first, exchange, exchange), options)
