"""Plans of runs with experts and with context parallelism: time by link, advice, notes, proposals."""

from dataclasses import replace
from typing import Literal

import pytest

from ingot.planner.predict.time.constants import PRIOR
from ingot.planner.predict.time.exposed import Overlappable, blocking
from ingot.planner.predict.time.links import line_of, line_times, span
from ingot.planner.predict.time.step_time import step_seconds
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.run.advice import notes
from ingot.planner.run.plan import make_plan
from ingot.planner.run.propose import propose
from ingot.planner.search.space import with_context
from ingot.schema.arch import Arch, Moe
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions, require_layout, resolve_parallel
from ingot.theory.params import count_active_parameters, count_parameters
from ingot.theory.traffic import step_traffic

LLAMA8, MIXTRAL, QWEN = (load_model(name).arch for name in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b"))
SHARED = replace(MIXTRAL, moe=replace(MIXTRAL.moe, shared_experts=1))
NODE, NODES = load_cluster("8xh100"), load_cluster("4x8xh100")


def run_of(
    arch: Arch, micro_batches=4, micro_batch=1, seq_len=4096, compiled: Literal["auto", "on"] = "auto", **settings
) -> RunConfig:
    parallel = Parallel(**settings)
    train = Train(
        steps=10,
        seq_len=seq_len,
        global_batch=micro_batches * micro_batch * parallel.data_ranks,
        micro_batch=micro_batch,
        compile=compiled,
    )
    arch = replace(arch, max_seq_len=max(arch.max_seq_len, seq_len))
    run = RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train, parallel=parallel)
    require_layout(run)
    return run


def parts(run: RunConfig, cluster: Cluster) -> dict[str, float]:
    found = step_seconds(run, cluster)
    assert found
    return {name: term.value for name, term in found.items()}


LAYOUTS = [
    (MIXTRAL, {"dp_shard": 8, "ep": 4}),
    (MIXTRAL, {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, "dp_replicate": 2}),
    (MIXTRAL, {"tp": 2, "ep": 1}),
    (SHARED, {"pp": 2, "dp_shard": 4, "ep": 2, "recompute": "full"}),
    (LLAMA8, {"cp": 8, "context": "usp", "ulysses": 2, "tp": 2}),
    (LLAMA8, {"cp": 4, "dp_replicate": 2, "reduce": "canonical", "virtual_ranks": 2}),
]


@pytest.mark.parametrize(("arch", "settings"), LAYOUTS)
def test_all_traffic_has_a_line_and_the_lines_have_all_of_it(arch, settings):
    for position in positions(run_of(arch, **settings)):
        traffic, times = step_traffic(position, "cuda"), line_times(position, NODES)
        assert traffic
        assert sum(time.sent for time in times.values()) == pytest.approx(sum(t.sent for t in traffic))
        for found in traffic:
            assert found.ranks <= span(position.parallel, line_of(found))


def test_lines_stretch_over_neighbours():
    parallel = resolve_parallel(run_of(LLAMA8, tp=2, cp=8, dp_shard=2, context="usp", ulysses=4, seq_len=8192))
    spans = {line: span(parallel, line) for line in ("tp", "ulysses", "ring", "sequence", "shard", "dp_replicate")}
    assert spans == {"tp": 2, "ulysses": 8, "ring": 16, "sequence": 16, "shard": 32, "dp_replicate": 32}
    assert span(replace(parallel, ep=4), "ep") == 4


def test_experts_over_nodes_cost_what_the_network_is_slower():
    inside, over = (parts(run_of(QWEN, dp_shard=32, ep=ep), NODES)["tokens to experts"] for ep in (8, 16))
    slower = NODES.link_bandwidth / NODES.network_bandwidth
    assert over / inside == pytest.approx(slower * (8 / 16) / (7 / 8), rel=0.25)  # half of the ranks share a node


def test_shared_experts_hide_half_of_the_exchange_and_no_more():
    plain = parts(run_of(MIXTRAL, dp_shard=8, ep=8), NODE)["tokens to experts"]
    shared = parts(run_of(SHARED, dp_shard=8, ep=8), NODE)["tokens to experts"]
    assert shared == pytest.approx(plain / 2)  # 14336 wide: longer than the exchange takes
    (position,) = positions(run_of(SHARED, dp_shard=8, ep=8))
    times = line_times(position, NODE, PRIOR)
    little = Overlappable(1.0, 1.0, shared=0.1 * times["ep"].seconds)
    term = blocking(position, NODE, times, little, PRIOR)["tokens to experts"]
    assert term.value == pytest.approx(0.9 * times["ep"].seconds) and "of shared experts" in term.formula


