"""Rectangular blocks of tensors: where two of them meet, and whether some of them make up a whole. No torch.

A block is (offsets, sizes), one number per dim each. A scalar has no dims, and its one block is ((), ()).
"""

import math
from collections.abc import Sequence

Block = tuple[Sequence[int], Sequence[int]]


def overlap(a: Block, b: Block) -> Block | None:
    """The block that `a` and `b` share, placed in the whole; None if they share no element."""
    offsets = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    sizes = [min(x + m, y + n) - o for x, m, y, n, o in zip(a[0], a[1], b[0], b[1], offsets, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def slices(block: Block, origin: Sequence[int]) -> tuple[slice, ...]:
    """How to index `block` in an array whose first element lies at `origin` in the whole."""
    return tuple(slice(o - z, o - z + size) for o, size, z in zip(*block, origin, strict=True))


def tiling_problem(shape: Sequence[int], blocks: Sequence[Block]) -> str:
    """What keeps `blocks`, all inside `shape`, from holding each element exactly once: "overlap", a hole, or ""."""
    if sum(math.prod(sizes) for _, sizes in blocks) != math.prod(shape):
        return f"do not cover its shape {list(shape)}"
    return "overlap" if len(blocks) > 1 and _some_overlap(len(shape), blocks) else ""


def _some_overlap(dims: int, blocks: Sequence[Block]) -> bool:
    # Swept along the dim with the most cuts, where only few blocks are open at a time: for rows inside columns as many
    # as there are columns.
    if dims == 0:
        return True
    along = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in blocks}))
    open_blocks: list[Block] = []
    for block in sorted(blocks, key=lambda block: block[0][along]):
        start = block[0][along]
        open_blocks = [b for b in open_blocks if b[0][along] + b[1][along] > start]
        if any(overlap(b, block) for b in open_blocks):
            return True
        open_blocks.append(block)
    return False
