"""Context parallelism against attention of whole sequences in one process: rings, Ulysses and grids of both."""

from itertools import product

import pytest
import torch

from ingot.dist.mesh import build_mesh
from ingot.model.attention import Sight, attend_locally
from ingot.parallel.context import Context
from ingot.schema.parallel import Parallel

LAYOUTS = ("zigzag", "striped", "contiguous")
HEADS, HEAD_DIM, BATCH, TOKENS = 12, 8, 2, 48


def documents_of(rows, tokens, seed):
    """Numbers of documents of random lengths."""
    starts = torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) < 0.15
    return starts.cumsum(-1).int()


def sight_of(what, positions, tokens):
    documents = documents_of(BATCH, tokens, 7) if "documents" in what else None
    return Sight(positions, documents, 11 if "window" in what else 0)


def example(kv_heads, dtype, tokens=TOKENS):
    """Queries, keys, values and a gradient of results."""
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(BATCH, heads, tokens, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def run(attend, tensors, sight):
    """Results, and gradients of queries, keys and values."""
    q, k, v, grad = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, sight)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def in_one_process(kv_heads, what, dtype=torch.float64, tokens=TOKENS):
    return run(attend_locally, example(kv_heads, dtype, tokens), sight_of(what, torch.arange(tokens), tokens))


def own_part(context, x_BNTH):
    return x_BNTH.index_select(2, context.positions(x_BNTH.shape[2], x_BNTH.device))


def in_parts(parallel, kv_heads, what, dtype=torch.float64, tokens=TOKENS):
    """This rank's part of the same."""
    context = Context(build_mesh(parallel, "cpu"), attend_locally)
    tensors = [own_part(context, x) for x in example(kv_heads, dtype, tokens)]
    return context, run(context.attend, tensors, sight_of(what, context.positions(tokens, torch.device("cpu")), tokens))


def grids(world):
    """Every form over so many ranks whose degree divides the heads."""
    for ulysses in (u for u in range(1, world + 1) if world % u == 0 and HEADS % u == 0):
        yield Parallel(cp=world, context="usp", ulysses=ulysses)
        if ulysses < world:
            for layout in LAYOUTS[1:]:
                yield Parallel(cp=world, context="usp", ulysses=ulysses, context_layout=layout)


SIGHTS = ("causal", "documents", "window", "documents and window")


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_form_equals_one_process(fork_ranks, world):
    cases = list(product(grids(world), (12, 6, 2, 1), SIGHTS))

    def check(rank, ranks):
        worst, meshes = 0.0, {}
        for parallel, kv_heads, what in cases:
            if parallel not in meshes:
                meshes[parallel] = Context(build_mesh(parallel, "cpu"), attend_locally)
            context = meshes[parallel]
            tensors = [own_part(context, x) for x in example(kv_heads, torch.float64)]
            sight = sight_of(what, context.positions(TOKENS, torch.device("cpu")), TOKENS)
            found, expected = run(context.attend, tensors, sight), in_one_process(kv_heads, what)
            for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
                error = (ours - own_part(context, theirs)).abs().max() / theirs.abs().max()
                assert error <= 1e-13, f"{parallel} {kv_heads} kv heads, {what}: {name} {error}"
                worst = max(worst, float(error))
        return worst

    print(fork_ranks(check, world))
