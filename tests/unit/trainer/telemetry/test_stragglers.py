"""The ranks that are called slow, from times with seeded jitter: no healthy one, and slow ones within ten steps."""

import numpy as np
import pytest

from ingot.trainer.telemetry.stragglers import StragglerWatch, median_of_others

RANKS = 4


def play(
    own,
    *,
    data=None,
    log_every=1,
    peers=None,
    factor=1.2,
):
    """Return (step, straggler) for each finding on the times own, data [steps, ranks]."""
    watch = StragglerWatch(peers or [list(range(own.shape[1]))], factor)
    data, found = np.zeros_like(own) if data is None else data, []
    for end in range(log_every, len(own) + 1, log_every):
        line = slice(end - log_every, end)
        news = watch.take(end, log_every, np.median(own[line], axis=0), np.median(data[line], axis=0))
        found += [(end, one) for one in news]
    return found


def times(steps, *, ranks=RANKS, jitter=0.2, seed=0):
    """Times of about 1 s with normal jitter, [steps, ranks]."""
    return np.maximum(1 + jitter * np.random.default_rng(seed).standard_normal((steps, ranks)), 0.05)


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_healthy_ranks_with_a_fifth_of_jitter_are_never_named(ranks, log_every):
    for seed in range(3):
        assert play(times(2000, ranks=ranks, seed=seed), log_every=log_every) == []


def test_pauses_are_no_straggler():
    """Every hundredth step of a rank takes twenty times as long."""
    own = times(2000)
    own[np.random.default_rng(1).random(own.shape) < 0.01] *= 20
    assert play(own) == [] == play(own, log_every=10)


def test_a_rank_that_is_twice_as_slow_is_named_within_ten_steps():
    for seed in range(20):
        own = times(40, jitter=0.05, seed=seed)
        own[9:, 1] *= 2  # from step 10
        ((step, found),) = play(own)
        assert step <= 19 and (found.rank, found.since, found.phase) == (1, 10, "compute")
        assert found.factor == pytest.approx(2, rel=0.15) and found.seconds == pytest.approx(1, rel=0.2)


def test_much_jitter_needs_more_steps_but_finds_it_too():
    for seed in range(10):
        own = times(200, seed=seed)
        own[99:, 2] *= 1.5
        step, found = play(own)[0]
        assert found.rank == 2 and 100 < step <= 160 and found.factor == pytest.approx(1.5, rel=0.25)


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_what_is_tolerated_is_a_setting(factor):
    own = times(400, jitter=0.05)
    own[:, 3] *= 1.35
    assert bool(play(own, factor=factor)) == (factor == 1.2)


def test_the_phase_is_the_part_that_is_longer():
    own, data = times(40, jitter=0.02), np.full((40, RANKS), 0.1)
    data[9:, 1] += 1
    own[9:, 1] += 1
    ((_, found),) = play(own, data=data)
    assert (found.rank, found.phase) == (1, "data")


def test_ranks_are_compared_with_those_that_have_the_same_work():
    """Two pipeline stages, one of which has three times as much to do; rank 3 is the slow one of its stage."""
    own = times(60, ranks=6, jitter=0.03)
    own[:, 3:] *= 3
    assert play(own, peers=[[0, 1, 2], [3, 4, 5]]) == []
    own[20:, 3] *= 1.6
    ((_, found),) = play(own, peers=[[0, 1, 2], [3, 4, 5]])
    assert found.rank == 3 and found.factor == pytest.approx(1.6, rel=0.1)


def test_a_rank_without_peers_is_not_judged():
    own = times(60, ranks=2, jitter=0.03)
    own[:, 1] *= 9
    assert play(own, peers=[[0], [1]]) == []


def test_it_is_reported_once_until_it_changes_and_when_it_ends():
    own = times(400, jitter=0.05)
    own[20:100, 1] *= 1.6
    own[100:200, 1] *= 6.4
    found = play(own)
    assert [(one.rank, one.ended) for _, one in found] == [(1, False), (1, False), (1, True)]
    assert [one.factor for _, one in found[:2]] == [pytest.approx(1.6, rel=0.15), pytest.approx(6.4, rel=0.15)]
    assert found[0][0] < 40 and 100 < found[1][0] < 120 and 200 < found[2][0] < 220


def test_one_slow_rank_of_two_is_named_and_not_the_other():
    own = times(60, ranks=2, jitter=0.05)
    own[10:, 0] *= 2
    ((_, found),) = play(own)
    assert found.rank == 0


def test_the_first_line_of_an_attempt_does_not_count():
    own = times(60, jitter=0.05)
    own[:10, 1] = 100.0
    assert play(own, log_every=10) == []


def test_times_that_are_not_measured_are_no_excess():
    assert play(np.zeros((30, RANKS))) == []


@pytest.mark.parametrize("values", [[1, 5], [3, 1, 2], [4, 4, 1, 9], [2, 7, 7, 7, 1, 3]])
def test_the_median_of_the_others(values):
    found = median_of_others(np.array(values, float))
    assert found.tolist() == [np.median(values[:i] + values[i + 1 :]) for i in range(len(values))]
