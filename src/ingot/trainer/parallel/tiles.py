"""Which parts of a rank's queries see which parts of another's keys. No torch here.

Positions of both are ascending segments (theory/context.py). A tile is a block of queries and keys; without documents
and windows three forms are enough, all keys, a triangle, or nothing. With them a tile has a mask, and few queries, so
that the mask stays small whatever the length of the sequence.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.schema.parallel import Parallel
from ingot.theory.context import Segments, ring_positions

MASK_ELEMENTS = 2**24  # of one tile; 32 MiB in bf16


@dataclass(frozen=True)
class Tile:
    """causal: the i-th query sees the keys 0..i. masked: what it sees is to be asked of positions and documents."""

    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False


def plain_tiles(parallel: Parallel, own: int, source: int, tokens: int) -> list[Tile]:
    """At most one tile of place `own` of the ring with keys of place `source`, of `tokens` each; causal, no mask."""
    everything, half = slice(0, tokens), tokens // 2
    if source == own:
        return [Tile(everything, everything, causal=True)]
    if parallel.context_layout == "striped":
        if source < own:
            return [Tile(everything, everything, causal=True)]
        return [Tile(slice(1, tokens), slice(0, tokens - 1), causal=True)] if tokens > 1 else []
    if parallel.context_layout == "zigzag":
        # The first half of each lies before, the second half after all that places further inside have.
        if source < own:
            return [Tile(everything, slice(0, half))]
        return [Tile(slice(half, tokens), everything)]
    return [Tile(everything, everything)] if source < own else []


def masked_tiles(
    parallel: Parallel, own: int, source: int, tokens: int, *, window: int, batch: int, limit: int = MASK_ELEMENTS
) -> Iterator[Tile]:
    """Tiles with masks of at most `limit` elements (at least one row) that hold all pairs of keys at most `window`
    tokens back, 0: any. Those out of reach are left out."""
    queries, keys = (ring_positions(parallel, place, tokens * parallel.ring) for place in (own, source))
    start = 0
    for segment in queries:
        rows = _rows(limit // batch, tokens, window // segment.step)
        for at in range(0, len(segment), rows):
            part = segment[at : at + rows]
            first = _before(keys, part[0] - window + 1) if window else 0
            end = _before(keys, part[-1] + 1)
            if first < end:
                yield Tile(slice(start + at, start + at + len(part)), slice(first, end), masked=True)
        start += len(segment)


def _rows(elements: int, keys: int, window: int) -> int:
    """The most queries side by side whose mask has no more elements. Within a window n of them reach n + window + 1
    keys at most, which lie as close to each other as queries do."""
    rows = elements // keys
    if window:
        wide = window + 1
        rows = max(rows, (math.isqrt(wide**2 + 4 * elements) - wide) // 2)
    return max(rows, 1)


def _before(segments: Segments, position: int) -> int:
    """How many of the positions lie before `position`."""
    return sum(bisect_left(segment, position) for segment in segments)
