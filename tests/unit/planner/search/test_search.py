"""The proposals of the search make sense to someone who knows the field."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from tests.expect import refused

from ingot.config import to_dict
from ingot.planner.predict.memory.peak_memory import memory_bill
from ingot.planner.predict.time.step_time import estimate
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.search.candidates import EQUAL, MEMORY_SHARE, Candidate
from ingot.planner.search.moves import neighbors
from ingot.planner.search.search import Found, search
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.software import INGOT
from ingot.theory.layout import layout_problems
from ingot.theory.rules import run_from_dict


def run_of(model: str, global_batch: int, seq_len: int = 8192, **changes) -> RunConfig:
    arch = load_model(model).arch
    arch = replace(arch, max_seq_len=max(arch.max_seq_len, seq_len), **changes)
    train = Train(steps=10, seq_len=seq_len, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train)


CASES = {
    "8b on a node": ("llama3-8b", 128, 8192, "8xh100"),
    "70b on 1,024": ("llama3-70b", 1024, 8192, "128x8xh100"),
    "405b on 16,384": ("llama3-405b", 2048, 8192, "2048x8xh100"),
    "experts on 1,024": ("moe-671b", 4096, 4096, "128x8xh100"),
    "long sequences": ("llama3-8b", 64, 131_072, "8x8xh100"),
    "racks": ("llama3-70b", 1152, 8192, "16x72xgb200"),
    "a card": ("qwen3-0.6b", 64, 2048, "rtx4090"),
    "a slice": ("llama3-8b", 256, 8192, "v5p-128"),
}
LARGE = ("70b on 1,024", "405b on 16,384", "experts on 1,024", "racks")  # seconds for each search


@cache
def found(name: str) -> Found:
    model, batch, seq_len, cluster = CASES[name]
    return search(run_of(model, batch, seq_len), load_cluster(cluster))


def layout(name: str) -> Parallel:
    return found(name).best[0].run.parallel


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in CASES]
)
def test_every_layout_found_is_legal_fits_and_uses_all_devices(name):
    cluster = load_cluster(CASES[name][-1])
    assert 3 <= len(found(name).best) <= 10
    assert found(name).considered >= found(name).fitting >= len(found(name).best)
    for candidate in found(name).best:
        run = candidate.run
        assert not list(layout_problems(run))
        assert run_from_dict(to_dict(run)) == run
        assert run.parallel.world_size == cluster.devices
        needed = sum(term.value for term in memory_bill(run, cluster).values())
        assert candidate.memory_bytes == needed <= MEMORY_SHARE * cluster.memory_bytes
        time = estimate(run, cluster, INGOT)
        assert time and candidate.step_seconds == pytest.approx(time.seconds)
        assert candidate.bubble == time.bubble


def test_a_small_model_on_a_node_is_sharded_and_not_cut():
    parallel = layout("8b on a node")
    assert parallel.dp_shard * parallel.dp_replicate == 8
    assert parallel.zero in (2, 3)
    assert 0.35 < found("8b on a node").best[0].mfu < 0.6


@pytest.mark.slow
def test_a_large_model_is_cut_inside_of_nodes_and_over_few_stages():
    parallel = layout("70b on 1,024")
    assert parallel.tp * parallel.cp <= 8
    assert parallel.pp <= 8
    assert parallel.recompute != "full"


@pytest.mark.slow
def test_the_largest_models_need_tensors_over_a_node_and_a_pipeline_with_virtual_stages():
    parallel = layout("405b on 16,384")
    assert parallel.tp == 8
    assert 4 <= parallel.pp <= 32
    assert parallel.stages_on_each_rank > 1


@pytest.mark.slow
def test_experts_stay_close_and_memory_is_bought_with_stages_or_recomputation():
    parallel = layout("experts on 1,024")
    assert 4 <= parallel.ep <= 64
    assert parallel.pp > 1 or parallel.recompute != "none"


def test_long_sequences_are_cut():
    parallel = layout("long sequences")
    assert parallel.cp >= 4
    assert parallel.context in ("ring", "ulysses", "usp")


def test_racks_of_fast_links_need_no_pipeline():
    parallel = layout("racks")
    assert parallel.tp <= 8
    assert parallel.pp <= 2


def test_one_card_accumulates():
    candidate = found("a card").best[0]
    assert candidate.run.parallel == replace(candidate.run.parallel, dp_shard=1, tp=1, pp=1, cp=1, dp_replicate=1)
    assert candidate.run.accumulation > 1
    assert candidate.run.parallel.offload == "none"


def test_a_slice_of_tpus_is_planned_for():
    assert layout("a slice").pp == 1
    assert 0.2 < found("a slice").best[0].mfu < 0.8


@pytest.mark.slow
def test_faster_ones_go_first_but_for_simpler_ones_that_are_as_fast():
    for name in CASES:
        seconds = [candidate.step_seconds for candidate in found(name).best]
        assert all(later > (1 - EQUAL) * earlier for earlier, later in pairwise(seconds))
        assert seconds[0] <= (1 + EQUAL) * min(seconds)


def test_pins_hold():
    run, cluster = run_of("llama3-70b", 64), load_cluster("8x8xh100")
    pins = {"tp": 4, "pp": 2, "schedule": "zb_h1", "micro_batch": 2, "recompute": "full", "grads": "bf16"}
    best = search(run, cluster, pinned=pins).best
    assert best
    for candidate in best:
        parallel, micro_batch = candidate.run.parallel, candidate.run.train.micro_batch
        assert {name: getattr(parallel, name, micro_batch) for name in pins} == pins


def test_experts_that_few_meshes_can_divide_may_be_pinned():
    best = search(run_of("mixtral-8x7b", 16, 2048, num_layers=4), load_cluster("8xh100"), pinned={"ep": 8}).best
    assert {candidate.run.parallel.ep for candidate in best} == {8}


def test_pinned_degrees_may_leave_devices_out():
    pins = {"tp": 2, "pp": 1, "cp": 1, "dp_shard": 2, "dp_replicate": 1}
    best = search(run_of("qwen3-0.6b", 64, 2048), load_cluster("8xh100"), pinned=pins).best
    assert best[0].run.parallel.world_size == 4


def test_a_pin_that_does_not_exist_is_an_error():
    with refused("E-PIN-UNKNOWN", pin="tensor"):
        search(run_of("qwen3-0.6b", 64, 2048), load_cluster("8xh100"), pinned={"tensor": 2})


def test_other_recipes_are_tried_when_asked_for():
    run, cluster = run_of("llama3-8b", 64, num_layers=8), load_cluster("8xh100")
    plain, both = search(run, cluster), search(run, cluster, recipes=("tensorwise",))
    assert {candidate.software.recipe for candidate in plain.best} == {""}
    assert both.best[0].software.recipe == "tensorwise"
    assert both.best[0].step_seconds < plain.best[0].step_seconds


def test_without_a_rate_the_simplest_layout_that_fits_goes_first():
    cluster = replace(load_cluster("8xh100"), peak_flops={})
    best = search(run_of("qwen3-0.6b", 64, 2048), cluster).best
    assert best[0].step_seconds == best[0].mfu == 0.0
    assert best[0].run.parallel.data_ranks == 8


def change(candidate: Candidate, cluster: str, key: str, after: object):
    return next(c for c in neighbors(candidate, load_cluster(cluster)) if (c.key, c.after) == (key, after))


def test_neighbours_say_what_one_step_changes():
    best = found("8b on a node").best[0]
    more = change(best, "8xh100", "recompute", "full")
    assert more.before == best.run.parallel.recompute
    assert more.fits
    assert more.candidate.memory_bytes < best.memory_bytes
    assert more.candidate.step_seconds > best.step_seconds
    wider = change(best, "8xh100", "tp", 2 * best.run.parallel.tp)
    assert wider.candidate.run.parallel.world_size == 8
    for step in neighbors(best, load_cluster("8xh100")):
        assert not list(layout_problems(step.candidate.run))
