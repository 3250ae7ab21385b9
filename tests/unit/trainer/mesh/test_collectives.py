import numpy as np

from ingot.trainer.mesh.collectives import any_rank, gather_from, largest_of_ranks, mean_over_ranks


def test_one_vote_is_enough(fork_ranks):
    assert fork_ranks(lambda rank, ranks: any_rank(rank == 2), 3) == [True] * 3
    assert fork_ranks(lambda rank, ranks: any_rank(False), 3) == [False] * 3


def test_the_largest_value_of_each_is_known_to_all(fork_ranks):
    assert fork_ranks(lambda rank, ranks: largest_of_ranks(rank == 1, 0.1 * rank), 3) == [(1.0, 0.2)] * 3


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


def test_values_of_some_ranks_reach_all_unchanged_and_in_the_order_asked_for(fork_ranks):
    def values(rank):
        return np.random.default_rng(rank).standard_normal((2, 5)) * np.array([1e-300, 1e-8, 1, 1e8, np.inf])

    def gather(rank, ranks):
        mine = values(rank) if rank in (3, 0) else np.full((2, 5), np.nan)
        return gather_from([3, 0], mine), mine

    for rank, (together, mine) in enumerate(fork_ranks(gather, 4)):
        assert together.tobytes() == np.stack([values(3), values(0)]).tobytes()
        assert rank in (3, 0) or np.isnan(mine).all()  # the rank's own array stays as it was


def test_a_lost_value_shows(fork_ranks):
    # NaN of one reader must not be summed away, nor spread to the others.
    def gather(rank, ranks):
        return gather_from([0, 1], np.array([np.nan, 1.0]) if rank == 0 else np.array([2.0, np.nan]))

    for together in fork_ranks(gather, 2):
        assert np.isnan(together).tolist() == [[True, False], [False, True]]
