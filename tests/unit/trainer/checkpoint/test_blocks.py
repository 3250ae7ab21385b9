import itertools
import math
import random

import numpy as np

from ingot.trainer.checkpoint.part import overlap, slices, tiling_problem


def random_block(rng, shape):
    offsets = [rng.randrange(size + 1) for size in shape]
    return offsets, [rng.randrange(size - o + 1) for o, size in zip(offsets, shape, strict=True)]


def paint(shape, blocks):
    """Count the blocks that hold each element."""
    counts = np.zeros(shape, int)
    for block in blocks:
        counts[slices(block, [0] * len(shape))] += 1
    return counts


def random_tiling(rng, shape):
    """Cut into columns, and each column into rows of its own."""
    blocks = [((0,) * len(shape), shape)]
    for dim in rng.sample(range(len(shape)), len(shape)):
        cut = []
        for offsets, sizes in blocks:
            points = sorted(rng.choices(range(sizes[dim] + 1), k=rng.randrange(3)))
            for start, end in itertools.pairwise([0, *points, sizes[dim]]):
                place = tuple(o + start * (d == dim) for d, o in enumerate(offsets))
                cut.append((place, tuple(end - start if d == dim else s for d, s in enumerate(sizes))))
        blocks = cut
    return blocks


def test_overlap_is_what_numpy_paints_twice():
    rng = random.Random(0)
    for _ in range(500):
        shape = [rng.randrange(1, 6) for _ in range(rng.randrange(4))]
        a, b = random_block(rng, shape), random_block(rng, shape)
        shared = overlap(a, b)
        assert (paint(shape, [a, b]) == 2).sum() == (math.prod(shared[1]) if shared else 0)
        if shared:
            assert (paint(shape, [a, b])[slices(shared, [0] * len(shape))] == 2).all()


def test_slices_are_counted_from_the_origin():
    assert slices(((4, 6), (2, 1)), (3, 6)) == (slice(1, 3), slice(0, 1))


def test_tilings_are_told_from_holes_and_overlaps():
    rng = random.Random(1)
    problems = {"": 0, "overlap": 0, "do not": 0}
    for _ in range(600):
        shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
        blocks = random_tiling(rng, shape)
        assert tiling_problem(shape, blocks) == ""
        # Move or replace a block, or two so that the number of elements may stay right.
        for _ in range(2):
            blocks[rng.randrange(len(blocks))] = random_block(rng, shape)
        problem = tiling_problem(shape, blocks)
        assert (problem == "") == bool((paint(shape, blocks) == 1).all()), (shape, blocks)
        problems[problem[:7].strip()] += 1
    assert min(problems.values()) > 5, problems  # all three were seen


def test_a_scalar_is_one_block():
    assert tiling_problem((), [((), ())]) == ""
    assert tiling_problem((), []) != ""
    assert tiling_problem((), [((), ()), ((), ())]) != ""


def test_many_blocks_take_little_time():
    """Columns and rows of a large layout: 4 columns with 4,000 blocks of one row each."""
    blocks = [((row, 10 * column), (1, 10)) for column in range(4) for row in range(4000)]
    random.Random(2).shuffle(blocks)
    assert tiling_problem((4000, 40), blocks) == ""
    blocks[7] = ((blocks[8][0]), blocks[7][1])
    assert tiling_problem((4000, 40), blocks) == "overlap"
