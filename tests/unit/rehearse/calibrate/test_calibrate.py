"""Calibration: rates are recovered from timings, and the ranks really time the trainer's step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.expect import refused

from ingot.planner.predict.memory.peak_memory import live_bill
from ingot.planner.predict.time.step_time import step_seconds
from ingot.rehearse.calibrate import calibrate
from ingot.rehearse.calibrate.calibrate import Timing, bounded_fit, calibrate_cpu, fit, shapes
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig

BARE = Cluster(name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30)
TRUE = replace(
    BARE, memory_bandwidth=9e9, peak_flops={"bf16": 2e11, "fp32": 5e10}, attention_efficiency=0.4, op_seconds=4e-5,
    step_overhead_seconds=3e-3, runtime_bytes=350 << 20, fragmentation=0.4, link_bandwidth=1e9, link_seconds=2e-4,
)  # fmt: skip

LIMITS = {"matmul": 1e12, "attention": 5e11, "bandwidth": 5e10, "op_seconds": 1e-6}
LIMITS |= {"link_bandwidth": 5e9, "link_seconds": 2e-5}


def timings_of(cluster: Cluster, noise: float = 0.0) -> list[Timing]:
    random = np.random.default_rng(1)
    timings = []
    for run in shapes(2):
        parts = step_seconds(run, cluster)
        assert parts is not None
        live = sum(t.value for t in live_bill(run, "cpu").values())
        peak = live * (1 + cluster.fragmentation) + cluster.runtime_bytes
        seconds = sum(t.value for t in parts.values()) * (1 + noise * random.standard_normal())
        timings.append(Timing(run, seconds, round(peak)))
    return timings


def test_exact_timings_give_back_the_rates():
    found = fit(timings_of(TRUE), LIMITS, BARE)
    rates = ("memory_bandwidth", "op_seconds", "step_overhead_seconds", "link_bandwidth", "link_seconds")
    for name in (*rates, "attention_efficiency", "fragmentation"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert found.peak_flops["bf16"] == pytest.approx(2e11, rel=0.01)
    assert found.runtime_bytes == pytest.approx(350 << 20, rel=0.01)
    assert found.measured and found.resolution < 0.01


def test_noisy_timings_still_predict_other_shapes():
    from ingot.planner.request.presets import load_model
    from ingot.schema.parallel import Parallel
    from ingot.schema.run import Data, RunConfig, Train

    found = fit(timings_of(TRUE, noise=0.05), LIMITS, BARE)
    train = Train(steps=1, seq_len=256, global_batch=24, micro_batch=12)
    run = RunConfig(
        name="x", model=load_model("tiny").arch, data=Data(tokens=""), train=train, parallel=Parallel(dp_shard=2)
    )
    seconds = [sum(t.value for t in (step_seconds(run, c) or {}).values()) for c in (found, TRUE)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.15)


def test_wild_timings_give_no_rate_beyond_its_limit():
    random = np.random.default_rng(2)
    for _ in range(20):
        wild = [replace(t, seconds=t.seconds * random.uniform(0.2, 5)) for t in timings_of(TRUE)]
        found = fit(wild, LIMITS, BARE)
        assert 0 < found.peak_flops["bf16"] <= 1e12 * (1 + 1e-9) and 0 < found.memory_bandwidth <= 5e10 * (1 + 1e-9)
        assert found.link_seconds >= 2e-5 and 0 < found.link_bandwidth <= 5e9 * (1 + 1e-9)
        assert found.op_seconds >= 1e-6 and found.peak_flops["fp32"] > 0 and found.fragmentation >= 0


def test_a_single_rank_has_no_links():
    limits = {name: value for name, value in LIMITS.items() if not name.startswith("link")}
    timings = [t for t in timings_of(TRUE) if t.run.parallel.tp == 1]
    found = fit(timings, limits, BARE)
    assert (found.link_bandwidth, found.link_seconds) != (0.0, 0.0)  # these timings have collectives
    alone = [Timing(run, 0.1, 1 << 29) for run in shapes(1)]
    found = fit(alone, limits, replace(BARE, devices_per_node=1))
    assert (found.link_bandwidth, found.link_seconds) == (0.0, 0.0)


def test_the_fit_stays_at_the_bound_of_what_the_data_denies():
    features = np.array([[1.0, 5.0], [2.0, 3.0], [3.0, 1.0], [4.0, 0.5]])
    per_unit = bounded_fit(features, np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.0]))
    assert per_unit == pytest.approx([1.0, 0.0], abs=1e-9)
    assert bounded_fit(features, np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 0.01]))[1] == 0.01


def test_every_device_rate_is_measured():
    torch = pytest.importorskip("torch")
    from ingot.rehearse.calibrate.rank import measure_device

    torch.set_num_threads(1)
    rates = measure_device(torch.device("cpu"), torch.float32, width=128, heads=2, seq_len=64)
    assert rates.keys() == LIMITS.keys() - {"link_bandwidth", "link_seconds"}
    assert all(0 < rate < math.inf for rate in rates.values())


def test_limits_are_the_best_that_was_seen():
    calibrate_rank = pytest.importorskip("ingot.rehearse.calibrate.rank")
    busy, quiet = {"matmul": 6e10, "op_seconds": 3e-6}, {"matmul": 3e11, "op_seconds": 4e-6}
    assert calibrate_rank.fastest([busy, quiet]) == {"matmul": 3e11, "op_seconds": 3e-6}


def test_links_that_were_timed_exactly_are_found():
    link_rates = pytest.importorskip("ingot.rehearse.calibrate.rank")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "send")
    rows = np.array([link_rates.features(kind, 2, size) for kind in kinds for size in (1 << 12, 1 << 22)])
    found = link_rates.fitted_links(rows, rows @ [1 / 2e9, 5e-5])
    assert found == pytest.approx({"link_bandwidth": 2e9, "link_seconds": 5e-5})
    odd = link_rates.fitted_links(rows, np.linspace(2, 1, len(rows)))  # larger ones faster: nothing to be fitted
    assert found.keys() == odd.keys() and all(value > 0 for value in odd.values())


def test_two_ranks_measure_their_links(fork_ranks):
    def measured(rank, ranks):
        import torch

        from ingot.rehearse.calibrate.rank import measure_links

        return measure_links(torch.device("cpu"))

    found, _ = fork_ranks(measured, 2)
    assert found.keys() == {"link_bandwidth", "link_seconds"} and all(0 < rate < math.inf for rate in found.values())
    assert fork_ranks(measured, 1) == [{}]


def test_a_rank_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(calibrate.sys, "executable", "/bin/false")
    with refused("E-CALIBRATION-RANK"):
        calibrate_cpu(BARE)


# A program in the place of the ranks: who can listen on the port of the store, and with what?
BINDER = """
import json, os, socket
try:
    socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    free = True
