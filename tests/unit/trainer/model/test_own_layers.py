"""Layers that a model chooses: the examples and GELU beside plain torch, and layers that are not what they declare."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.expect import refused
from torch import nn
from torch.nn import functional as F

from ingot.plugins.layers import (
    ATTENTIONS,
    BLOCKS,
    FEED_FORWARDS,
    NORMS,
    AttentionPart,
    BlockPart,
    FeedForwardPart,
    NormPart,
)
from ingot.plugins.registry import MAIN, Registry
from ingot.schema.arch import Arch, Moe
from ingot.trainer.model.attention import Attention, AttentionMaskSpec, attend_locally
from ingot.trainer.model.experts import LocalDispatch
from ingot.trainer.model.init import initial_value
from ingot.trainer.model.layers import rotary_tables
from ingot.trainer.model.transformer import Transformer, TransformerBlock, sharding_of
from ingot.trainer.parallel.tensor import cut_tensors

EXAMPLES = Path(__file__).parents[4] / "examples" / "extend"
ARCH = Arch(vocab_size=11, d_model=10, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=4, d_ffn=7)
OWN = {"feed_forward": "squared_relu", "norm": "layer", "attention": "gated", "block": "parallel"}
X = torch.randn(2, 5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
GIVEN = rotary_tables(torch.arange(5), 4, 10_000.0), AttentionMaskSpec(torch.arange(5))


@pytest.fixture(autouse=True)
def examples():
    for name in ("squared_relu", "layer_norm", "gated_attention", "parallel_block"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    yield
    for registry in Registry.every:
        registry.forget(MAIN)


def block_of(arch, layer=0):
    """A block of a model with large random weights, in float64."""
    block, generator = Transformer(arch).double().get_submodule(f"blocks.{layer}"), torch.Generator().manual_seed(2)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 3
    return block, block.state_dict()


@pytest.mark.parametrize(
    ("name", "function"), [("gelu", F.gelu), ("squared_relu", lambda x: torch.where(x > 0, x * x, 0.0))]
)
def test_a_feed_forward_without_gate(name, function):
    block, w = block_of(replace(ARCH, feed_forward=name))
    assert [n for n in w if n.startswith("mlp.")] == ["mlp.up.weight", "mlp.down.weight"]
    expected = function(X @ w["mlp.up.weight"].T) @ w["mlp.down.weight"].T
    torch.testing.assert_close(block.mlp(X), expected)


def test_the_layer_norm():
    block, w = block_of(replace(ARCH, norm="layer"))
    centered = X - X.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + ARCH.norm_eps).sqrt()
    expected = normed * w["mlp_norm.weight"] + w["mlp_norm.bias"]
    torch.testing.assert_close(block.mlp_norm(X), expected)


def test_a_norm_begins_as_the_identity_of_normed_vectors():
    arch = replace(ARCH, norm="layer")
    for name, parameter in Transformer(arch).named_parameters():
        if parameter.dim() == 1:
            expected = 0.0 if name.endswith("bias") else 1.0
            assert (initial_value(name, parameter.shape, arch, 1) == expected).all(), name
            assert (initial_value(name, (10,), arch, 1, (4,), (3,)) == expected).all(), name


def test_the_gated_attention():
    block, w = block_of(replace(ARCH, attention="gated"))
    plain = Attention(ARCH, attend_locally).double()
    plain.load_state_dict({n: w[f"attention.{n}"] for n in plain.state_dict()})
    attended = []
    plain.o.register_forward_pre_hook(lambda _, args: attended.append(args[0]))
    plain(X, *GIVEN)
    gate = (X @ w["attention.gate.weight"].T).sigmoid()
    expected = (attended[0] * gate) @ w["attention.o.weight"].T
    torch.testing.assert_close(block.attention(X, *GIVEN), expected)


@pytest.mark.parametrize("experts", [False, True])
def test_the_parallel_block(experts):
    moe = Moe(num_experts=3, top_k=2, d_expert=5) if experts else Moe()
    block, w = block_of(replace(ARCH, block="parallel", moe=moe))
    normed = F.rms_norm(X, (10,), w["attention_norm.weight"], ARCH.norm_eps)
    fed = block.moe(normed, torch.arange(5)) if experts else block.mlp(normed)
    torch.testing.assert_close(block(X, *GIVEN), X + block.attention(normed, *GIVEN) + fed)
    assert "mlp_norm.weight" not in w


class Biased(nn.Linear):
    def __init__(self, d_model, d_ffn, options):
        super().__init__(d_model, d_ffn)


class WithScale(nn.Module):
    """A norm with a parameter that is neither `weight` nor `bias`."""

    def __init__(self, dim, eps, options):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))


class SecondNorm(TransformerBlock):
    def __init__(self, arch, layer, attend, dispatch):
        super().__init__(arch, layer, attend, dispatch)
        self.last_norm = nn.LayerNorm(arch.d_model, bias=False)


def extra_gate(arch, attend, options):
    attention = Attention(arch, attend)
    attention.add_module("gate", nn.Linear(arch.d_model, 4, bias=False))
    return attention


WRONG = {
    "feed_forward": FeedForwardPart(name="odd", make=Biased, sharding={}, matrices=1, saved=1),
    "norm": NormPart(name="odd", make=lambda dim, eps, options: nn.LayerNorm(dim), vectors=1),
    "attention": AttentionPart(name="odd", make=extra_gate),
    "block": BlockPart(name="odd", make=SecondNorm),
}
COUNTS = {"feed_forward": (77, 70), "norm": (20, 10), "attention": (360, 320), "block": (30, 20)}


@pytest.mark.parametrize("key", WRONG)
@pytest.mark.parametrize("others", [{}, OWN], ids=["built-in", "plug-ins"])
def test_a_layer_with_other_parameters_than_it_declares_is_named(key, others):
    registry = {"feed_forward": FEED_FORWARDS, "norm": NORMS, "attention": ATTENTIONS, "block": BLOCKS}[key]
    registry.register(WRONG[key])
    found, declared = COUNTS[key]
    if others and key == "block":  # its three norms are LayerNorms but the last
        found, declared = 2 * 10 * 2 + 10, 2 * 10 * 2
    with refused("E-LAYER-COUNTS", key=f"model.{key}", found=found, declared=declared):
        Transformer(replace(ARCH, **others | {key: "odd"}))


def test_experts_beside_a_wrong_block_are_checked_too():
    BLOCKS.register(WRONG["block"])
    with refused("E-LAYER-COUNTS", key="model.block"):
        Transformer(replace(ARCH, block="odd", moe=Moe(num_experts=3, top_k=2, d_expert=5)), dispatch=LocalDispatch())


@pytest.mark.parametrize(
    ("key", "part", "parameter"),
    [
        (
            "feed_forward",
            FeedForwardPart(
                name="odd",
                make="ingot.trainer.model.layers:gelu",
                sharding={"up.weight": "column"},
                matrices=2,
                saved=2,
            ),
            "blocks.0.mlp.down.weight",
        ),
        ("norm", NormPart(name="odd", make=WithScale), "blocks.0.attention_norm.scale"),
        (
            "attention",
            AttentionPart(name="odd", make=extra_gate, matrices=lambda arch, options: [(4, arch.d_model)]),
            "blocks.0.attention.gate.weight",
        ),
        (
            "block",  # it declares three norms, and calls one of them by another name
            BlockPart(name="odd", make=SecondNorm, norms=("attention_norm", "mlp_norm", "third")),
            "blocks.0.last_norm.weight",
        ),
    ],
)
def test_a_parameter_without_a_role_is_named(key, part, parameter):
    {"feed_forward": FEED_FORWARDS, "norm": NORMS, "attention": ATTENTIONS, "block": BLOCKS}[key].register(part)
    arch = replace(ARCH, **{key: "odd"})
    with refused("E-LAYER-SHARDING", parameter=parameter):
        cut_tensors(Transformer(arch), sharding_of(arch), None)
