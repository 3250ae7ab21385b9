"""The planner's memory against the traced program: every pipeline rank within 3%, and right where it is tight.

benchmarks/planner/dry_run_match.py does the same of more and larger layouts.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ingot.planner.predict.memory.peak_memory import live_bill, memory_bill, moments, position_bill  # noqa: E402
from ingot.planner.request.presets import load_model  # noqa: E402
from ingot.rehearse.dryrun import role  # noqa: E402
from ingot.rehearse.dryrun.fake import Known  # noqa: E402
from ingot.rehearse.dryrun.tracker import TrackedPeak  # noqa: E402
from ingot.schema.arch import Arch  # noqa: E402
from ingot.schema.cluster import Cluster  # noqa: E402
from ingot.schema.parallel import Parallel  # noqa: E402
from ingot.schema.run import Data, RunConfig, Train  # noqa: E402
from ingot.theory.layout import positions  # noqa: E402

DENSE = replace(load_model("llama3-8b").arch, num_layers=6, vocab_size=32_000)
SPARSE = replace(load_model("qwen3-30b-a3b").arch, num_layers=4, vocab_size=32_000)


def run_of(arch: Arch, micro_batch: int, micro_batches: int, seq_len: int = 4096, **layout) -> RunConfig:
    parallel = Parallel(**layout)
    batch = micro_batch * micro_batches * parallel.data_ranks
    train = Train(steps=2, seq_len=seq_len, global_batch=batch, micro_batch=micro_batch)
    return RunConfig(name="traced", model=arch, data=Data(tokens=""), train=train, parallel=parallel)


# The cache of fake operations that all traces share: layouts compute much the same.
KNOWN: Known = {}
TRACED: dict[tuple[str, int], dict[str, TrackedPeak]] = {}


def peaks(run: RunConfig, rank: int) -> dict[str, TrackedPeak]:
    """Trace the rank once for all tests."""
    if (key := (repr(run), rank)) not in TRACED:
        TRACED[key] = role.trace_rank(run, rank, "cuda", KNOWN).peaks()
    return TRACED[key]


def traced_bytes(run: RunConfig, rank: int) -> int:
    return peaks(run, rank)[role.STEADY].bytes


def total(bill) -> float:
    return sum(term.value for term in bill.values())


CASES = {
    "DDP": run_of(DENSE, 1, 2, dp_replicate=2),
    "ZeRO-1": run_of(DENSE, 2, 1, dp_shard=8, zero=1, unit_layers=1),
    "ZeRO-2, bf16 gradients": run_of(DENSE, 1, 2, dp_shard=8, zero=2, grads="bf16", unit_layers=1),
    "ZeRO-3, full recompute": run_of(DENSE, 2, 1, dp_shard=8, zero=3, recompute="full"),
    "ZeRO-3, selective recompute": run_of(DENSE, 1, 2, dp_shard=8, zero=3, recompute="selective"),
    "ZeRO-3, every second block": run_of(DENSE, 1, 2, dp_shard=8, zero=3, recompute="full", recompute_every=2),
    "1F1B, every third block": run_of(DENSE, 1, 4, pp=2, zero=1, recompute="selective", recompute_every=3),
    "offload": run_of(DENSE, 1, 1, dp_shard=8, zero=3, offload="cpu", offload_parameters=True),
    "tensor parallelism": run_of(DENSE, 2, 2, tp=4, dp_shard=2, zero=1),
    "1F1B": run_of(DENSE, 1, 4, pp=2, dp_shard=2, zero=1),
    "GPipe": run_of(DENSE, 1, 4, pp=2, schedule="gpipe", recompute="full"),
    "looped breadth first": run_of(DENSE, 1, 4, pp=2, schedule="looped_bfs", stages_per_rank=3),
    "ZB-V": run_of(replace(DENSE, num_layers=8), 1, 6, pp=2, dp_shard=2, zero=1, schedule="zb_v"),
    "ring": run_of(DENSE, 1, 1, cp=4, context="ring", zero=3),
    "Ulysses": run_of(DENSE, 1, 1, cp=4, context="ulysses", zero=1),
    "experts": run_of(SPARSE, 1, 2, dp_shard=8, ep=8, zero=1),
}


def some_slow(names, *slow):
    """Parameters of which those that take longest to trace are left to `make test-slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


SLOW = (
    *("looped breadth first", "ZB-V", "GPipe", "offload", "ZeRO-3, selective recompute"),
    *("ZeRO-3, every second block", "1F1B, every third block"),
)


@pytest.mark.parametrize("name", some_slow(CASES, *SLOW))
def test_every_pipeline_rank_holds_what_the_formulas_say(name):
    run = CASES[name]
    ranks_to_a_stage = run.parallel.world_size // run.parallel.pp
    for place in positions(run):
        seen = traced_bytes(run, place.rank * ranks_to_a_stage)
        assert total(position_bill(place, "cuda")) == pytest.approx(seen, rel=0.03), place.rank


WAITING = {
    "GPipe": (replace(DENSE, num_layers=2), {"schedule": "gpipe"}),
    "looped breadth first": (replace(DENSE, num_layers=4), {"schedule": "looped_bfs", "stages_per_rank": 2}),
}


@pytest.mark.parametrize("name", some_slow(WAITING, "looped breadth first"))
def test_a_micro_batch_that_waits_costs_its_graph_alone(name):
    """The smallest that these schedules allow: each further micro-batch adds what its backward reads, and neither the
    output of a stage nor a gradient of the head, which is larger than any of these graphs."""
    arch, layout = WAITING[name]
    few, many = (run_of(arch, 1, count, pp=2, recompute="full", **layout) for count in (2, 4))
    for place in positions(few):
        stream, blocks = 2 * arch.d_model, sum(len(stage.layers) for stage in place.stages)
        ends = 8 * any(stage.first for stage in place.stages)
        ends += (2 * stream + 4 + 8) * any(stage.last for stage in place.stages)  # a norm's input, its output, targets
        ends += (4 * arch.head_dim + 8) * len(place.stages)  # rotary tables and positions, which recomputed blocks read
        graph = place.tokens * (blocks * stream + ends)
        grown = (traced_bytes(many, place.rank) - traced_bytes(few, place.rank)) / 2
        assert grown == pytest.approx(graph, rel=0.03), place.rank


TIGHT = {
    "ZeRO-1": (DENSE, 4, {"dp_shard": 8, "zero": 1}),
    "ZeRO-3, full recompute": (DENSE, 1, {"dp_shard": 8, "zero": 3, "recompute": "full"}),
    "experts": (SPARSE, 2, {"dp_shard": 8, "ep": 8, "zero": 1}),
}


@pytest.mark.parametrize("name", some_slow(TIGHT, "ZeRO-1", "ZeRO-3, full recompute"))
def test_the_largest_micro_batch_that_fits_is_called_fitting_and_the_next_one_not(name):
    """The memory of an 80 GB device, and 5% more and less than a layout needs."""
    arch, micro_batches, layout = TIGHT[name]

    def run(micro_batch: int) -> RunConfig:
        return run_of(arch, micro_batch, micro_batches, **layout)

    sizes = range(1, 200)
    largest = max(size for size in sizes if total(live_bill(run(size), "cuda")) <= 80e9)
    fits, above = (traced_bytes(run(size), 0) for size in (largest, largest + 1))
    assert fits <= 80e9 < above
    assert 0.95 * fits < total(live_bill(run(largest), "cuda")) < 1.05 * fits


LONG = replace(DENSE, max_seq_len=131_072)
AROUND = {
    "short sequences, ZeRO-1": run_of(DENSE, 8, 2, 1024, dp_shard=8, zero=1),
    "16k, ZeRO-3, full recompute": run_of(LONG, 1, 1, 16_384, dp_shard=8, zero=3, recompute="full"),
    "32k, tensor parallelism, selective": run_of(LONG, 1, 2, 32_768, tp=4, dp_shard=2, zero=1, recompute="selective"),
    "128k over a ring": run_of(LONG, 1, 1, 131_072, cp=8, context="ring", zero=3, recompute="full"),
    "64k over Ulysses": run_of(LONG, 1, 1, 65_536, cp=4, context="ulysses", zero=1),
    "8k, 1F1B": run_of(LONG, 1, 4, 8192, pp=2, tp=2, zero=1),
    "2k, experts": run_of(SPARSE, 4, 2, 2048, dp_shard=8, ep=8, zero=1),
}


@pytest.mark.parametrize(
    "name", some_slow(AROUND, "32k, tensor parallelism, selective", "128k over a ring", "64k over Ulysses")
)
def test_a_device_with_5_percent_more_is_enough_and_one_with_5_percent_less_is_not(name):
    run = AROUND[name]
    ranks_to_a_stage = run.parallel.world_size // run.parallel.pp
    needed = max(traced_bytes(run, place.rank * ranks_to_a_stage) for place in positions(run))
    counted = total(memory_bill(run, Cluster(name="x", device="cuda", memory_bytes=needed)))
    assert 0.95 * needed < counted <= 1.05 * needed


def test_a_run_begins_with_its_state_and_saves_with_little_more():
    cluster = Cluster(name="x", device="cuda", memory_bytes=80 * 10**9)
    for run in (CASES["ZeRO-1"], CASES["DDP"], CASES["ZeRO-3, full recompute"]):
        planned = moments(run, cluster)
        for ours, theirs in (("initialisation", role.BUILD), ("first step", role.FIRST), ("save", role.SAVE)):
            assert planned[ours].value == pytest.approx(peaks(run, 0)[theirs].bytes, rel=0.03), (ours, run.parallel)
