"""Rectangular blocks of tensors: the overlap of two blocks, and whether blocks make up the whole tensor. No torch.

A block is (offsets, sizes), each with one number per dim. A scalar has no dims, and its only block is ((), ()).
"""

import math
from collections.abc import Sequence

Block = tuple[Sequence[int], Sequence[int]]


def overlap(a: Block, b: Block) -> Block | None:
    """Return the block that `a` and `b` share, with offsets in the whole tensor; None if they share no element."""
    offsets = [max(x, y) for x, y in zip(a[0], b[0], strict=True)]
    sizes = [min(x + m, y + n) - o for x, m, y, n, o in zip(a[0], a[1], b[0], b[1], offsets, strict=True)]
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def slices(block: Block, origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of `block` in an array whose first element is at `origin` in the whole tensor."""
    return tuple(slice(o - z, o - z + size) for o, size, z in zip(*block, origin, strict=True))


def tiling_problem(shape: Sequence[int], blocks: Sequence[Block]) -> str:
    """Return why `blocks`, all inside `shape`, do not hold each element exactly once; "" if they do.

    The reason continues a sentence whose subject is the blocks.
    """
    if sum(math.prod(sizes) for _, sizes in blocks) != math.prod(shape):
        return f"do not cover its shape {list(shape)}"
    return "overlap" if len(blocks) > 1 and _some_overlap(len(shape), blocks) else ""


def _some_overlap(dims: int, blocks: Sequence[Block]) -> bool:
    # Sweep along the dim with the most cuts, where few blocks are open at a time: if columns are cut into many rows, as
    # many as there are columns.
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
