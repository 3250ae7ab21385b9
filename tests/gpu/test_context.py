"""CUDA kernels of rings: places of a ring played one after the other on one device, against attention in one piece."""

from typing import Any

import pytest
import torch

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions
from ingot.trainer.model.attention import AttentionMaskSpec, attend_locally
from ingot.trainer.parallel.flash import attend_part, attend_part_backward
from ingot.trainer.parallel.ring import masked_tiles, merge, plain_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS, TOKENS, BATCH, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 2, 8, 2, 64


def places(parallel):
    for place in range(RANKS):
        parts = ring_positions(parallel, place, TOKENS)
        yield torch.cat([torch.arange(p.start, p.stop, p.step, device="cuda") for p in parts])


def in_a_ring(parallel, sight, q, k, v, grad, masked):
    """Results and gradients of queries, keys and values, all places together."""
    positions, window, part = list(places(parallel)), sight.window, TOKENS // RANKS
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, q, k, v))
    for own, here in enumerate(positions):
        rows = q[:, :, here]
        total, lse = torch.zeros_like(rows, dtype=torch.float32), torch.full(rows.shape[:3], -torch.inf, device="cuda")
        tiles = []
        for source in ((own - step) % RANKS for step in range(RANKS)):
            plain = plain_tiles(parallel, own, source, part)
            some = masked_tiles(parallel, own, source, part, window=window, batch=BATCH, limit=5000)
            tiles += [(tile, positions[source][tile.keys]) for tile in (some if masked else plain)]
        seen = [sight.mask(here[t.queries], keys) if t.masked else None for t, keys in tiles]
        for (tile, keys), mask in zip(tiles, seen, strict=True):
            made = attend_part(rows[:, :, tile.queries], k[:, :, keys], v[:, :, keys], causal=tile.causal, mask=mask)
            merge(total[:, :, tile.queries], lse[:, :, tile.queries], *made)
        out[:, :, here] = total
        whole = total.to(q.dtype)
        for (tile, keys), mask in zip(tiles, seen, strict=True):
            asked = here[tile.queries]
            queries, result, normalizers = (x[:, :, tile.queries] for x in (rows, whole, lse))
            own_grad, own_k, own_v = grad[:, :, asked], k[:, :, keys], v[:, :, keys]
            more = attend_part_backward(
                own_grad, queries, result, normalizers, own_k, own_v, causal=tile.causal, mask=mask
            )
            for total_grad, added, at in zip((dq, dk, dv), more, (asked, keys, keys), strict=True):
                total_grad[:, :, at] += added
    return out, dq, dk, dv


@pytest.mark.parametrize("what", ["causal", "documents", "window"])
@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_kernels_of_a_ring_equal_attention_in_one_piece(layout: Any, dtype, allowed, what):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(BATCH, heads, TOKENS, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes)
    documents = (torch.rand(BATCH, TOKENS, device="cuda", generator=generator) < 0.05).cumsum(-1)
    sight = AttentionMaskSpec(
        torch.arange(TOKENS, device="cuda"), documents if what == "documents" else None, 50 if what == "window" else 0
    )
    leaves = q, k, v = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = attend_locally(q, k, v, sight)
    expected = [whole, *torch.autograd.grad(whole, leaves, grad)]
    parallel = Parallel(cp=RANKS, ulysses=1, context_layout=layout)
    with torch.no_grad():
        found = in_a_ring(parallel, sight, q, k, v, grad, what != "causal")
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < allowed