def test_a_ring_waits_only_for_what_attention_does_not_hide():
    run = run_of(LLAMA8, cp=8, context="ring", seq_len=131_072)
    assert parts(run, NODE)["ring"] == 0.0
    slow = replace(NODE, link_bandwidth=1e9)
    (position,) = positions(run)
    times = line_times(position, slow, PRIOR)
    assert 0.0 < parts(run, slow)["ring"] < times["ring"].seconds
    some = Overlappable(1.0, attention=0.8 * times["ring"].seconds, shared=0.0)
    term = blocking(position, slow, times, some, PRIOR)["ring"]  # of eight steps, the last one sends nothing
    assert term.value == pytest.approx((1 - 0.8 * 7 / 8) * times["ring"].seconds)


def test_ulysses_stands_in_the_way():
    run = run_of(LLAMA8, cp=8, context="ulysses", seq_len=32_768)
    (position,) = positions(run)
    assert parts(run, NODE)["heads to ranks"] == line_times(position, NODE)["ulysses"].seconds > 0


def test_a_plan_counts_active_parameters_for_flops_and_all_of_them_for_memory():
    run = run_of(MIXTRAL, dp_shard=8, ep=8)
    plan = make_plan(run, NODE)
    assert (plan.parameters, plan.active_parameters) == (count_parameters(MIXTRAL), count_active_parameters(MIXTRAL))
    assert plan.flops_per_token < 6 * plan.active_parameters * 1.1
    assert "active matmul parameters" in plan.formulas["flops_per_token"]
    assert plan.memory_bytes["optimizer"] == pytest.approx(8 * plan.parameters / 8, rel=1e-3)
    assert plan.mfu and 0.1 < plan.mfu < 0.6


def test_the_pipeline_waits_for_tokens_too():
    fast = make_plan(run_of(MIXTRAL, pp=4, dp_shard=2, ep=2), NODE).step_seconds
    slow = make_plan(run_of(MIXTRAL, pp=4, dp_shard=2, ep=2), replace(NODE, link_bandwidth=10e9)).step_seconds
    assert slow > fast


def with_moe(arch: Arch, **changes) -> Arch:
    return replace(arch, moe=replace(arch.moe, **changes))


@pytest.mark.parametrize(
    ("arch", "settings", "words"),
    [
        (QWEN, {"dp_shard": 32, "ep": 16}, ("ep = 16 spans nodes of 8", "over the network; use ep of at most 8")),
        (with_moe(QWEN, global_loss=0.0), {"ep": 8, "dp_shard": 8}, ("nothing balances", "bias_rate = 0.001")),
        (
            with_moe(QWEN, groups=4, top_groups=2, num_experts=96),
            {"dp_shard": 6, "ep": 6},
            ("groups = 4 and parallel.ep = 6 divide experts in different places", "use ep = 2"),
        ),
        (QWEN, {"dp_shard": 2, "seq_len": 1024}, ("an expert multiplies 64 rows", "raise train.micro_batch")),
        (
            MIXTRAL,
            {"compiled": "on"},
            ("leaves experts uncompiled, because the host has to read each expert's number of rows",),
        ),
        (with_moe(MIXTRAL, capacity_factor=4.0), {}, ("capacity_factor = 4 drops nothing", "use less than 4")),
        (replace(LLAMA8, sliding_window=4096), {}, ("sliding_window = 4096 hides nothing in training",)),
        (
            LLAMA8,
            {"cp": 32, "context": "ulysses", "seq_len": 32_768},
            ("sends attention heads between nodes", 'use context = "usp" with ulysses = 8'),
        ),
        (
            LLAMA8,
            {"cp": 4, "context": "ring", "context_layout": "contiguous"},
            ("context_layout = 'contiguous' gives one rank 1.75 times the mean", 'use "zigzag"'),
        ),
        (LLAMA8, {"cp": 2, "seq_len": 131_072}, ("does not fit", "recompute them (parallel.recompute)")),
        (LLAMA8, {"cp": 2, "seq_len": 2**19, "recompute": "full"}, ("does not fit", "divide sequences (parallel.cp)")),
    ],
)
def test_what_disappoints_is_said_with_the_way_out(arch, settings, words):
    warnings = make_plan(run_of(arch, **settings), NODES).warnings
    assert any(all(word in warning for word in words) for warning in warnings), warnings


