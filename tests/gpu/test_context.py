"""CUDA kernels: places of a ring played one after the other on one device, and packed documents, both against attention
with a mask of all pairs in float64."""

from typing import Any

import pytest
import torch

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions
from ingot.trainer.attend import tiles
from ingot.trainer.attend.documents import ends_of
from ingot.trainer.attend.kernels import attend_part, attend_part_backward
from ingot.trainer.attend.packed import PackedDocuments
from ingot.trainer.attend.tiled import TileBiases
from ingot.trainer.model.attention import AttentionMaskSpec, attend_locally
from ingot.trainer.parallel.ring import merge, plain_tiles, ring_tiles

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS, TOKENS, BATCH, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 2, 8, 2, 64


def places(parallel):
    for place in range(RANKS):
        parts = ring_positions(parallel, place, TOKENS)
        yield torch.cat([torch.arange(p.start, p.stop, p.step, device="cuda") for p in parts])


def in_a_ring(parallel, sight, q, k, v, grad, masked):
    """Results and gradients of queries, keys and values, all places together."""
    positions, part = list(places(parallel)), TOKENS // RANKS
    ids = sight.document_ids_BS
    form = {"ends": None if ids is None else ends_of(ids), "window": sight.window, "batch": BATCH}
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, q, k, v))
    for own, here in enumerate(positions):
        rows = q[:, :, here]
        total, lse = torch.zeros_like(rows, dtype=torch.float32), torch.full(rows.shape[:3], -torch.inf, device="cuda")
        laid_out = []
        for source in ((own - step) % RANKS for step in range(RANKS)):
            found = plain_tiles(parallel, own, source, part)
            if masked:
                found = ring_tiles(parallel, own, source, part, **form)
            numbers = [None if ids is None else ids.cuda()[:, positions[place]] for place in (own, source)]
            biases = TileBiases(*numbers, q.dtype, q.device)
            laid_out += [(tile, positions[source][tile.keys], biases.of(tile)) for tile in found]
        for tile, keys, bias in laid_out:
            of, at = tile.rows, tile.queries
            parts = rows[of, :, at], k[of][:, :, keys], v[of][:, :, keys]
            made = attend_part(*parts, causal=tile.causal, bias=bias, without_keys=tile.documents)
            merge(total[of, :, at], lse[of, :, at], *made)
        out[:, :, here] = total
        whole = total.to(q.dtype)
        for tile, keys, bias in laid_out:
            of, asked = tile.rows, here[tile.queries]
            queries, result, normalizers = (x[of, :, tile.queries] for x in (rows, whole, lse))
            own_grad, own_k, own_v = grad[of][:, :, asked], k[of][:, :, keys], v[of][:, :, keys]
            more = attend_part_backward(
                own_grad, queries, result, normalizers, own_k, own_v, causal=tile.causal, bias=bias
            )
            for total_grad, added, at in zip((dq, dk, dv), more, (asked, keys, keys), strict=True):
                total_grad[of][:, :, at] += added
    return out, dq, dk, dv


def densely(q, k, v, sight):
    distance = torch.arange(TOKENS, device="cuda")[:, None] - torch.arange(TOKENS, device="cuda")
    mask = ((distance >= 0) & (distance < (sight.window or TOKENS)))[None]
    if sight.document_ids_BS is not None:
        ids = sight.document_ids_BS.cuda()
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def expected_of(tensors, grad, sight):
    leaves = [x.double().requires_grad_() for x in tensors]
    whole = densely(*leaves, sight)
    return [whole.detach(), *torch.autograd.grad(whole, leaves, grad.double())]


def example(dtype, what):
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = [(BATCH, heads, TOKENS, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *tensors, grad = (torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes)
    documents = (torch.rand(BATCH, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.05).cumsum(-1).int()
    sight = AttentionMaskSpec(
        torch.arange(TOKENS, device="cuda"), documents if "documents" in what else None, 50 if "window" in what else 0
    )
    return tensors, grad, sight


@pytest.mark.parametrize("shared", [128, 4])
@pytest.mark.parametrize("what", ["causal", "documents", "window"])
@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 2e-2), (torch.float32, 1e-3)])
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_kernels_of_a_ring_equal_attention_in_one_piece(monkeypatch, layout: Any, dtype, allowed, what, shared):
    monkeypatch.setattr(tiles, "SHARED_TOKENS", shared)
    tensors, grad, sight = example(dtype, what)
    parallel = Parallel(cp=RANKS, ulysses=1, context_layout=layout)
    with torch.no_grad():
        found = in_a_ring(parallel, sight, *tensors, grad, what != "causal")
    for ours, theirs in zip(found, expected_of(tensors, grad, sight), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < allowed


@pytest.mark.parametrize("what", ["documents", "window", "documents and window"])
@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-3),
                                            (torch.float64, 1e-12)])  # fmt: skip
def test_attention_in_one_process_equals_that_with_a_mask(dtype, allowed, what):
    """Packed in 16 bits, tile by tile in others."""
    tensors, grad, sight = example(dtype, what)
    planned = sight.planned(TOKENS, tensors[0], HEAD_DIM)
    assert isinstance(planned.plan, PackedDocuments) == (dtype in (torch.bfloat16, torch.float16))
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend_locally(*leaves, planned)
        found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, expected_of(tensors, grad, sight), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < allowed
