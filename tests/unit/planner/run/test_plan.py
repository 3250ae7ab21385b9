"""Plans: the bill sums, the formulas hold, and published runs come out about right."""

from dataclasses import replace

import pytest

from ingot.config import from_dict, to_dict
from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.predict.time.constants import error_band
from ingot.planner.predict.time.step_time import step_seconds
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.plan import GIVEN_MFU, make_plan
from ingot.planner.search.space import links_of
from ingot.schema.arch import Arch
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.plan import Plan
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.software import INGOT
from ingot.theory.flops import train_flops_per_token

TINY = load_model("tiny").arch
MACHINE = Cluster(
    name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30, memory_bandwidth=8e9,
    peak_flops={"bf16": 150e9}, op_seconds=4e-5, step_overhead_seconds=0.002, runtime_bytes=350 << 20,
    fragmentation=0.3, usd_per_hour=0.1, measured="2026-01-01",
)  # fmt: skip


def run_of(arch: Arch, seq_len: int, global_batch: int, micro_batch: int, ranks: int, steps: int = 100) -> RunConfig:
    return RunConfig(
        name="run",
        model=replace(arch, max_seq_len=max(seq_len, arch.max_seq_len)),
        data=Data(tokens="tokens"),
        train=Train(steps=steps, seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch),
        parallel=Parallel(dp_shard=ranks),
    )


RUN = run_of(TINY, 256, 16, 8, 2)


def test_the_bill_sums_and_every_part_has_its_formula():
    plan = make_plan(RUN, MACHINE, tokens=10**6)
    assert plan.total_memory_bytes == sum(plan.memory_bytes.values())
    assert set(plan.memory_bytes) >= {"weights", "optimizer", "gathered", "activations", "runtime", "fragmentation"}
    assert all(f"memory.{kind}" in plan.formulas for kind in plan.memory_bytes)
    parts = step_seconds(RUN, MACHINE)
    assert parts and plan.step_seconds == pytest.approx(sum(t.value for t in parts.values()))
    assert all(f"time.{part}" in plan.formulas for part in parts)


def test_a_plan_survives_its_file():
    plan = make_plan(RUN, MACHINE, tokens=10**6)
    assert from_dict(Plan, to_dict(plan)) == plan


def test_total_time_money_and_passes():
    plan = make_plan(RUN, MACHINE, tokens=10**6)
    assert plan.total_seconds == pytest.approx(100 * plan.step_seconds)
    assert plan.usd == pytest.approx(0.1 * plan.total_seconds / 3600)  # one machine, whatever its ranks
    assert plan.formulas["epochs"].endswith("= 0.41")
    gpus = make_plan(run_of(TINY, 256, 16, 8, 2), load_cluster("2xh100"))
    assert gpus.usd == pytest.approx(2 * 2.8 * gpus.total_seconds / 3600)


def test_mfu_is_consistent_with_time():
    run = run_of(load_model("llama3-8b").arch, 8192, 16, 1, 8)
    plan = make_plan(run, load_cluster("8xh100"))
    flops = train_flops_per_token(run.model, 8192) * run.tokens_per_step
    assert plan.mfu == pytest.approx(flops / plan.step_seconds / (8 * 989e12))
    assert make_plan(RUN, MACHINE).mfu is None


def test_no_rate_no_time():
    plan = make_plan(RUN, replace(MACHINE, peak_flops={}))
    assert plan.step_seconds == 0 and plan.total_memory_bytes > 0
    assert any("doctor --bench" in w for w in plan.warnings)


def test_more_micro_batch_more_activations_more_ranks_less_state():
    bill = {k: t.value for k, t in memory_bill(RUN, MACHINE).items()}
    double = {k: t.value for k, t in memory_bill(run_of(TINY, 256, 32, 16, 2), MACHINE).items()}
    more = {k: t.value for k, t in memory_bill(run_of(TINY, 256, 32, 8, 4), MACHINE).items()}
    assert double["activations"] == pytest.approx(2 * bill["activations"])
    assert more["optimizer"] == pytest.approx(bill["optimizer"] / 2)
    assert more["activations"] == bill["activations"]