def test_good_layouts_are_not_warned_of():
    runs = [
        run_of(QWEN, micro_batch=2, dp_shard=32, ep=8),
        run_of(with_moe(QWEN, groups=8, top_groups=4), dp_shard=8, ep=8),
        run_of(LLAMA8, cp=16, dp_shard=2, seq_len=131_072, recompute="full"),
        run_of(replace(LLAMA8, sliding_window=1024), cp=4),
    ]
    words = (
        "spans nodes of",
        "balances",
        "cut experts",
        "rows of",
        "drops nothing",
        "hides nothing",
        "mean of",
        "heads",
    )
    for run in runs:
        warnings = make_plan(run, NODES).warnings
        assert not any(word in warning for warning in warnings for word in words), warnings


def test_notes_say_what_experts_and_context_parallelism_come_to():
    noted = dict(notes(run_of(SHARED, dp_shard=4, cp=2, ep=4), NODE))
    assert noted["experts"].startswith("8 experts, 2 per token and 1 shared: 52.3B parameters, 18.5B active; 2 on each")
    assert "2,048 rows of a micro-batch each" in noted["experts"]
    assert noted["context"].startswith(
        "auto, chosen for H100 nodes: a ring of 2 inside a node: messages send 32.0 MiB in"
    )
    assert noted["context"].endswith("the busiest rank has 1.00 times the mean attention work")
    uneven = dict(notes(run_of(LLAMA8, cp=4, context="ring", context_layout="contiguous"), NODE))
    assert "contiguous, the busiest rank has 1.75 times the mean" in uneven["context"]
    assert not uneven["context"].startswith("auto") and "experts" not in uneven
    assert not list(notes(run_of(LLAMA8), NODE))


def test_a_form_costs_the_same_chosen_or_named_and_one_machine_is_one_node():
    here = Cluster(name="here", device="cpu", devices_per_node=2, memory_bytes=8 << 30, link_bandwidth=2e9)
    for cluster in (here, replace(here, link_bandwidth=0.0), NODE, NODES):
        run = run_of(LLAMA8, cp=16, seq_len=131_072)
        chosen = resolve_parallel(run).ulysses
        named = run_of(LLAMA8, cp=16, context="usp", ulysses=chosen, seq_len=131_072)
        auto, noted = (dict(notes(r, cluster))["context"] for r in (run, named))
        assert auto == f"auto, chosen for H100 nodes: {noted}"
        assert ("across nodes" in noted) == (cluster == NODES) and ("inside a node" in noted) == (cluster != NODES)
        assert ("links of here are unknown" in noted) == (cluster.link_bandwidth == 0)
    assert "all-to-alls send 280.0 MiB in 147 ms" in dict(notes(named, here))["context"]


def test_a_plan_decides_the_form_of_context_parallelism_by_its_cluster():
    run = run_of(LLAMA8, cp=16, dp_shard=2, seq_len=131_072)
    planned, reasons = with_context(run, NODES)
    assert (planned.parallel.context, planned.parallel.ulysses) == ("usp", 8)
    assert reasons["parallel.context"].startswith("Ulysses over 8 in rings of 2 across nodes: adds the least time")
    require_layout(planned)
    whole, _ = with_context(run, replace(NODES, devices_per_node=32))
    assert (whole.parallel.context, whole.parallel.ulysses) == ("ulysses", 0)
    slow, _ = with_context(run, replace(NODES, link_bandwidth=5e9, network_bandwidth=5e9, attention_efficiency=0.05))
    assert (slow.parallel.context, slow.parallel.ulysses) == ("ring", 0)
    for kept in (planned, run_of(LLAMA8)):
        assert with_context(kept, NODES) == (kept, {})


def test_a_proposal_divides_experts_inside_of_a_node_where_it_pays():
    def proposed(name: str, cluster: Cluster):
        return propose(load_model(name).arch, cluster, Data(tokens="t"), name="x", tokens=10**12)

    large = proposed("qwen3-30b-a3b", NODES)
    assert large.run.parallel == Parallel(dp_shard=32, ep=8) and "parallel.ep" in large.reasons
    assert proposed("qwen3-30b-a3b", load_cluster("6xh100")).run.parallel.ep == 2
    small = Cluster(name="here", device="cpu", devices_per_node=4, memory_bytes=8 << 30)
    assert proposed("tiny-moe", small).run.parallel == Parallel(dp_shard=4)


def test_steps_follow_active_parameters():
    dense = replace(load_model("smollm2-135m").arch, d_ffn=3072)
    sparse = replace(dense, moe=Moe(num_experts=16, top_k=2, d_expert=1536))
    first, second = (propose(arch, NODE, Data(tokens="t"), name="x", tokens=10**9).run for arch in (dense, sparse))
    steps = first.train.steps * first.tokens_per_step, second.train.steps * second.tokens_per_step
    assert steps[1] == pytest.approx(steps[0], rel=0.02)
