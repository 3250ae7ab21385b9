"""The tiles of attention: every pair once, no work that a mask hides where it can be left out, and small masks."""

from itertools import product
from typing import Any

import pytest

from ingot.schema.parallel import Parallel
from ingot.theory.context import ring_positions
from ingot.theory.flops import mean_keys
from ingot.trainer.attend import tiles
from ingot.trainer.attend.tiles import tiles_of

LAYOUTS = ("zigzag", "striped", "contiguous")
ENDS = [[1, 2, 3, 7, 9, 23, 24], [24], [11, 12, 24]]
# (SHARED_TOKENS, LEAST_ROWS, MASK_ELEMENTS): as they are, and so small that each rule shapes some tile of 24 tokens.
SIZES = [(tiles.SHARED_TOKENS, tiles.LEAST_ROWS, tiles.MASK_ELEMENTS), (1, 1, 1), (4, 3, 2**23), (6, 64, 20)]


def limited(monkeypatch, sizes):
    for name, size in zip(("SHARED_TOKENS", "LEAST_ROWS", "MASK_ELEMENTS"), sizes, strict=True):
        monkeypatch.setattr(tiles, name, size)


def document(position, ends):
    return sum(position >= end for end in ends)


def pairs_of(found, queries, keys, row, ends):
    """Return how often the tiles let each query attend to each key, by their positions."""
    positions = [[p for segment in segments for p in segment] for segments in (queries, keys)]
    times: dict[tuple[int, int], int] = {}
    for tile in (tile for tile in found if tile.rows.start <= row < tile.rows.stop):
        rows, columns = (range(part.start, part.stop) for part in (tile.queries, tile.keys))
        assert not tile.causal or len(rows) == len(columns)
        for (a, i), (b, j) in product(enumerate(rows), enumerate(columns)):
            q, k = positions[0][i], positions[1][j]
            seen = not tile.causal or b <= a
            seen &= tile.low is None or b >= a + tile.low
            seen &= tile.high is None or b <= a + tile.high
            seen &= not tile.documents or document(q, ends) == document(k, ends)
            if seen:
                times[q, k] = times.get((q, k), 0) + 1
    return times


def expected(queries, keys, window, ends):
    return {
        (q, k): 1
        for q in (p for segment in queries for p in segment)
        for k in (p for segment in keys for p in segment)
        if k <= q and q - k < (window or 100) and document(q, ends) == document(k, ends)
    }


def check(queries, keys, ends, window):
    batch = 2 if ends is None else len(ends)
    found = tiles_of(queries, keys, ends, window, batch=batch)
    for row in range(batch):
        of_row = (24,) if ends is None else ends[row]
        assert pairs_of(found, queries, keys, row, of_row) == expected(queries, keys, window, of_row)
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [0, 1, 3, 9, 30])
@pytest.mark.parametrize("ends", [None, ENDS], ids=["whole", "documents"])
def test_tiles_hold_every_pair_once(monkeypatch, ends, window, sizes):
    """The queries and keys of one process, of new tokens after cached ones, and of all pairs of ranks of rings."""
    limited(monkeypatch, sizes)
    for tokens in (24, 7, 1):
        check((range(24 - tokens, 24),), (range(24),), ends, window)
    grids: list[Any] = [(2, "zigzag"), (3, "zigzag"), (4, "striped"), (12, "striped"), (4, "contiguous")]
    for ranks, layout in grids:
        parallel = Parallel(cp=ranks, ulysses=1, context_layout=layout)
        for own, source in product(range(ranks), repeat=2):
            check(ring_positions(parallel, own, 24), ring_positions(parallel, source, 24), ends, window)


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_each_query_of_one_process_is_in_one_tile(monkeypatch, sizes):
    """So its result is written, not merged."""
    limited(monkeypatch, sizes)
    for ends, window in product((None, ENDS), (0, 5)):
        found = tiles_of((range(24),), (range(24),), ends, window, batch=3)
        for row in range(3):
            own = [tile.queries for tile in found if tile.rows.start <= row < tile.rows.stop]
            assert sorted(i for part in own for i in range(part.start, part.stop)) == list(range(24))


def local(tokens, ends, window=0):
    return tiles_of((range(tokens),), (range(tokens),), ends, window, batch=1 if ends is None else len(ends))


def test_documents_cost_no_more_than_a_causal_sequence():
    tokens = 2**17
    for length in (40, 500, 3000, 50_000):
        found = local(tokens, [[*range(length, tokens, length), tokens]])
        assert sum(tile.pairs for tile in found) <= tokens**2 / 2
        assert all(tile.causal and tile.queries == tile.keys for tile in found)
        masks = [(tile.queries.stop - tile.queries.start) ** 2 for tile in found if tile.is_masked]
        assert sum(masks) <= tokens * tiles.SHARED_TOKENS  # memory of masks is linear
        assert len(found) <= 2 * tokens // min(length, tiles.SHARED_TOKENS) + 2
    # A document of 500 tokens is a tile without a mask; those of 40 share tiles by threes.
    assert not any(tile.is_masked for tile in local(tokens, [[*range(500, tokens, 500), tokens]])[:-1])
    assert len(local(tokens, [[*range(40, tokens, 40), tokens]])) == -(-tokens // 120)


def test_equal_tiles_of_a_batch_are_one():
    assert local(100, [[100], [30, 100], [100]]) == [
        tiles.Tile(slice(0, 100), slice(0, 100), slice(0, 3), causal=True, documents=True)
    ]
    whole = local(1000, [[1000], [1000], [400, 1000]])
    assert [(tile.rows, tile.queries) for tile in whole] == [
        (slice(0, 2), slice(0, 1000)), (slice(2, 3), slice(0, 400)), (slice(2, 3), slice(400, 1000)),
    ]  # fmt: skip


@pytest.mark.parametrize("window", [512, 4096, 32_768])
def test_a_window_costs_an_eighth_more_than_its_pairs_and_its_masks_stay_small(window):
    tokens = 2**17
    found = local(tokens, None, window)
    assert sum(tile.pairs for tile in found) <= 1.13 * tokens * mean_keys(tokens, window)
    shapes = {(t.queries.stop - t.queries.start, t.keys.stop - t.keys.start, t.low, t.high) for t in found if t.low}
    assert all(queries * keys <= tiles.MASK_ELEMENTS for queries, keys, _, _ in shapes)
    assert len(shapes) <= 3  # the others are the same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_in_a_ring_need_no_mask_and_cost_no_more(layout: Any):
    parallel, tokens = Parallel(cp=4, ulysses=1, context_layout=layout), 2**16
    ends = [[*range(5000, tokens, 5000), tokens]]
    for own in range(4):
        cost, plain = 0.0, 0.0
        for source in range(4):
            queries, keys = (ring_positions(parallel, index, tokens) for index in (own, source))
            found = tiles_of(queries, keys, ends, 0, batch=1)
            assert not any(tile.is_masked for tile in found)
            cost += sum(tile.pairs for tile in found)
            plain += sum(tile.pairs for tile in tiles_of(queries, keys, None, 0, batch=1))
        assert cost <= plain / 2  # a document is a thirteenth of the sequence
