"""The evidence that costs a machine its place, from times with seeded jitter: more than that of a report."""

import numpy as np
import pytest

from ingot.trainer.telemetry.slow_machines import LONG_STEPS, SlowMachines
from ingot.trainer.telemetry.stragglers import StragglerWatch

from .test_stragglers import times

WAITED = 100.0  # seconds, of steps that are 1 s longer


def play(own, *, data=None, log_every=1, each=1, seconds=WAITED):
    """Return (step, straggler) for each event after which a machine may be drained, or no more, with `each` ranks of a
    machine."""
    ranks = own.shape[1]
    watch, machines = StragglerWatch([list(range(ranks))], 1.2), SlowMachines(seconds, 1.2, each, ranks // each)
    data, found, drained = np.zeros_like(own) if data is None else data, [], set()
    for end in range(log_every, len(own) + 1, log_every):
        line = slice(end - log_every, end)
        news = watch.take(end, log_every, np.median(own[line], axis=0), np.median(data[line], axis=0))
        news = machines.take(end, log_every, float(own[line].max(axis=1).mean()), watch, news)
        for one in news:
            assert not (one.ended and one.slowdown)
            if (one.slowdown is None) == (one.rank in drained):
                found.append((end, one))
                drained ^= {one.rank}
    return found


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_machine_may_be_drained_when_others_have_waited_long_for_it(log_every):
    own = times(400, jitter=0.05)
    own[19:, 1] *= 2
    ((step, found),) = play(own, log_every=log_every)
    assert (found.rank, found.phase) == (1, "compute") and abs(found.since - 20) < log_every + 1
    assert 19 + WAITED < step <= 19 + 1.15 * WAITED + 2 * log_every + 10
    assert found.slowdown == pytest.approx(2 / 1.05, rel=0.1)  # the slowest of three others takes a little longer


def test_a_short_wait_needs_some_steps_all_the_same():
    own = times(200, jitter=0.05)
    own[19:, 1] *= 2
    ((step, _),) = play(own, seconds=0.01)
    assert 19 + LONG_STEPS <= step <= 19 + LONG_STEPS + 10


def test_what_passes_costs_no_machine():
    """Slow for 80 steps, again and again: each time the others wait for less than WAITED."""
    own = times(800, jitter=0.05)
    for begin in range(20, 800, 160):
        own[begin : begin + 80, 1] *= 2
    assert play(own) == []


def test_a_wait_for_data_costs_no_machine():
    own, data = times(400, jitter=0.05), np.full((400, 4), 0.1)
    own[19:, 1] += 1
    data[19:, 1] += 1
    assert play(own, data=data) == []


def test_a_fleet_that_is_slow_together_keeps_its_machines():
    """All ranks, then two of four: neither is a machine that is slower than the others."""
    own = times(400, jitter=0.05)
    own[19:] *= 2
    assert play(own) == []
    own = times(400, jitter=0.05)
    own[19:, :2] *= 2
    assert play(own) == []


def test_all_ranks_of_one_machine_of_three_are_one_machine():
    own = times(400, ranks=6, jitter=0.05)
    own[19:, 2:4] *= 2
    assert {one.rank for _, one in play(own, each=2)} == {2, 3}
    assert play(own[:, 2:4], each=2) == []  # alone, its ranks are equally slow


def test_healthy_ranks_with_a_fifth_of_jitter_keep_their_machines():
    assert play(times(2000), seconds=0.01) == [] == play(times(2000, ranks=2), log_every=10, seconds=0.01)


@pytest.mark.parametrize("log_every", [1, 10])
def test_jitter_is_no_break(log_every):
    """Reports end and begin again: of a few steps, a rank that is 1.3 times as slow may look recovered."""
    own = times(1000, seed=3)
    own[99:, 2] *= 1.3
    ((step, found),) = play(own, log_every=log_every)
    assert found.rank == 2 and step > 99 + WAITED / 0.4 and found.factor == pytest.approx(1.3, rel=0.15)


def test_a_machine_that_recovers_may_be_drained_no_more():
    own = times(500, jitter=0.05)
    own[19:300, 1] *= 2
    (_, slow), (step, over) = play(own)
    assert slow.slowdown > 1.8 and (over.slowdown, over.ended) == (None, True) and 300 < step <= 300 + LONG_STEPS
