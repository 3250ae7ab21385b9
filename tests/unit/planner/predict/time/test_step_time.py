"""Step times of devices that compute and communicate at once: what changes them, and in which direction."""

from dataclasses import replace
from typing import Any

import pytest

from ingot.planner.predict.time.constants import PRIOR
from ingot.planner.predict.time.exposed import data_parallel, host_update
from ingot.planner.predict.time.links import line_times
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.software import INGOT, Software
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters

LLAMA8, LLAMA70, QWEN = (load_model(name).arch for name in ("llama3-8b", "llama3-70b", "qwen3-30b-a3b"))
NODE, NODES = load_cluster("8xh100"), load_cluster("4x8xh100")


def run_of(arch, micro_batches=8, micro_batch=1, seq_len=8192, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    batch = micro_batches * micro_batch * parallel.data_ranks
    train = Train(steps=1, seq_len=seq_len, global_batch=batch, micro_batch=micro_batch)
    arch = replace(arch, max_seq_len=max(arch.max_seq_len, seq_len))
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train, parallel=parallel)


def seconds(run: RunConfig, cluster: Cluster = NODE, **properties: Any) -> float:
    found = estimate(run, cluster, replace(INGOT, **properties), PRIOR)
    assert found
    return found.seconds


def test_terms_sum_to_the_step_and_say_how_they_came_about():
    found = estimate(run_of(LLAMA70, tp=4, pp=2, dp_shard=4, micro_batches=8), NODES, constants=PRIOR)
    assert found and found.seconds == sum(term.value for term in found.terms.values())
    assert all(term.formula and term.value >= 0.0 for term in found.terms.values())
    assert set(found.communication) == {"tp", "shard", "pp"}
    for line in found.communication.values():
        assert 0.0 <= line.exposed_seconds <= line.seconds and line.sent_bytes > 0
    assert found.communication["shard"].crosses and not found.communication["tp"].crosses
    assert 0.05 < found.bubble < 0.3


def test_no_rate_no_time():
    assert estimate(run_of(LLAMA8), replace(NODE, peak_flops={}), INGOT, PRIOR) is None
    assert estimate(run_of(LLAMA8), replace(NODE, memory_bandwidth=0.0), INGOT, PRIOR) is None


@pytest.mark.parametrize(
    ("slower", "faster", "least"),
    [
        ({"kernels": "eager"}, {"kernels": "compiled"}, 1.05),
        ({"kernels": "compiled"}, {"kernels": "tuned"}, 1.01),
        ({"attention": "unfused"}, {"attention": "flash"}, 1.1),
        ({}, {"attention": "tuned"}, 1.02),
        ({"biased_scores": True}, {}, 1.05),
        ({}, {"recipe": "tensorwise", "kernels": "tuned"}, 1.1),
        ({"recipe": "rowwise"}, {"recipe": "tensorwise"}, 1.05),
        ({"overlap_data": False}, {}, 1.01),
    ],
)
def test_named_properties_of_software_decide(slower, faster, least):
    run = run_of(LLAMA8, dp_shard=8, zero=3)
    assert seconds(run, **slower) > least * seconds(run, **faster)


def test_what_tensor_parallel_ranks_exchange_is_hidden_in_part():
    run = run_of(LLAMA70, tp=8)
    waits, hides = (estimate(run, NODE, replace(INGOT, overlap_tensor=o), PRIOR) for o in (False, True))
    assert waits and hides
    name = "tensor-parallel collectives"
    assert hides.terms[name].value == pytest.approx(PRIOR.tensor_exposed * waits.terms[name].value)
    for chunks, exposed in ((2, 0.5), (4, PRIOR.tensor_exposed)):
        found = estimate(run_of(LLAMA70, tp=8, tp_chunks=chunks), NODE, INGOT, PRIOR)
        assert found and found.communication["tp"].sent_bytes == waits.communication["tp"].sent_bytes
        times = found.communication["tp"].seconds
        assert times > waits.communication["tp"].seconds, "each chunk pays for a call"
        assert found.terms[name].value == pytest.approx(exposed * times)


def test_recomputation_costs_what_it_repeats():
    half_of_them: dict[str, Any] = {"products_recomputed": 0.5}
    none, full = (seconds(run_of(LLAMA8, recompute=recompute)) for recompute in ("none", "full"))
    core = seconds(run_of(LLAMA8, recompute="selective"), core_recompute=True)
    half = seconds(run_of(LLAMA8, recompute="selective"), **half_of_them)
    assert none < core < half < full
    assert 1.2 < full / none < 1.34


