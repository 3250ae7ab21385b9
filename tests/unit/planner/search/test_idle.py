"""Racks of nine: experts in groups of eight cross a border, unless one device of each stays idle."""

from dataclasses import replace

from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.planner.search.search import search
from ingot.schema.run import Data, RunConfig, Train

RACKS = replace(
    load_cluster("2x72xgb200"), nodes=72, devices_per_node=1, domain_devices=9, network_bandwidth=10e9, name="8x9"
)


def run_of(model: str, global_batch: int) -> RunConfig:
    arch = replace(load_model(model).arch, num_layers=4)
    train = Train(steps=10, seq_len=4096, global_batch=global_batch, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train)


def test_a_part_of_each_rack_is_proposed_where_it_is_faster_and_it_is():
    run, pins = run_of("mixtral-8x7b", 576), {"ep": 8, "pp": 1, "cp": 1}
    found = search(run, RACKS, pinned=pins)
    assert found.idle.startswith("8 of the 9 devices of each domain of fast links would be ")
    assert "--cluster 8x8xgb200" in found.idle
    smaller = replace(RACKS, nodes=64, domain_devices=8)
    best = search(run, smaller, pinned=pins).best[0]
    assert best.step_seconds < found.best[0].step_seconds  # of the same batch


def test_dense_models_and_racks_of_a_power_of_two_keep_all_devices():
    assert not search(run_of("mixtral-8x7b", 512), replace(RACKS, nodes=64, domain_devices=8)).idle
    assert not search(run_of("llama3-8b", 576), RACKS).idle
