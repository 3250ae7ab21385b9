"""Attention with documents and windows against a plain softmax: tile by tile, packed for CUDA, and with a cache."""

import math
from dataclasses import fields
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.schema.arch import Arch
from ingot.trainer.attend import packed, tiled, tiles
from ingot.trainer.attend.packed import PackedDocuments, activate_newest_kernels
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


# Sizes of tiles (attend/tiles.py): as they are, and so small that 20 tokens have tiles of every kind.
SIZES = {"whole": (128, 64, 2**23), "rows": (4, 3, 2**23), "single": (1, 1, 1)}


@pytest.fixture
def sizes(monkeypatch):
    def limit(name):
        for constant, size in zip(("SHARED_TOKENS", "LEAST_ROWS", "MASK_ELEMENTS"), SIZES[name], strict=True):
            monkeypatch.setattr(tiles, constant, size)

    return limit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("queries", [20, 6, 1])
@pytest.mark.parametrize("window", [0, 1, 5, 19, 40])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_equals_a_plain_softmax(sizes, documents, window, queries, size):
    sizes(size)
    q, k, v = example(20, queries)
    positions = torch.arange(20 - queries, 20)
    expected = by_softmax(q, k, v, positions, documents, window)
    found = attend_locally(q, k, v, AttentionMaskSpec(positions, documents, window))
    assert (found - expected).abs().max() < 1e-14
    grad = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(3))
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)), strict=True):
        assert (ours - theirs).abs().max() < 1e-13


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("window", [0, 300])
def test_no_tensor_has_as_many_elements_as_pairs(window):
    """Documents that share tiles, long documents, and a window inside of these; forward and backward."""
    tokens, heads, width = 2048, 2, 8
    starts = torch.zeros(2, tokens, dtype=torch.int32)
    starts[0, 40:400:40], starts[0, 1000], starts[1, 5] = 1, 1, 1
    spec = AttentionMaskSpec(torch.arange(tokens), starts.cumsum(1).int(), window)
    q, k, v = (torch.randn(2, n, tokens, width, requires_grad=True) for n in (heads, 1, 1))
    with LargestTensor() as largest:
        attend_locally(q, k, v, spec).sum().backward()
    # One more than a tile of a window has, and a 64th of the pairs of one sequence.
    assert largest.elements <= max(q.numel(), 64 * (64 + 300)) <= tokens**2 / 64


