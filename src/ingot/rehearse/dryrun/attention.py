"""How many pairs of a query and a key attention's kernels go through on one rank: a triangle counts as one, what a mask
hides counts as well."""

from collections.abc import Iterable
from dataclasses import dataclass

from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig
from ingot.trainer.model import attention
from ingot.trainer.parallel.tiles import Tile, masked_tiles, plain_tiles


@dataclass(frozen=True)
class Pairs:
    """forward: of one head, sequence and layer, for the tokens that meet on one rank. chunked: the backward goes
    through them once more, because it makes chunks of attention again."""

    forward: float
    chunked: bool = False


def attended_pairs(config: RunConfig, parallel: Parallel, ring_index: int) -> Pairs:
    """parallel: resolved."""
    tokens, window = config.train.seq_len, config.model.sliding_window
    window = window if window < tokens else 0
    masked = window > 0 or config.data.mask_documents
    if parallel.ring == 1:
        return _whole(tokens, window, config.train.micro_batch if config.data.mask_documents else 1, masked)
    part, total = tokens // parallel.ring, 0.0
    for source in range(parallel.ring):
        tiles: Iterable[Tile] = plain_tiles(parallel, ring_index, source, part)
        if masked:
            batch = config.train.micro_batch
            tiles = masked_tiles(parallel, ring_index, source, part, window=window, batch=batch)
        total += sum(map(_area, tiles))
    return Pairs(total)


def _area(tile: Tile) -> float:
    queries, keys = (part.stop - part.start for part in (tile.queries, tile.keys))
    return queries * keys / (2 if tile.causal else 1)


def _whole(tokens: int, window: int, masks: int, masked: bool) -> Pairs:
    if not masked:
        return Pairs(tokens * tokens / 2)
    if masks * tokens * tokens <= attention.MASK_ELEMENTS:
        return Pairs(tokens * tokens)
    rows = max(attention.MASK_ELEMENTS // (masks * tokens), 1)
    total = 0
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        total += (end - start) * (end - (max(start - window + 1, 0) if window else 0))
    return Pairs(total, chunked=True)
