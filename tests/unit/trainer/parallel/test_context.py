"""Tiles of rings: every pair that may look is in exactly one, masks stay small, what is out of reach is left out."""

from typing import Any

import pytest
import torch

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions, ring_steps, seen_pairs
from ingot.trainer.parallel.ring import plain_tiles, ring_tiles

LAYOUTS = ("zigzag", "striped", "contiguous")


def ring_of(ranks, layout: Any):
    return Parallel(cp=ranks, ulysses=1, context_layout=layout)


def positions_of(parallel, place, tokens):
    parts = ring_positions(parallel, place, tokens * parallel.ring)
    return torch.cat([torch.arange(p.start, p.stop, p.step) for p in parts])


def covered(tokens, tiles):
    """Return how often tiles without masks have each pair: int64 [tokens, tokens]."""
    times = torch.zeros(tokens, tokens, dtype=torch.int64)
    for tile in tiles:
        shape = times[tile.queries, tile.keys].shape
        seen = torch.ones(shape, dtype=torch.bool)
        if tile.causal:
            assert shape[0] == shape[1]
            seen = seen.tril()
        times[tile.queries, tile.keys] += seen
    return times


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks, tokens", [(2, 2), (2, 8), (3, 4), (4, 6), (8, 2)])
def test_tiles_without_masks_hold_every_pair_once(layout, ranks, tokens):
    parallel = ring_of(ranks, layout)
    for own in range(ranks):
        pairs = 0
        for source in range(ranks):
            times = covered(tokens, plain_tiles(parallel, own, source, tokens))
            queries, keys = positions_of(parallel, own, tokens), positions_of(parallel, source, tokens)
            assert torch.equal(times, (queries[:, None] >= keys).long()), (own, source)
            pairs += int(times.sum())
        assert pairs == seen_pairs(ring_positions(parallel, own, tokens * ranks))


def test_a_striped_rank_with_one_token_sees_nothing_of_later_ranks():
    assert plain_tiles(ring_of(4, "striped"), 1, 2, 1) == []
    assert plain_tiles(ring_of(4, "contiguous"), 1, 2, 8) == []


def windowed(parallel, own, source, tokens, window):
    return ring_tiles(parallel, own, source, tokens, ends=None, window=window, batch=1)


@pytest.mark.parametrize("ranks, tokens", [(2, 2), (4, 6), (8, 3)])
def test_a_ring_ends_where_a_window_reaches_nothing_more(ranks, tokens):
    parallel = ring_of(ranks, "contiguous")
    for window in range(1, ranks * tokens + 3):
        busy = [
            any(windowed(parallel, own, (own - step) % ranks, tokens, window) for own in range(ranks))
            for step in range(ranks)
        ]
        steps = ring_steps(parallel, ranks * tokens, window)
        assert busy == [step < steps for step in range(ranks)], window


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_other_rings_need_their_last_step(layout):
    parallel = ring_of(4, layout)
    assert any(windowed(parallel, own, (own + 1) % 4, 6, 4) for own in range(4))
    assert ring_steps(parallel, 24, 4) == 4


def test_ranks_that_a_window_does_not_reach_have_no_tiles():
    # Contiguous parts of 8: a window of 3 reaches one rank back.
    far = [[bool(windowed(ring_of(4, "contiguous"), own, source, 8, 3)) for source in range(4)] for own in range(4)]
    assert far == [[0 <= own - source <= 1 for source in range(4)] for own in range(4)]