def model_of(attend=attend_locally, **changes):
    arch = Arch(**{**{name: getattr(ARCH, name) for name in (f.name for f in fields(ARCH))}, **changes})
    model = Transformer(arch, attend).double()
    initialize(model, arch, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that who sees whom matters to the result
    return arch, model


@pytest.fixture
def ids():
    return torch.randint(0, 31, (2, 20), generator=torch.Generator().manual_seed(4))


def test_one_plan_serves_all_layers(monkeypatch, ids):
    made = []
    plan = attention.plan_tiles
    monkeypatch.setattr(attention, "plan_tiles", lambda *args, **form: made.append(1) or plan(*args, **form))
    _, model = model_of()
    model(ids, ids, DOCUMENTS).backward()
    assert len(made) == 1


def test_a_causal_model_makes_none(monkeypatch, ids):
    monkeypatch.setattr(attention, "plan_tiles", None)
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


def gradients(model, ids, documents=DOCUMENTS):
    model.zero_grad()
    loss = model(ids, ids, documents)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("size", ["whole", "rows"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_blocks_keep_their_bits(sizes, ids, how, size):
    sizes(size)
    plain, repeated = model_of()[1], model_of()[1]
    recompute(repeated.blocks, how, 1)
    for ours, theirs in zip(gradients(repeated, ids), gradients(plain, ids), strict=True):
        assert torch.equal(ours, theirs)


def test_selective_recompute_does_not_run_tiles_again(sizes, monkeypatch, ids):
    sizes("rows")
    kernel, calls = tiled.attend_part, []
    monkeypatch.setattr(tiled, "attend_part", lambda *args, **form: calls.append(kernel(*args, **form)) or calls[-1])
    _, model = model_of()
    recompute(model.blocks, "selective", 1)
    model(ids, ids, DOCUMENTS).backward()
    half = len(calls) // 2
    for first, again in zip(calls[:half], [calls[half + i] for i in range(half)], strict=True):
        assert first[0].shape == again[0].shape
    kept = {x.untyped_storage().data_ptr() for results in calls[:half] for x in results}
    assert all(x.untyped_storage().data_ptr() in kept for results in calls[half:] for x in results)


def compiled(monkeypatch, model, graphs, **form):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compile_once = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_once(f, backend=backend))
    compile_blocks(model, whole_readout=False, **form)
    return model


def test_compiled_blocks_do_not_see_tiles(monkeypatch, ids):
    """They would be compiled again for every batch: the parts of a block before and after them serve all batches."""
    graphs, counts, hidden = [], [], torch.compiler.disable(attend_locally)
    one, other = model_of()[1], model_of(attend=hidden)[1]
    compiled(monkeypatch, other, graphs, whole_attention=False)
    assert other.makes_plan
    for documents in (DOCUMENTS, DOCUMENTS.flip(0), torch.zeros_like(DOCUMENTS)):
        for ours, theirs in zip(gradients(other, ids, documents), gradients(one, ids, documents), strict=True):
            assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max()
        counts.append(len(graphs))
    assert 2 <= counts[0] == counts[-1] <= 4


# -- CUDA, with a kernel of the same form --


def by_documents(q, k, v, starts, starts_of_keys, longest, longest_of_keys, dropout, causal, debug, **limits):
    """The arguments of the kernel for packed documents, followed document by document."""
    assert starts is starts_of_keys and starts.dtype == torch.int32 and not debug and dropout == 0.0
    window = limits["window_size_left"] + 1 if limits else 0
    assert causal == (not window) and (not limits or limits["window_size_right"] == 0)
    bounds = starts.tolist()
    assert longest == longest_of_keys == max(end - start for start, end in pairwise(bounds))
    assert bounds[0] == 0 and bounds[-1] == len(q) and q.shape[1] > k.shape[1]  # grouped heads are not repeated
    made = []
    for start, end in pairwise(bounds):
        part = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
        made.append(by_softmax(*part, torch.arange(end - start), None, window)[0].transpose(0, 1))
    return torch.cat(made), None


@pytest.fixture
def packing(monkeypatch):
    """Attention as on CUDA in 16 bits, in float64."""
    monkeypatch.setattr(attention, "has_packed_kernel", lambda *_: True)
    monkeypatch.setattr(packed, "_kernels", SimpleNamespace(packed=by_documents))


@pytest.mark.parametrize(
    ("documents", "window"), [(None, 1), (None, 5), *((DOCUMENTS, window) for window in (0, 1, 5, 40))]
)
def test_packed_documents_equal_a_plain_softmax(packing, documents, window):
    q, k, v = example(20)
    spec = AttentionMaskSpec(torch.arange(20), documents, window)
    assert isinstance(spec.planned(20, q, 8).plan, PackedDocuments)
    found, expected = attend_locally(q, k, v, spec), by_softmax(q, k, v, spec.positions_T, documents, window)
    assert (found - expected).abs().max() < 1e-14
    for ours, theirs in zip(*(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (found, expected)), strict=True):
        assert (ours - theirs).abs().max() < 1e-13


@library.custom_op("reference::packed", mutates_args=())
def packed_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, left: int
) -> torch.Tensor:
    limits = {"window_size_left": left, "window_size_right": 0} if left >= 0 else {}
    return by_documents(q, k, v, starts, starts, longest, longest, 0.0, left < 0, False, **limits)[0]


@packed_operator.register_fake
def _(q, k, v, starts, longest, left):
    return torch.empty_like(q)


def as_operator(q, k, v, starts, _, longest, *rest, **limits):
    return packed_operator(q, k, v, starts, longest, limits.get("window_size_left", -1)), None


def test_two_graphs_serve_all_packed_documents(packing, monkeypatch, ids):
    """The first is for one batch, the second for any number of documents and any length of the longest."""
    monkeypatch.setattr(packed, "_kernels", SimpleNamespace(packed=as_operator))
    graphs, plain = [], model_of(num_layers=2)[1]
    other = compiled(monkeypatch, model_of(num_layers=2)[1], graphs)
    with torch.no_grad():
        for length in (3, 7, 5, 10, 4, 6):
            documents = torch.arange(20, dtype=torch.int32).div(length, rounding_mode="floor").expand(2, -1)
            loss = plain(ids, ids, documents)
            assert (other(ids, ids, documents) - loss).abs() < 1e-12 * loss.abs()
    assert len(graphs) <= 2


def test_the_kernel_of_cuda_takes_what_it_is_given():
    """PyTorch's own description of the operator, forward and backward, on tensors without memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(2, n, 20, 8, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
        for window in (0, 5):
            documents = packed.pack([[7, 9, 20], [20]], batch=2, tokens=20, window=window, device=q.device)
            out = packed.attend_packed(q, k, v, documents)
            assert out.shape == q.shape
            out.sum().backward()
            assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_where_the_packed_kernel_runs():
    bf16 = torch.bfloat16
    assert packed.has_packed_kernel(True, bf16, 256) and packed.has_packed_kernel(True, torch.float16, 8)
    for refused in ((False, bf16, 64), (True, torch.float32, 64), (True, bf16, 264), (True, bf16, 84)):
        assert not packed.has_packed_kernel(*refused)


@pytest.mark.parametrize(
    "installed, capability, head_dim, expected",
    [
        (("flash_attn_interface",), 9, 256, "FA3"),
        (("flash_attn_interface",), 8, 64, None),
        (("flash_attn_interface", "flash_attn.cute"), 10, 128, "FA4"),
        (("flash_attn_interface", "flash_attn.cute"), 10, 192, None),
        ((), 9, 64, None),
    ],
)
def test_newer_kernels_are_activated_where_they_are_installed(monkeypatch, installed, capability, head_dim, expected):
    activated = []
    monkeypatch.setattr(packed, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert activate_newest_kernels(capability, head_dim) == expected
    assert activated == ([expected] if expected else [])
