import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ingot.schema.arch import Arch
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.recompute import recompute
from ingot.trainer.parallel.split_backward import SplitBackward, WeightGradients, split_linears

ARCH = Arch(
    vocab_size=19,
    d_model=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ffn=24,
    qk_norm=True,
    tied_embeddings=False,
)
IDS = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(0))


def pair(dtype):
    """The same model twice; the second one can defer."""
    plain = Transformer(ARCH)
    initialize(plain, ARCH, 1)
    plain.to(dtype)
    split = copy.deepcopy(plain)
    split.deferred = SplitBackward()
    split_linears(split, split.deferred)
    return plain, split


def input_half(model, ids=IDS):
    left = WeightGradients(model.deferred)
    with left:
        loss = model(ids[:, :-1], ids[:, 1:])
    with left:
        loss.backward()
    return left


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(ours, theirs):
    """Largest difference relative to the largest value, over all tensors."""
    assert ours.keys() == theirs.keys()
    return max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)


def test_without_a_queue_it_is_the_ordinary_product():
    x = torch.randn(2, 3, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    ours, theirs = SplitBackward().linear(x, weight), F.linear(x, weight)
    assert torch.equal(ours, theirs) and type(ours.grad_fn) is type(theirs.grad_fn)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_two_halves_are_the_whole(dtype, tolerance):
    plain, split = pair(dtype)
    plain(IDS[:, :-1], IDS[:, 1:]).backward()
    left = input_half(split)
    linears = {f"{n}.weight" for n, m in split.named_modules() if isinstance(m, nn.Linear)} - {"head.weight"}
    assert len(left) == len(linears) == 7 * ARCH.num_layers
    assert gradients(split).keys() == dict(plain.named_parameters()).keys() - linears
    left.compute()
    assert len(left) == 0
    assert worst(gradients(split), gradients(plain)) < tolerance


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_blocks_defer_as_well(how):
    plain, split = pair(torch.float64)
    recompute(split.blocks, how, 2)
    plain(IDS[:, :-1], IDS[:, 1:]).backward()
    left = input_half(split)
    assert len(left) == 7 * ARCH.num_layers
    left.compute()
    assert worst(gradients(split), gradients(plain)) < 1e-12


def test_micro_batches_may_be_finished_in_any_order():
    plain, split = pair(torch.float64)
    batches = [(IDS + shift) % 19 for shift in range(3)]
    for ids in batches:
        plain(ids[:, :-1], ids[:, 1:]).backward()
    left = [input_half(split, ids) for ids in batches]
    for queue in (left[1], left[2], left[0]):
        queue.compute()
    assert worst(gradients(split), gradients(plain)) < 1e-12


def test_hooks_see_a_weights_gradient_once_and_in_the_second_half():
    _, split = pair(torch.float64)
    seen = []
    for name, parameter in split.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append(("before", name)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(("after", name)))
    left = input_half(split)
    first = {name for _, name in seen}
    assert "blocks.0.attention_norm.weight" in first and "blocks.0.mlp.gate.weight" not in first
    left.compute()
    assert sorted(seen) == sorted((when, n) for n, _ in split.named_parameters() for when in ("before", "after"))


def test_a_weight_may_be_made_from_a_leaf():
    whole = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def product(multiply):
        # `*` frees what it saved when autograd passes it once
        return multiply(multiply(x, (whole * scale)[:4]), whole[2:6]).square().sum()

    expected = torch.autograd.grad(product(F.linear), (whole, scale, x))
    split = SplitBackward()
    left = WeightGradients(split)
    with left:
        loss = product(split.linear)
    loss.backward()
    assert whole.grad is None and scale.grad is None and len(left) == 2
    left.compute()
    for leaf, gradient in zip((whole, scale, x), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


def test_what_has_no_first_half_is_done_at_once():
    data = torch.randn(3, 4)
    bare, biased = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
    split = SplitBackward()
    split_linears(nn.Sequential(bare, biased), split)
    left = WeightGradients(split)
    with left:
        y = biased(bare(data))
    y.sum().backward()
    assert len(left) == 0
    assert bare.weight.grad is not None and biased.weight.grad is not None
    with left, torch.no_grad():
        assert not split.linear(data.requires_grad_(), bare.weight).requires_grad


def test_what_the_second_half_needs_is_let_go():
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)
    split = SplitBackward()
    left = WeightGradients(split)
    with left:
        h = split.linear(x, weight)
        y = split.linear(h, weight)
    y.sum().backward()
    gone = weakref.ref(h)
    del h, y
    assert gone() is not None
    left.compute()
    assert gone() is None
