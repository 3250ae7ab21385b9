"""The tiles of attention: blocks of queries and keys that hold every pair of a query and a key that it attends to.

A query attends to its own and earlier tokens of its document, within the window. A long document without a window is
one causal tile, which needs no mask. Masks are needed in two places only, and there they are small: where several short
documents share a tile, and where a window begins inside one. So memory grows linearly with the sequence, and the work
of attention with documents is at most that of causal attention over the whole sequence.

Queries and keys may be those of two ranks of a ring. Their positions are given as segments (theory/context.py), and a
tile has their indices, counted over all segments. This module has no tensors.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ingot.theory.context import Segments

# Adjacent documents that have at most so many tokens together share a tile: a call of a kernel for each of them would
# take longer than the pairs that the mask hides.
SHARED_TOKENS = 128
# With a window, a tile has an eighth as many queries as the window has keys, within these limits.
WINDOW_SHARE, LEAST_ROWS, MOST_ROWS = 8, 64, 1024
MASK_ELEMENTS = 2**23  # the limit for one mask of distances, which serves all sequences of a batch: 16 MiB in bf16
_FAR = -(2**62)  # the distance to the first key without a window


@dataclass(frozen=True)
class Tile:
    """A block of queries and keys of some sequences of a batch.

    rows: the sequences. queries, keys: indices of tokens. causal: query i attends to no key after i of the tile, and
    both are equally many. low, high: query i attends to the keys i + low to i + high of the tile; None: no limit.
    documents: a query attends to keys of its own document only, and the tile has several.
    """

    queries: slice
    keys: slice
    rows: slice = field(default_factory=lambda: slice(None))
    causal: bool = False
    low: int | None = None
    high: int | None = None
    documents: bool = False

    @property
    def is_masked(self) -> bool:
        """True if the tile needs a mask besides `causal`."""
        return self.documents or self.low is not None or self.high is not None

    @property
    def pairs(self) -> float:
        """The number of pairs that a kernel computes for one sequence: half of a causal tile's, all of another's."""
        queries, keys = (part.stop - part.start for part in (self.queries, self.keys))
        return queries * keys / (2 if self.causal else 1)


def tiles_of(
    queries: Segments, keys: Segments, ends: Sequence[Sequence[int]] | None, window: int, *, batch: int
) -> list[Tile]:
    """Return the tiles of these queries and keys of `batch` sequences.

    ends: the positions at which the documents of each sequence end, ascending; None: a sequence is one document.
    window: the number of tokens that a query attends to, itself included; 0: no limit. Equal tiles of adjacent
    sequences are one.
    """
    if ends is None:
        end = max(segment[-1] for segment in (*queries, *keys)) + 1
        return [replace(tile, rows=slice(0, batch)) for tile in _of_sequence(queries, keys, (end,), window)]
    runs: dict[tuple, list[Tile]] = {}
    for row, of_row in enumerate(ends):
        for tile in _of_sequence(queries, keys, of_row, window):
            q, k = tile.queries, tile.keys
            found = runs.setdefault((q.start, q.stop, k.start, k.stop, tile.causal, tile.low, tile.high), [])
            rows, documents = slice(row, row + 1), tile.documents
            if found and found[-1].rows.stop == row:  # a mask of documents also suits a sequence that has one here
                before = found.pop()
                rows, documents = slice(before.rows.start, row + 1), documents or before.documents
            found.append(replace(tile, rows=rows, documents=documents))
    return [tile for found in runs.values() for tile in found]


def _of_sequence(queries: Segments, keys: Segments, ends: Sequence[int], window: int) -> Iterator[Tile]:
    before_queries = 0
    for q in queries:
        before_keys = 0
        for k in keys:
            if k[0] <= q[-1]:
                for tile in _of_segments(q, k, ends, window):
                    yield replace(
                        tile, queries=_shifted(tile.queries, before_queries), keys=_shifted(tile.keys, before_keys)
                    )
            before_keys += len(k)
        before_queries += len(q)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


@dataclass(frozen=True)
class _Block:
    """The queries q0..q1 and the keys k0..k1 (exclusive ends) of two segments, without the ones that have no pair.

    Query i attends to the keys i + first to i + last.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    first: int
    last: int

    @property
    def is_empty(self) -> bool:
        return self.q0 >= self.q1 or self.k0 >= self.k1

    def trimmed(self) -> "_Block":
        q0, q1 = max(self.q0, self.k0 - self.last), min(self.q1, self.k1 - self.first)
        return replace(self, q0=q0, q1=q1, k0=max(self.k0, q0 + self.first), k1=min(self.k1, q1 + self.last))

    def tile(self, *, documents: bool = False) -> Tile:
        """Return one tile with these queries and keys, and the mask that it needs."""
        is_square = self.q0 + self.last == self.k0 and self.q1 + self.last == self.k1
        return Tile(
            slice(self.q0, self.q1),
            slice(self.k0, self.k1),
            causal=is_square,
            low=self.q0 + self.first - self.k0 if self.q1 - 1 + self.first > self.k0 else None,
            high=self.q0 + self.last - self.k0 if self.k1 - 1 > self.q0 + self.last and not is_square else None,
            documents=documents,
        )