except OSError:
    free = False
inherited = socket.socket(fileno=int(os.environ["INGOT_STORE_FD"]))
print(json.dumps({"free": free, "inherited": inherited.getsockname()[1] == int(os.environ["MASTER_PORT"])}))
"""


def test_the_port_of_the_ranks_is_bound_before_they_start(monkeypatch):
    monkeypatch.setattr(calibrate, "_RANK", ("-c", BINDER))
    assert calibrate._start_ranks(1) == {"free": False, "inherited": True}


# The program of a rank, with one round of every measurement, of short sequences and small products.
QUICK_RANK = """
import sys
from ingot.rehearse.calibrate import rank
from tests.unit.rehearse.calibrate.test_calibrate import short_shapes
rank._QUIET_SECONDS = rank._BUSY_SECONDS = 0.0
rank._LEAST_ROUNDS = rank._REPEATS = 1
rank.shapes = short_shapes
measure = rank.measure_device
rank.measure_device = lambda device, dtype, **sizes: measure(device, dtype, width=128, heads=2, seq_len=64)
sys.exit(rank.main())
"""


def short_shapes(ranks: int) -> tuple[RunConfig, ...]:
    return tuple(replace(r, train=replace(r.train, seq_len=max(r.train.seq_len // 16, 16))) for r in shapes(ranks))


@pytest.mark.slow
def test_one_rank_of_this_machine(monkeypatch, pytestconfig):
    """The real program. A busy machine gives other rates, so only their signs are compared."""
    pytest.importorskip("torch")
    monkeypatch.setattr(calibrate, "_RANK", ("-c", QUICK_RANK))
    monkeypatch.setattr(calibrate, "shapes", short_shapes)
    monkeypatch.setattr(calibrate, "usable_cores", lambda: 1)  # several threads would wait for each other in a loop
    monkeypatch.chdir(pytestconfig.rootpath)  # where the program finds this file
    cluster = calibrate_cpu(replace(BARE, devices_per_node=1))
    rates = (*cluster.peak_flops.values(), cluster.memory_bandwidth, cluster.op_seconds, cluster.attention_efficiency)
    assert all(0 < rate < math.inf for rate in rates) and cluster.measured
    assert 100 << 20 < cluster.runtime_bytes < 2 << 30


def test_a_measured_gpu_keeps_what_is_not_measured(monkeypatch):
    published = Cluster(
        name="8xh100", device="cuda", devices_per_node=8, memory_bytes=80 << 30,
        peak_flops={"bf16": 9e14, "fp32": 6e13}, link_bandwidth=450e9, fragmentation=0.08,
    )  # fmt: skip
    rates = {"peak_flops": {"bf16": 9.89e14}, "matmul_efficiency": 0.7, "memory_bandwidth": 3e12}
    monkeypatch.setattr(calibrate, "_start_ranks", lambda ranks, *arguments: dict(rates))
    found = calibrate.calibrate_gpu(published)
    assert found.peak_flops == {"bf16": 9.89e14, "fp32": 6e13}
    assert (found.link_bandwidth, found.fragmentation, found.matmul_efficiency) == (450e9, 0.08, 0.7)
