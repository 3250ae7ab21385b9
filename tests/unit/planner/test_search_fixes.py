"""If nothing fits, the search proposes a change, and with the change a layout fits."""

import re
from dataclasses import replace

from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.search.candidates import MEMORY_SHARE
from ingot.planner.search.search import search
from ingot.schema.run import Data, RunConfig, Train


def run_of(model: str, global_batch: int, seq_len: int, **changes) -> RunConfig:
    arch = replace(load_model(model).arch, max_seq_len=max(load_model(model).arch.max_seq_len, seq_len), **changes)
    train = Train(steps=10, seq_len=seq_len, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train)


def test_optimizer_state_goes_to_the_host_only_where_nothing_else_fits():
    run = run_of("qwen3-0.6b", 8, 1024)
    card = load_cluster("rtx4090")
    assert {c.run.parallel.offload for c in search(run, card).best} == {"none"}
    small = replace(card, memory_bytes=11 << 30)
    assert {c.run.parallel.offload for c in search(run, small).best} == {"cpu"}
    without = search(run, small, offload=False)
    assert not without.best
    assert without.nearest
    assert without.nearest.memory_bytes > MEMORY_SHARE * small.memory_bytes


def test_the_number_of_devices_it_asks_for_is_enough_and_half_of_it_is_not():
    run, small = run_of("qwen3-0.6b", 64, 1024), replace(load_cluster("rtx4090"), memory_bytes=7 << 30)
    found = search(run, small, offload=False)
    named = re.search(r"use (\d+) of these devices \((\w+)\)", found.fix)
    assert named
    assert named[2] == f"{named[1]}xrtx4090"
    count = int(named[1])
    assert search(run, replace(small, devices_per_node=count), offload=False).best
    assert not search(run, replace(small, devices_per_node=count // 2), offload=False).best


def test_a_larger_device_that_it_names_is_enough_and_so_are_shorter_sequences():
    run = run_of("qwen3-0.6b", 4, 262_144)
    found = search(run, load_cluster("rtx4090"), offload=False)
    named = re.search(r"use ([\w-]+) \(", found.fix)
    assert named
    assert search(run, load_cluster(named[1]), offload=False).best
    shorter = re.search(r"shorten train.seq_len to (\d+)", found.fix)
    assert shorter
    shortened = replace(run, train=replace(run.train, seq_len=int(shorter[1])))
    assert search(shortened, load_cluster("rtx4090"), offload=False).best


def test_a_wish_that_stands_in_the_way_is_named_first():
    run, cluster = run_of("llama3-8b", 64, 8192), load_cluster("8xh100")
    found = search(run, cluster, pinned={"tp": 1, "pp": 1, "cp": 1, "zero": 1, "recompute": "none"})
    assert not found.best
    assert found.fix.startswith("leave tp = 1 to the search: tp = ")


def test_a_batch_that_no_layout_can_share_is_told_the_nearest():
    run = run_of("smollm2-135m", 100, 2048, num_layers=1, num_heads=1, num_kv_heads=1)
    found = search(run, load_cluster("4x8xh100"))
    assert not found.best
    assert found.nearest is None
    assert found.fix == "100 sequences cannot be divided evenly among 32 devices; use train.global_batch = 96"
