"""Plans of other layouts than plain sharding: their bill, their time, and what they are warned of."""

from dataclasses import replace

import pytest

from ingot.planner.predict.memory.peak_memory import live_bill, position_bill
from ingot.planner.predict.time.constants import PRIOR, fitted
from ingot.planner.predict.time.links import crosses_nodes, line_times
from ingot.planner.predict.time.step_time import rank_work, step_seconds
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.plan import make_plan
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions
from ingot.theory.params import count_parameters

LLAMA8, LLAMA70 = load_model("llama3-8b").arch, load_model("llama3-70b").arch
NODE, NODES = load_cluster("8xh100"), load_cluster("128x8xh100")


def run_of(arch, micro_batches=8, micro_batch=1, seq_len=8192, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    train = Train(
        steps=10,
        seq_len=seq_len,
        global_batch=micro_batches * micro_batch * parallel.data_ranks,
        micro_batch=micro_batch,
    )
    return RunConfig(
        name="x", model=replace(arch, max_seq_len=seq_len), data=Data(tokens="t"), train=train, parallel=parallel
    )


def total(bill) -> float:
    return sum(term.value for term in bill.values())


def test_the_bill_is_that_of_the_fullest_pipeline_rank():
    run = run_of(LLAMA8, pp=4)
    everyone = [total(position_bill(position, "cuda")) for position in positions(run)]
    assert total(live_bill(run, "cuda")) == max(everyone) > min(everyone)


@pytest.mark.parametrize("form", [{"tp": 4}, {"pp": 4}, {"dp_shard": 4, "zero": 3}, {"dp_shard": 4, "zero": 2}])
def test_every_form_of_splitting_needs_less_memory_per_rank(form):
    assert total(live_bill(run_of(LLAMA8, **form), "cuda")) < 0.8 * total(live_bill(run_of(LLAMA8), "cuda"))


def test_zero_stages_recompute_and_offload_each_save():
    stages = [total(live_bill(run_of(LLAMA8, dp_shard=8, zero=z), "cuda")) for z in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)
    how = [total(live_bill(run_of(LLAMA8, recompute=r), "cuda")) for r in ("none", "selective", "full")]
    assert how == sorted(how, reverse=True)
    bill = live_bill(run_of(LLAMA8, dp_shard=8, zero=3, offload="cpu", offload_parameters=True), "cuda")
    assert bill["optimizer"].value == bill["weights"].value == 0 < bill["gathered"].value


def test_on_a_cpu_the_host_is_the_device():
    run = run_of(LLAMA8, dp_shard=8, zero=3)
    offloaded = run_of(LLAMA8, dp_shard=8, zero=3, offload="cpu", offload_parameters=True)
    assert total(live_bill(offloaded, "cpu")) == total(live_bill(run, "cpu"))


def test_axes_cross_nodes_from_the_inside_out():
    parallel = Parallel(tp=4, dp_shard=2, dp_replicate=4, pp=2)
    crossing = {line for line in ("tp", "shard", "dp_replicate", "pp") if crosses_nodes(parallel, line, NODES)}
    assert crossing == {"dp_replicate", "pp"}
    assert not any(crosses_nodes(Parallel(), line, NODES) for line in ("tp", "shard", "pp"))
    (position, _) = positions(run_of(LLAMA8, tp=4, pp=2))
    alone = replace(PRIOR, link_share=1.0)
    times = line_times(position, replace(NODE, link_seconds=0.0, sharp=False), alone)
    assert times["tp"].seconds == pytest.approx(times["tp"].sent / NODE.link_bandwidth)
    assert line_times(position, NODE, PRIOR)["tp"].seconds > times["tp"].seconds


def test_a_rack_is_one_domain_though_it_has_many_nodes():
    rack, run = load_cluster("72xgb200"), run_of(LLAMA8, tp=8)
    assert not crosses_nodes(run.parallel, "tp", rack)
    assert crosses_nodes(run.parallel, "tp", replace(rack, domain_devices=0))


def test_tensor_parallelism_inside_a_node_is_dear_and_across_nodes_dearer():
    inside = step_seconds(run_of(LLAMA70, tp=8), NODE)
    outside = step_seconds(run_of(LLAMA70, tp=8), replace(NODES, devices_per_node=4))
    assert inside and outside
    ratio = outside["tensor-parallel collectives"].value / inside["tensor-parallel collectives"].value
    reached = fitted()
    slower = NODE.link_bandwidth * reached.link_share / (4 * NODES.network_bandwidth * reached.network_share)
    assert ratio == pytest.approx(slower, rel=0.1)  # 4 cards in a node


def test_the_bubble_is_that_of_the_schedule():
    """Equal stages, no head to speak of: (P-1)/(M+P-1) of the step (Huang et al. 2019), an interleaved one half."""
    arch = replace(LLAMA8, vocab_size=64, num_layers=16)
    shares = {}
    for schedule in ("1f1b", "gpipe", "interleaved", "zb_v"):
        parts = step_seconds(run_of(arch, pp=4, schedule=schedule), replace(NODE, link_bandwidth=0.0, op_seconds=0.0))
        assert parts is not None
        busy = sum(parts[name].value for name in ("matrix products", "attention", "everything elementwise"))
        shares[schedule] = parts["pipeline bubble"].value / (busy + parts["pipeline bubble"].value)
    assert shares["1f1b"] == pytest.approx(3 / 11, rel=0.1) == shares["gpipe"]
    assert shares["zb_v"] < shares["interleaved"] < shares["1f1b"]


def test_on_a_cpu_a_pipeline_has_a_bubble_too():
    machine = Cluster(
        name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30, memory_bandwidth=8e9,
        peak_flops={"bf16": 150e9}, op_seconds=4e-5, step_overhead_seconds=0.002, measured="2026-01-01",
    )  # fmt: skip
    parts = step_seconds(run_of(load_model("tiny").arch, seq_len=256, pp=2), machine)
    assert parts and parts["pipeline bubble"].value > 0 and "collectives" not in parts


def test_the_busiest_rank_of_a_pipeline_multiplies_the_head():
    whole = 6 * 8192 * 8 * (count_parameters(LLAMA8) - LLAMA8.vocab_size * LLAMA8.d_model)
    assert rank_work(run_of(LLAMA8, pp=2), "cuda").matmul_flops > 0.5 * whole


@pytest.mark.parametrize(
    ("settings", "cluster", "words"),
    [
        (
            {"tp": 8, "dp_shard": 2},
            replace(NODES, devices_per_node=4),
            ("tp = 8 spans nodes of 4", "GiB per rank and step ("),
        ),
        (
            {"dp_shard": 64},
            replace(NODES, network_bandwidth=1e9),
            ("zero 3 spans nodes", "dp_shard = 8, dp_replicate = 8"),
        ),
        ({"pp": 8, "micro_batches": 4}, NODE, ("ranks wait", "use more micro-batches")),
        ({"sequence": False}, NODE, ("parallel.sequence = false has no effect",)),
        ({"reshard": False}, NODE, ("parallel.reshard = false has no effect with zero 1",)),
        ({"zero": 2}, NODE, ("parallel.zero = 2 splits nothing",)),
        ({"unit_layers": 4}, NODE, ("parallel.unit_layers = 4 has no effect",)),
    ],
)
def test_what_disappoints_is_said_with_the_number(settings, cluster, words):
    warnings = make_plan(run_of(LLAMA8, **settings), cluster).warnings
    assert any(all(word in warning for word in words) for warning in warnings), warnings


def test_a_layout_inside_its_nodes_is_not_warned_of():
    warnings = make_plan(run_of(LLAMA70, tp=8, pp=4, dp_shard=4, micro_batches=32, recompute="full"), NODES).warnings
    assert not any(word in w for w in warnings for word in ("spans nodes", "ranks wait", "no effect"))
