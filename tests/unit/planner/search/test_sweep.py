"""The search leaves most layouts out. Where there are few, all are worked out, and the best is among its first."""

import itertools
import zlib
from dataclasses import replace

import pytest
from tests.every_layout import every_candidate, every_layout

from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.search.candidates import EQUAL, Evaluator, distinct, ranked
from ingot.planner.search.layout_search import SLACK
from ingot.planner.search.search import search
from ingot.planner.search.space import Reach, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.software import INGOT

EVERY = Reach(every=True)
ETHERNET = replace(load_cluster("2x2xa100-pcie"), network_bandwidth=1.25e9)


def run_of(model: str, global_batch: int, seq_len: int, **changes) -> RunConfig:
    arch = replace(load_model(model).arch, **changes)
    train = Train(steps=10, seq_len=seq_len, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train)


@pytest.mark.parametrize(
    ("run", "cluster"),
    [
        (run_of("llama3-8b", 8, 4096, num_layers=4), load_cluster("4xh100")),
        pytest.param(run_of("llama3-8b", 8, 4096, num_layers=4), ETHERNET, marks=pytest.mark.nightly),
        (run_of("mixtral-8x7b", 4, 2048, num_layers=3), load_cluster("4xh100")),
        (run_of("llama3-70b", 8, 4096, num_layers=4), load_cluster("2x2xa100-40")),
    ],
    ids=["dense", "slow network", "experts", "little room"],
)
def test_the_best_of_all_layouts_is_among_the_first_three_found(run: RunConfig, cluster: Cluster):
    everything = list(
        every_candidate(Evaluator(run, cluster, INGOT), Space(run=run, cluster=cluster, pinned={}, reach=EVERY))
    )
    assert len(everything) > 50
    best, found = ranked(everything)[0], search(run, cluster).best
    assert any(len(distinct([best, candidate])) == 1 for candidate in found[:3])
    fastest = min(candidate.step_seconds for candidate in everything)
    assert min(candidate.step_seconds for candidate in found) <= (1 + EQUAL) * fastest


@pytest.mark.parametrize("global_batch", [4, 8, 16, 64])
def test_the_coarse_time_knows_pipelines_with_few_micro_batches(global_batch: int):
    arch = {"num_layers": 16, "vocab_size": 1024}  # whose last stage is hardly longer
    run, cluster = run_of("llama3-8b", global_batch, 4096, **arch), load_cluster("8xh100")
    evaluator, pins = Evaluator(run, cluster, INGOT), {"pp": 8, "recompute": "none", "zero": 1, "micro_batch": 1}
    layouts = list(every_layout(evaluator, Space(run=run, cluster=cluster, pinned=pins, reach=EVERY)))
    assert layouts
    for layout in layouts:
        ratio = evaluator.coarse_seconds(layout) / evaluator.seconds(layout)
        assert 0.75 < ratio < 1.25, layout.parallel.schedule


def test_bounds_of_memory_are_below_it_and_it_hardly_falls_with_the_micro_batch():
    run, cluster = run_of("mixtral-8x7b", 16, 2048, num_layers=5), load_cluster("4xh100")
    evaluator, space = Evaluator(run, cluster, INGOT), Space(run=run, cluster=cluster, pinned={}, reach=EVERY)
    bytes_of: dict[object, list[float]] = {}
    for layout in every_layout(evaluator, space):
        if zlib.crc32(repr(layout.parallel).encode()) % 11:
            continue
        needed = evaluator.memory_bytes(layout)
        assert evaluator.least_bytes(layout) <= needed * (1 + 1e-9)
        if layout.parallel.schedule != "looped_bfs":
            assert evaluator.least_state_bytes(layout) <= needed
        if layout.accumulation > 1:
            bytes_of.setdefault(layout.parallel, []).append(needed)  # by ascending micro-batches
    assert any(len(sizes) > 1 for sizes in bytes_of.values())
    for sizes in bytes_of.values():
        assert all(larger >= SLACK * smaller for smaller, larger in itertools.combinations(sizes, 2))


def test_no_schedule_needs_much_less_than_1f1b():
    run, cluster = run_of("llama3-8b", 64, 4096, num_layers=16), load_cluster("4xh100")
    evaluator = Evaluator(run, cluster, INGOT)
    pins = {"pp": 4, "zero": 1, "recompute": "none"}
    needed: dict[tuple[int, str], float] = {}
    for layout in every_layout(evaluator, Space(run=run, cluster=cluster, pinned=pins, reach=EVERY)):
        key = layout.train.micro_batch, layout.parallel.schedule
        needed[key] = min(needed.get(key, float("inf")), evaluator.memory_bytes(layout))
    for (micro_batch, schedule), value in needed.items():
        assert value >= SLACK * needed[micro_batch, "1f1b"], schedule
