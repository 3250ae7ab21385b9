"""Attention masks: documents and windows against a plain softmax, in one piece and in chunks, and with a cache."""

import math
from dataclasses import fields

import pytest
import torch

from ingot.schema.arch import Arch
from ingot.trainer.model import attention
from ingot.trainer.model.attention import AttentionMaskSpec, attend_locally
from ingot.trainer.model.generate import KVCache
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.parallel.apply import compile_blocks
from ingot.trainer.parallel.recompute import recompute

ARCH = Arch(
    vocab_size=31, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, d_ffn=24, sliding_window=5
)
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 2 + [2] * 11, [0] * 20])


def example(tokens, queries=None):
    generator = torch.Generator().manual_seed(2)
    shapes = (2, 4, queries or tokens, 8), (2, 2, tokens, 8), (2, 2, tokens, 8)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


def by_softmax(q, k, v, positions, documents, window):
    """Token by token, as the words say it."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    rows = []
    for i, position in enumerate(positions.tolist()):
        out = []
        for b in range(len(q)):
            first = max(position - window + 1, 0) if window else 0
            seen = [
                s for s in range(first, position + 1) if documents is None or documents[b, s] == documents[b, position]
            ]
            scores = (q[b, :, i, None] * k[b][:, seen]).sum(-1) / math.sqrt(q.shape[-1])
            out.append((scores.softmax(-1)[..., None] * v[b][:, seen]).sum(1))
        rows.append(torch.stack(out))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("elements", [2**26, 100, 1])
@pytest.mark.parametrize("queries", [20, 6, 1])
@pytest.mark.parametrize("window", [0, 1, 5, 19, 40])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_equals_a_plain_softmax(monkeypatch, documents, window, queries, elements):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    q, k, v = example(20, queries)
    positions = torch.arange(20 - queries, 20)
    expected = by_softmax(q, k, v, positions, documents, window)
    found = attend_locally(q, k, v, AttentionMaskSpec(positions, documents, window))
    assert (found - expected).abs().max() < 1e-14
    grad = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(3))
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)), strict=True):
        assert (ours - theirs).abs().max() < 1e-13


def test_no_mask_is_larger_than_the_limit(monkeypatch):
    made = []

    def watched(seen, dtype):
        made.append(seen.numel())
        return bias(seen, dtype)

    bias = attention._bias
    monkeypatch.setattr(attention, "_bias", watched)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 200)
    q, k, v = example(20)
    attend_locally(q, k, v, AttentionMaskSpec(torch.arange(20), DOCUMENTS)).sum().backward()
    assert max(made) <= 200 and len(made) == 2 * 4  # 5 rows of 2 x 20 at a time; again in the backward


def model_of(**changes):
    arch = Arch(**{**{name: getattr(ARCH, name) for name in (f.name for f in fields(ARCH))}, **changes})
    model = Transformer(arch).double()
    initialize(model, arch, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that who sees whom matters to the result
    return arch, model


@pytest.fixture
def ids():
    return torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(4))


def test_one_mask_serves_all_layers(monkeypatch, ids):
    made = []
    mask = attention._mask
    monkeypatch.setattr(attention, "_mask", lambda *arguments: made.append(1) or mask(*arguments))
    _, model = model_of()
    model(ids, ids, DOCUMENTS).backward()
    assert len(made) == 1


def test_a_causal_model_makes_none(monkeypatch, ids):
    monkeypatch.setattr(attention, "_mask", None)
    _, model = model_of(sliding_window=0)
    model(ids, ids).backward()


def test_a_token_of_a_window_sees_no_further_back(ids):
    _, model = model_of(num_layers=1)
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1) % 31
    with torch.no_grad():
        moved = (model(ids) - model(other)).abs().amax((0, 2)) > 0
    assert moved.tolist() == [3 <= position < 3 + 5 for position in range(20)]


@pytest.mark.parametrize("pieces", [(20,), (1,) * 20, (7, 1, 1, 11), (2, 18)])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_window_with_a_cache_equals_one_without(ids, window, pieces):
    arch, model = model_of(sliding_window=window)
    cache = KVCache(arch, 20)
    with torch.no_grad():
        whole = model(ids)
        parts = torch.cat([model(part, cache=cache) for part in ids.split(pieces, dim=1)], dim=1)
    assert (parts - whole).abs().max() / whole.abs().max() < 1e-13


def gradients(model, ids):
    loss = model(ids, ids, DOCUMENTS)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("elements", [2**26, 200])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_blocks_keep_their_bits(monkeypatch, ids, how, elements):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    plain, repeated = model_of()[1], model_of()[1]
    recompute(repeated.blocks, how, 1)
    for ours, theirs in zip(gradients(repeated, ids), gradients(plain, ids), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("elements", [2**26, 200])
def test_compiled_blocks_share_one_graph_and_the_mask(monkeypatch, ids, elements):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", elements)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    plain, compiled = model_of()[1], model_of()[1]
    torch._dynamo.reset()
    compile_once = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_once(f, backend=backend))
    compile_blocks(compiled, whole_readout=False)
    for ours, theirs in zip(gradients(compiled, ids), gradients(plain, ids), strict=True):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
    assert len(graphs) == 1
