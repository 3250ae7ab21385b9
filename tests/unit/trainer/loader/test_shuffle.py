"""Every window once per epoch, near-sequential reads, and no memory of the whole: the claims of the shuffle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.trainer.loader.order import GROUP_BLOCKS, Shuffle, permute, permuted_range


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 5000])
def test_permute_is_a_bijection(n):
    assert sorted(permute(np.arange(n), n, key=n)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**63 - 1))
def test_permute_and_permuted_range_are_bijections_for_every_key(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))
    assert np.array_equal(np.sort(permuted_range(n, key)), np.arange(n))


def test_permute_needs_no_memory_of_n():
    n = 10**15
    out = permute(np.arange(1000), n, key=3)
    assert len(set(out.tolist())) == 1000
    assert out.min() >= 0
    assert out.max() < n
    assert np.median(out) == pytest.approx(n / 2, rel=0.2)


def small(windows, key=1, block=4):
    shuffle = Shuffle(windows, 16, key)
    shuffle.block_windows, shuffle.group_windows = block, block * GROUP_BLOCKS
    return shuffle


@settings(max_examples=40, deadline=None)
@given(
    windows=st.integers(1, 5000),
    block=st.integers(1, 40),
    key=st.integers(0, 2**63 - 1),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
)
def test_every_window_once_per_epoch_however_it_is_cut(windows, block, key, cuts):
    whole = small(windows, key, block).take(0, 2 * windows)
    assert np.array_equal(np.sort(whole[:windows]), np.arange(windows))
    assert np.array_equal(np.sort(whole[windows:]), np.arange(windows))
    shuffle, ends = small(windows, key, block), sorted(c % (2 * windows + 1) for c in cuts)
    parts = [shuffle.take(a, b) for a, b in zip([0, *ends], [*ends, 2 * windows], strict=True)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_any_place_is_reached_without_the_way_there():
    straight = small(3000).take(0, 6000)
    for first in (5999, 2990, 4321, 0):
        assert np.array_equal(small(3000).take(first, min(first + 20, 6000)), straight[first : first + 20])


def test_epochs_and_keys_differ():
    a = small(2000).take(0, 4000)
    assert (a[:2000] == a[2000:]).mean() < 0.01
    assert (a[:2000] == small(2000, key=2).take(0, 2000)).mean() < 0.01


def test_a_stretch_of_samples_touches_few_blocks():
    shuffle = small(40_000, block=16)
    ids = shuffle.take(0, 40_000)
    stretch = shuffle.group_windows
    for first in range(0, 40_000 - stretch, 777):
        blocks = np.unique(ids[first : first + stretch] // 16)
        assert len(blocks) <= 2 * (GROUP_BLOCKS + 1)  # of two groups at most, and the short block


def test_neighbours_are_independent():
    windows = 50_000
    ids = small(windows, block=64).take(0, windows).astype(float)
    inside = ids.reshape(-1)[: windows // 2048 * 2048].reshape(-1, 2048)
    correlations = [np.corrcoef(group[:-1], group[1:])[0, 1] for group in inside]
    assert abs(np.mean(correlations)) < 0.02
    assert np.mean(np.abs(np.diff(ids)) == 1) < 0.01


def test_block_and_group_follow_the_length_of_a_window():
    assert Shuffle(10, 2048, 0).block_windows == 256
    assert Shuffle(10, 16, 0).block_windows == 1024
    assert Shuffle(10, 10**7, 0).block_windows == 1