def _of_segments(q: range, k: range, ends: Sequence[int], window: int) -> Iterator[Tile]:
    """Yield the tiles of one segment of queries and one of keys. Both have the same step."""
    apart = q.start - k.start
    last = apart // q.step
    first = -((window - 1 - apart) // q.step) if window else _FAR
    if first > last:
        return  # a window that ends before the nearest key of the other rank
    shares = last in (0, -1)  # the same tokens, or the neighbors of each
    open_: list[_Block] = []  # adjacent documents that share a tile so far
    for start, end in _overlapping(q, ends):
        block = _Block(*_inside(q, start, end), *_inside(k, start, end), first, last)
        if block.is_empty or block.trimmed().is_empty:
            continue
        if open_ and _span(open_[0], block) > SHARED_TOKENS:
            yield from _shared(open_)
            open_ = []
        if shares and _span(block, block) <= SHARED_TOKENS:
            open_.append(block)
        else:
            yield from _of_document(block.trimmed())
    yield from _shared(open_)


def _overlapping(q: range, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the documents that may have tokens in `q`, in order."""
    number = bisect_right(ends, q.start)
    start = ends[number - 1] if number else 0
    while start <= q[-1] and number < len(ends):
        yield start, ends[number]
        start, number = ends[number], number + 1


def _inside(segment: range, start: int, end: int) -> tuple[int, int]:
    """Return the indices in `segment` of the positions from `start` to before `end`."""
    first, last = (min(max(-((segment.start - at) // segment.step), 0), len(segment)) for at in (start, end))
    return first, last


def _span(first: _Block, last: _Block) -> int:
    return max(last.q1 - first.q0, last.k1 - first.k0)


def _shared(blocks: list[_Block]) -> Iterator[Tile]:
    """Yield the tile of some adjacent documents, if there are any."""
    if blocks:
        whole = replace(blocks[0], q1=blocks[-1].q1, k1=blocks[-1].k1).trimmed()
        yield whole.tile(documents=len(blocks) > 1)


def _of_document(block: _Block) -> Iterator[Tile]:
    """Yield the tiles of queries and keys of one document: first those of queries whose window does not begin inside
    these keys, which need no mask of the window, then some queries at a time."""
    free = max(min(block.q1, block.k0 - block.first + 1), block.q0)
    if free > block.q0:
        yield from _causal(replace(block, q1=free, first=_FAR).trimmed())
    seen = block.last - block.first + 1
    rows = min(max(seen // WINDOW_SHARE, LEAST_ROWS), MOST_ROWS)
    yield from _in_rows(replace(block, q0=free), min(rows, MASK_ELEMENTS // (rows + seen)))


def _causal(block: _Block) -> Iterator[Tile]:
    """Yield the tiles of queries and keys of one document without a window."""
    if block.k1 - 1 <= block.q0 + block.last:
        yield block.tile()  # all queries attend to all keys
    elif block.q0 + block.last == block.k0:
        square = block.k1 - block.last  # later queries, if there are any, attend to all keys
        yield replace(block, q1=square).tile()
        if square < block.q1:
            yield replace(block, q0=square).tile()
    else:  # new tokens after cached ones
        yield from _in_rows(block, MASK_ELEMENTS // (block.k1 - block.k0))


def _in_rows(block: _Block, rows: int) -> Iterator[Tile]:
    for start in range(block.q0, block.q1, max(rows, 1)):
        part = replace(block, q0=start, q1=min(start + max(rows, 1), block.q1)).trimmed()
        yield part.tile()
