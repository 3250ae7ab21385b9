"""Published intervals and overheads, limits of the formulas, and a simulation of jobs that fail."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.expect import refused

from ingot.theory.failures import (
    PUBLISHED_RATES,
    daly_interval,
    ettr,
    first_order_overhead,
    goodput,
    job_mttf_seconds,
    poisson_quantile,
    renewal_ettr,
    spare_nodes,
    young_interval,
)

TEN_MINUTES = 600
# M, w, then in seconds Young's and Daly's intervals, then per cent lost at Young's, without and with a restart.
EXAMPLES = {
    "16,384 H100 of Llama 3, blocking": (11_124, 30, 817, 797, 7.34, 12.74),
    "16,384 H100 of Llama 3, a copy to the host": (11_124, 5, 334, 330, 3.00, 8.39),
    "1,024 H100 at the same rate": (178_161, 30, 3270, 3250, 1.84, 2.17),
    "1,024 GPUs that fail every 7.9 hours": (28_440, 60, 1847, 1808, 6.50, 8.61),
    "131,072 GPUs": (828, 5, 91, 88, 10.99, 83.45),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_intervals_and_overheads_of_jobs_of_known_size(example):
    mttf, stall, young, daly, alone, with_restart = example
    assert round(young_interval(mttf, stall)) == young
    assert round(daly_interval(mttf, stall)) == daly
    every = young_interval(mttf, stall)
    assert round(100 * first_order_overhead(mttf, stall, every), 2) == alone
    assert round(100 * first_order_overhead(mttf, stall, every, TEN_MINUTES), 2) == with_restart


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_approximation_holds_while_losses_are_small_and_is_given_up_beyond(example):
    mttf, stall, _, _, _, lost = example
    every = daly_interval(mttf, stall)
    useful = goodput(mttf, stall, every, TEN_MINUTES)
    near = ettr(mttf, stall, every, TEN_MINUTES)
    assert useful.value == renewal_ettr(mttf, stall, every, TEN_MINUTES)
    if lost < 50:
        assert near == pytest.approx(useful.value, abs=0.01)
        assert f"{near:.1%}" in useful.formula
    else:
        assert useful.value == pytest.approx(0.433, abs=0.001)  # 21% by the approximation
        assert near < useful.value / 2
        assert "does not hold" in useful.formula


@pytest.mark.parametrize(("mttf", "stall", "restart"), [(900.0, 5.0, 600.0), (3000.0, 60.0, 300.0)])
def test_a_simulated_job_has_the_goodput_that_was_derived(mttf, stall, restart):
    """Plays failures one by one: they strike steps, checkpoints and restarts alike."""
    every, draw = daly_interval(mttf, stall), random.Random(7).expovariate
    clock, done, segments = 0.0, 0, 20_000
    while done < segments:
        failure = draw(1 / mttf)
        if failure >= every + stall:
            clock, done = clock + every + stall, done + 1
            continue
        clock += failure
        while (again := draw(1 / mttf)) < restart:  # the restart fails too
            clock += again
        clock += restart
    assert goodput(mttf, stall, every, restart).value == pytest.approx(segments * every / clock, rel=0.02)


@given(st.floats(200, 1e7), st.floats(0.1, 100), st.floats(0, 2000), st.floats(1.01, 10))
def test_goodput_falls_with_every_loss_and_stays_a_share(mttf, stall, restart, worse):
    every = daly_interval(mttf, stall)
    useful = goodput(mttf, stall, every, restart).value
    assert 0 <= useful <= 1
    assert goodput(mttf / worse, stall, every, restart).value <= useful
    assert goodput(mttf, stall, every, restart * worse).value <= useful
    assert goodput(mttf, stall * worse, every, restart).value <= useful


@given(st.floats(1e3, 1e7), st.floats(0.1, 100))
def test_daly_interval_is_close_to_the_best(mttf, stall):
    every = daly_interval(mttf, stall)
    best = max(renewal_ettr(mttf, stall, every * 1.02**i, 0) for i in range(-60, 61))
    assert renewal_ettr(mttf, stall, every, 0) >= best - 0.003


def test_a_job_without_failures_loses_only_its_checkpoints():
    assert job_mttf_seconds(100, 0.0) == math.inf
    assert daly_interval(math.inf, 30) == math.inf
    assert goodput(math.inf, 30, 970, TEN_MINUTES).value == pytest.approx(0.97)


def test_a_checkpoint_that_takes_longer_than_jobs_live():
    assert daly_interval(100, 250) == 100
    assert goodput(1, 1, 1, 10_000).value == 0.0  # no number is as small


def test_no_time_between_checkpoints_is_refused():
    with refused("E-CHECKPOINT-INTERVAL", seconds=0.0):
        goodput(1e5, 30, 0, TEN_MINUTES)


def test_mttf_of_published_clusters():
    """Llama 3: 3.09 hours on 2,048 nodes by 419 failures in 54 days; Kokolis et al. project 1.8 h for 16,384 GPUs and
    0.23 h for 131,072 at RSC-1's rate."""
    assert job_mttf_seconds(2048, 419 / (2048 * 54)) / 3600 == pytest.approx(3.09, abs=0.005)
    rsc1 = PUBLISHED_RATES["rsc1"].per_node_day
    assert job_mttf_seconds(2048, rsc1) / 3600 == pytest.approx(1.80, abs=0.005)
    assert job_mttf_seconds(16_384, rsc1) / 3600 == pytest.approx(0.23, abs=0.005)


def test_nodes_of_other_sizes_fail_by_their_share_of_devices():
    rate = PUBLISHED_RATES["llama3"]
    assert rate.of_nodes_with(4) == pytest.approx(rate.per_node_day / 2)
    assert job_mttf_seconds(256, rate.of_nodes_with(4)) == pytest.approx(job_mttf_seconds(128, rate.per_node_day))


@pytest.mark.parametrize("mean", [0.02, 1.0, 9.98, 300.0, 5000.0])
def test_poisson_quantiles_are_the_least_that_hold(mean):
    """Against the distribution summed term by term."""
    below, term, k = 0.0, math.exp(-mean) if mean < 700 else 0.0, poisson_quantile(mean, 0.99)
    if not term:  # e to the -5000 is no number: the normal distribution is close instead
        assert k == pytest.approx(mean + 2.326 * math.sqrt(mean), abs=2)
        return
    for i in range(k):
        below, term = below + term, term * mean / (i + 1)
    assert below < 0.99 <= below + term


def test_spares_of_published_pools():
    """OPT-175B kept 12 to 18 spare hosts beside 128; BLOOM 4 beside 48."""
    assert 12 <= spare_nodes(128, PUBLISHED_RATES["opt"].per_node_day, 5).value <= 18
    assert spare_nodes(48, PUBLISHED_RATES["bloom"].per_node_day, 5).value in (3, 4)
    assert spare_nodes(48, 0.0, 5).value == 0