def test_the_peak_is_the_largest_moment():
    """A wide model with one short sequence peaks at the end of its backward, a batch of long ones at its loss."""
    short = memory_bill(run_of(replace(load_model("smollm2-135m").arch, vocab_size=4096), 16, 2, 1, 2), MACHINE)
    assert "logits" not in short and short["gradients"].value > 0
    bill = memory_bill(RUN, MACHINE)
    assert "logits" in bill and bill["gradients"].value == 0  # ZeRO-1 with one micro-batch has none before its backward


# llm-foundry's published FSDP runs without recomputation: (layers, width, heads, sequence, micro-batch, GPUs,
# accumulation, device, seconds per step). MPT's two-matrix MLP of 4D is 8D² parameters, as a SwiGLU of 8D/3.
MPT = [
    (32, 2560, 20, 2048, 10, 8, 2, "a100", 3.79),
    (24, 2048, 16, 2048, 14, 8, 4, "a100", 5.59),
    (24, 2048, 16, 512, 56, 8, 4, "a100", 4.95),
    (32, 2560, 20, 2048, 6, 64, 1, "a100-40", 1.26),
    (24, 2048, 16, 2048, 14, 8, 1, "h100", 0.63),
]


@pytest.mark.parametrize("row", MPT)
def test_published_runs_come_out_within_a_third(row):
    layers, width, heads, seq_len, micro_batch, gpus, accumulation, device, measured = row
    arch = Arch(
        vocab_size=50_368, d_model=width, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads, d_ffn=8 * width // 3, max_seq_len=seq_len,
    )  # fmt: skip
    run = run_of(arch, seq_len, micro_batch * gpus * accumulation, micro_batch, gpus)
    cluster = load_cluster(f"{max(gpus // 8, 1)}x8x{device}")
    assert make_plan(run, cluster).step_seconds == pytest.approx(measured, rel=0.33)


@pytest.mark.parametrize(
    ("run", "cluster", "tokens", "word"),
    [
        (run_of(load_model("llama3-70b").arch, 8192, 8, 1, 8), load_cluster("8xh100"), 0, "does not fit"),
        (run_of(TINY, 256, 16, 8, 2, steps=2000), MACHINE, 10**6, "8.2 passes"),
        (run_of(TINY, 256, 16, 8, 2, steps=100), MACHINE, 10**6, "tokens per parameter"),
        (run_of(replace(TINY, vocab_size=128_256), 256, 16, 8, 2), MACHINE, 0, "uint32"),
        (run_of(TINY, 256, 16, 4, 4), MACHINE, 0, "measured with 2 ranks"),
        (run_of(TINY, 256, 16, 1, 16), load_cluster("8xh100"), 0, "16 GPUs"),
        (RUN, load_cluster("2xh100"), 0, "published figures"),
    ],
)
def test_warnings(run, cluster, tokens, word):
    assert any(word in w for w in make_plan(run, cluster, tokens=tokens).warnings)


@pytest.mark.parametrize(
    ("device", "recipe", "warned"),
    [("h100", "nvfp4", True), ("a100", "rowwise", True), ("h100", "rowwise", False), ("b200", "nvfp4", False)],
)
def test_products_that_a_device_does_not_have_are_reported(device, recipe, warned):
    run = run_of(load_model("llama3-8b").arch, 8192, 8, 1, 8)
    found = make_plan(run, load_cluster(f"8x{device}"), software=replace(INGOT, recipe=recipe)).warnings
    assert any("bit matrix products" in warning for warning in found) is warned


def test_collectives_hide_behind_work_inside_a_node_and_not_over_a_slow_network():
    arch = load_model("llama3-8b").arch
    node = step_seconds(run_of(arch, 8192, 8, 1, 8), load_cluster("8xh100"))
    slow = step_seconds(run_of(arch, 8192, 64, 1, 64), replace(load_cluster("8x8xh100"), network_bandwidth=5e9))
    assert node and slow
    assert node["collectives"].value < 0.1 * node["matrix products"].value
    assert slow["collectives"].value > slow["matrix products"].value
    one = step_seconds(run_of(arch, 8192, 8, 1, 1), load_cluster("h200"))
    assert one and one["collectives"].value == 0


