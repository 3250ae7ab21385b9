"""The evidence that costs a machine its place, from times with seeded jitter: more than that of a report."""

import numpy as np
import pytest

from ingot.trainer.telemetry.slow_machines import LEAST_STEPS, SlowMachines
from ingot.trainer.telemetry.stragglers import StragglerWatch

from .test_stragglers import times

WAITED = 100.0  # seconds, of steps that are 1 s longer


def play(own, *, data=None, log_every=1, each=1, seconds=WAITED):
    """Return (step, straggler) for each event about a rank whose machine may be drained, with `each` ranks of a
    machine."""
    ranks = own.shape[1]
    watch, machines = StragglerWatch([list(range(ranks))], 1.2), SlowMachines(seconds, each, ranks // each)
    data, found = np.zeros_like(own) if data is None else data, []
    for end in range(log_every, len(own) + 1, log_every):
        line = slice(end - log_every, end)
        news = watch.take(end, log_every, np.median(own[line], axis=0), np.median(data[line], axis=0))
        news = machines.take(log_every, float(own[line].max(axis=1).mean()), watch.named(), news)
        found += [(end, one) for one in news if one.slowdown is not None]
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
    assert 19 + LEAST_STEPS <= step <= 19 + LEAST_STEPS + 10


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


def test_a_later_report_still_says_that_the_machine_may_be_drained():
    own = times(400, jitter=0.05)
    own[19:, 1] *= 2
    own[250:, 1] *= 3
    own[330:, 1] /= 6
    (_, first), (step, changed) = play(own)
    assert first.factor == pytest.approx(2, rel=0.15) and changed.factor > 3 and 250 < step < 280
