"""Tiles of rings: every pair that may look is in exactly one, masks stay small, what is out of reach is left out."""

from typing import Any

import pytest
import torch

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions, ring_steps, seen_pairs
from ingot.trainer.model.attention import AttentionMaskSpec
from ingot.trainer.parallel.flash import attend_part, attend_part_backward
from ingot.trainer.parallel.ring import masked_tiles, plain_tiles

LAYOUTS = ("zigzag", "striped", "contiguous")


def ring_of(ranks, layout: Any):
    return Parallel(cp=ranks, ulysses=1, context_layout=layout)


def positions_of(parallel, place, tokens):
    parts = ring_positions(parallel, place, tokens * parallel.ring)
    return torch.cat([torch.arange(p.start, p.stop, p.step) for p in parts])


def covered(parallel, own, source, tokens, tiles, window=0):
    """Return how often the tiles have each pair: int64 [tokens, tokens]."""
    times = torch.zeros(tokens, tokens, dtype=torch.int64)
    queries, keys = positions_of(parallel, own, tokens), positions_of(parallel, source, tokens)
    for tile in tiles:
        shape = times[tile.queries, tile.keys].shape
        seen = torch.ones(shape, dtype=torch.bool)
        if tile.causal:
            assert shape[0] == shape[1]
            seen = seen.tril()
        if tile.masked:
            seen = AttentionMaskSpec(queries, window=window).mask(queries[tile.queries], keys[tile.keys])[0, 0]
        times[tile.queries, tile.keys] += seen
    return times


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, tokens", [(2, 2), (2, 8), (3, 4), (4, 6), (8, 2)])
def test_tiles_without_masks_hold_every_pair_once(layout, ranks, tokens):
    parallel = ring_of(ranks, layout)
    for own in range(ranks):
        pairs = 0
        for source in range(ranks):
            times = covered(parallel, own, source, tokens, plain_tiles(parallel, own, source, tokens))
            queries, keys = positions_of(parallel, own, tokens), positions_of(parallel, source, tokens)
            assert torch.equal(times, (queries[:, None] >= keys).long()), (own, source)
            pairs += int(times.sum())
        assert pairs == seen_pairs(ring_positions(parallel, own, tokens * ranks))


def test_a_striped_rank_with_one_token_sees_nothing_of_later_ranks():
    assert plain_tiles(ring_of(4, "striped"), 1, 2, 1) == []
    assert plain_tiles(ring_of(4, "contiguous"), 1, 2, 8) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [1, 7, 40, 10_000])
@pytest.mark.parametrize("window", [0, 1, 3, 9, 30])
def test_tiles_with_masks_hold_every_pair_once_and_stay_small(layout, window, limit):
    ranks, tokens, batch = 4, 8, 2
    parallel = ring_of(ranks, layout)
    for own in range(ranks):
        for source in range(ranks):
            tiles = list(masked_tiles(parallel, own, source, tokens, window=window, batch=batch, limit=limit))
            times = covered(parallel, own, source, tokens, tiles, window)
            apart = positions_of(parallel, own, tokens)[:, None] - positions_of(parallel, source, tokens)
            assert torch.equal(times, ((apart >= 0) & (apart < (window or 1000))).long())
            sizes = [times[tile.queries, tile.keys].shape for tile in tiles]
            assert all(rows == 1 or rows * keys * batch <= limit for rows, keys in sizes)


@pytest.mark.parametrize("ranks, tokens", [(2, 2), (4, 6), (8, 3)])
def test_a_ring_ends_where_a_window_reaches_nothing_more(ranks, tokens):
    parallel = ring_of(ranks, "contiguous")
    for window in range(1, ranks * tokens + 3):
        busy = [
            any(
                list(masked_tiles(parallel, own, (own - step) % ranks, tokens, window=window, batch=1))
                for own in range(ranks)
            )
            for step in range(ranks)
        ]
        steps = ring_steps(parallel, ranks * tokens, window)
        assert busy == [step < steps for step in range(ranks)], window


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_other_rings_need_their_last_step(layout):
    parallel = ring_of(4, layout)
    assert any(list(masked_tiles(parallel, own, (own + 1) % 4, 6, window=4, batch=1)) for own in range(4))
    assert ring_steps(parallel, 24, 4) == 4


def test_a_window_lets_more_queries_into_a_mask():
    tiles = list(masked_tiles(ring_of(2, "zigzag"), 0, 0, 2**17, window=4096, batch=1))
    assert len(tiles) < 80  # with all keys of the rank it would be 128 queries a tile, and 1024 tiles


def test_ranks_that_a_window_does_not_reach_have_no_tiles():
    # Contiguous parts of 8: a window of 3 reaches one rank back.
    far = [
        [bool(list(masked_tiles(ring_of(4, "contiguous"), own, source, 8, window=3, batch=1))) for source in range(4)]
        for own in range(4)
    ]
    assert far == [[0 <= own - source <= 1 for source in range(4)] for own in range(4)]


def test_a_query_without_keys_adds_nothing():
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    seen[..., 2, :] = False
    out, lse = attend_part(q, k, v, causal=False, mask=seen)
    assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 8).double()) and (lse[:, :, 2] == -torch.inf).all()
    assert lse[:, :, [0, 1, 3, 4]].isfinite().all()
    whole = torch.zeros_like(lse)  # of the attention to all keys, which is finite
    dq, dk, dv = attend_part_backward(grad, q, out, whole, k, v, causal=False, mask=seen)
    assert not dq[:, :, 2].any() and dk.isfinite().all() and dv.isfinite().all()