def test_a_batch_in_more_parts_is_dearer_where_parts_are_small():
    def each(micro_batch: int) -> float:
        return seconds(run_of(LLAMA8, micro_batches=16 // micro_batch, micro_batch=micro_batch, seq_len=512))

    assert each(1) > each(4) > each(16)


def test_hosts_limit_experts_that_are_started_one_by_one():
    run = run_of(QWEN, dp_shard=8, ep=8, seq_len=1024)
    by_hand, recorded = (estimate(run, NODE, replace(INGOT, graphs=g), PRIOR) for g in (False, True))
    assert by_hand and recorded
    assert by_hand.terms["launches"].value > 0.1 * by_hand.seconds
    assert recorded.terms["launches"].value < 0.02 * recorded.seconds


def test_senders_that_wait_lose_more_than_those_that_go_on():
    run = run_of(LLAMA70, micro_batches=16, pp=8, dp_shard=1)
    cluster = replace(NODES, devices_per_node=1, nodes=8)
    assert seconds(run, cluster, overlap_pipeline=False) > 1.01 * seconds(run, cluster)
    wide = run_of(LLAMA70, micro_batches=16, pp=4, tp=4, sequence=False)
    waits: dict[str, Any] = {"overlap_pipeline": False}
    assert seconds(wide, NODES, **waits, scatter_sends=True) < seconds(wide, NODES, **waits, scatter_sends=False)


def test_slow_networks_show_where_parameters_are_gathered_across_them():
    run = run_of(LLAMA8, dp_shard=32, zero=3, micro_batches=1)
    slow = replace(NODES, network_bandwidth=2e9)
    copies = run_of(LLAMA8, dp_shard=8, dp_replicate=4, zero=3, micro_batches=1)
    assert seconds(run, slow) > 1.5 * seconds(run, NODES)
    assert seconds(copies, slow) < seconds(run, slow)


def test_a_slice_of_tpus_is_planned_like_anything_else():
    found = estimate(run_of(LLAMA8, dp_shard=128, zero=3), load_cluster("v5p-256"), Software(graphs=True), PRIOR)
    assert found and found.terms["launches"].value == 0.0
    tokens = 8 * 128 * 8192 / found.seconds / 128
    assert 0.35 < tokens * 6 * 8e9 / 459e12 < 0.75  # of its peak


def test_the_lower_bound_of_any_step_is_its_products_at_the_peak():
    for settings in ({"dp_shard": 8}, {"tp": 8}, {"pp": 8, "micro_batches": 64}, {"cp": 2}):
        run = run_of(LLAMA8, **settings)
        work = 6 * 7.5e9 * run.tokens_per_step / (run.parallel.world_size * 989e12)
        assert work < seconds(run) < 4 * work, settings


def test_copies_overlap_the_last_micro_batch_only():
    """More micro-batches hide more of the shards' traffic, but not of the all-reduce between copies."""
    slow = replace(NODES, network_bandwidth=1e9)
    few, many = (estimate(run_of(LLAMA8, dp_shard=8, dp_replicate=4, zero=3, micro_batches=n), slow) for n in (1, 16))
    assert few and many
    alone = many.communication["dp_replicate"].seconds
    assert many.terms["collectives"].value > 0.5 * alone, "one of sixteen micro-batches cannot hide it"
    assert many.terms["collectives"].value == pytest.approx(few.terms["collectives"].value, rel=0.3)


def test_nothing_hides_the_first_gather_and_the_last_reduction():
    (position,) = positions(run_of(LLAMA8, dp_shard=8, zero=3, micro_batches=4))
    times = line_times(position, NODE, PRIOR)
    shards, units = times["shard"].seconds, sum(map(position.units, position.stages))
    waited = shards / units / 4
    found = data_parallel(position, NODE, times, 1e6, PRIOR).value
    assert found == pytest.approx(waited + PRIOR.interference * (shards - waited))


def test_parameters_on_the_host_travel_with_every_micro_batch():
    """To the device before forward and backward, and their gradients back; then AdamW moves seven numbers of each."""
    run = run_of(LLAMA8, dp_shard=8, zero=3, micro_batches=4, offload="cpu", offload_parameters=True)
    (position,) = positions(run)
    seconds_once = count_parameters(LLAMA8) / 8 * 4 / NODE.host_bandwidth
    found = host_update(position, NODE, 0.0, PRIOR)
    assert found and found.value == pytest.approx((7 + 4 * 3) * seconds_once)