def test_a_given_mfu_takes_the_place_of_the_predicted_time():
    run, cluster = run_of(load_model("llama3-8b").arch, 8192, 64, 1, 8), load_cluster("8xh100")
    plan = make_plan(run, cluster, mfu=0.5)
    assert plan.mfu == pytest.approx(0.5) and plan.step_seconds_low == plan.step_seconds_high == 0
    assert list(plan.time_seconds) == [GIVEN_MFU] and "50.0% MFU" in plan.formulas[f"time.{GIVEN_MFU}"]
    bare = make_plan(run, cluster, mfu=0.5, parameters=8_000_000_000)
    assert bare.flops_per_token == 6 * 8e9
    assert bare.step_seconds == pytest.approx(6 * 8e9 * run.tokens_per_step / (8 * 989e12 * 0.5))


def test_hfu_counts_recomputed_operations():
    run, cluster = run_of(load_model("llama3-8b").arch, 8192, 64, 1, 8), load_cluster("8xh100")
    again = make_plan(replace(run, parallel=replace(run.parallel, recompute="full")), cluster)
    assert again.mfu and again.hfu and 1.25 < again.hfu / again.mfu < 1.36
    plain = make_plan(run, cluster)
    assert plain.mfu and plain.hfu and plain.hfu / plain.mfu == pytest.approx(1, abs=0.03)


def test_a_plan_has_every_pipeline_rank_moment_and_line():
    parallel = Parallel(pp=4, tp=2, dp_shard=2)
    run = replace(run_of(load_model("llama3-8b").arch, 8192, 64, 1, 1), parallel=parallel)
    plan = make_plan(run, load_cluster("2x8xh100"))
    totals = [sum(stage.values()) for stage in plan.stage_memory_bytes]
    assert len(totals) == 4 and max(totals) == pytest.approx(plan.total_memory_bytes, abs=20)
    assert set(plan.moments_bytes) == {"initialisation", "first step", "steady state", "save"}
    assert {"tp", "pp", "shard"} <= set(plan.communication) and 0 < plan.bubble < 0.5
    assert plan.outlook and plan.outlook.days > plan.outlook.productive_days
    assert sum(plan.time_seconds.values()) == pytest.approx(plan.step_seconds)
    assert make_plan(RUN, MACHINE).outlook is None  # nobody counted the failures of CPUs


def test_the_band_is_around_the_prediction():
    plan = make_plan(run_of(load_model("llama3-8b").arch, 8192, 64, 1, 8), load_cluster("8xh100"))
    low, high = error_band(plan.step_seconds)
    if low < high:
        assert (plan.step_seconds_low, plan.step_seconds_high) == (low, high)
        assert low < plan.step_seconds < high
    assert make_plan(RUN, MACHINE).step_seconds_low == 0


def test_a_rack_of_fast_links_is_one_place():
    """72 GB200 in a rack: 18 nodes of 4, which tensor parallelism may leave and the rack not."""
    inside = replace(run_of(TINY, 256, 144, 1, 1), parallel=Parallel(tp=2, dp_shard=72))
    rack = load_cluster("2x72xgb200")
    assert not any("spans nodes" in w for w in make_plan(inside, rack).warnings)
    assert links_of(rack, "bf16").ranks_per_node == 72
    wide = replace(inside, model=replace(TINY, num_heads=8, num_kv_heads=8), parallel=Parallel(tp=8, dp_shard=18))
    assert not any("spans nodes" in w for w in make_plan(wide, rack).warnings)
    assert any("tp = 8 spans nodes of 4" in w for w in make_plan(wide, replace(rack, domain_devices=4)).warnings)


def test_plans_from_before_there_were_outlooks_still_load():
    values = to_dict(make_plan(RUN, MACHINE))
    later = ("software", "stage_memory_bytes", "moments_bytes", "step_seconds_low", "step_seconds_high", "hfu")
    for name in (*later, "communication", "bubble", "outlook"):
        values.pop(name, None)
    known = {"name", "device", "nodes", "devices_per_node", "memory_bytes", "memory_bandwidth", "peak_flops"}
    values["cluster"] = {name: value for name, value in values["cluster"].items() if name in known}
    plan = from_dict(Plan, values, where=str)
    assert plan.outlook is None and plan.step_seconds > 0 and plan.software.name == "ingot"
