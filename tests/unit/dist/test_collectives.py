import numpy as np

from ingot.dist.collectives import any_rank, gather_array, mean_over_ranks


def test_one_vote_is_enough(fork_ranks):
    assert fork_ranks(lambda rank, ranks: any_rank(rank == 2), 3) == [True] * 3
    assert fork_ranks(lambda rank, ranks: any_rank(False), 3) == [False] * 3


def test_arrays_come_in_rank_order(fork_ranks):
    def gather(rank, ranks):
        return gather_array(np.array([[rank, 10 * rank]], np.int64))

    for got in fork_ranks(gather, 3):
        assert got.dtype == np.int64
        assert got.tolist() == [[[0, 0]], [[1, 10]], [[2, 20]]]


def test_the_mean_does_not_depend_on_how_values_are_batched(fork_ranks):
    def means(rank, ranks):
        values = np.random.default_rng(rank).standard_normal(97)
        together = mean_over_ranks(values)
        alone = np.concatenate([mean_over_ranks(part) for part in np.array_split(values, 13)])
        return together, alone

    expected = np.mean([np.random.default_rng(rank).standard_normal(97) for rank in range(4)], axis=0)
    for together, alone in fork_ranks(means, 4):
        assert together.tolist() == alone.tolist()
        assert np.allclose(together, expected, rtol=1e-15)


def test_the_mean_of_some_ranks_is_known_to_all(fork_ranks):
    def mean(rank, ranks):
        mine = np.array([rank, 10.0 * rank]) if rank in (1, 3) else np.full(2, np.nan)
        return mean_over_ranks(mine, [1, 3]).tolist()

    assert fork_ranks(mean, 4) == [[2.0, 20.0]] * 4
