"""Matrix products by shape: their operations are those that theory/work.py counts."""

from dataclasses import replace

import pytest

from ingot.planner.predict.time.efficiency import Product, block_products, stage_products, total_flops
from ingot.planner.request.presets import load_model
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import positions
from ingot.theory.work import stage_work

LLAMA8, MIXTRAL, V3 = (load_model(name).arch for name in ("llama3-8b", "mixtral-8x7b", "moe-671b"))


def run_of(arch, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    train = Train(steps=10, seq_len=4096, global_batch=8 * parallel.data_ranks, micro_batch=1)
    arch = replace(arch, max_seq_len=max(arch.max_seq_len, 4096))
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train, parallel=parallel)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        (LLAMA8, {}),
        (LLAMA8, {"tp": 4, "recompute": "full"}),
        (LLAMA8, {"tp": 16, "recompute": "selective"}),
        (LLAMA8, {"cp": 2, "dp_shard": 2, "recompute": "full", "recompute_every": 3}),
        (LLAMA8, {"pp": 4, "schedule": "zb_v", "tp": 2, "recompute": "selective"}),
        (MIXTRAL, {"dp_shard": 8, "ep": 4, "tp": 2, "recompute": "full"}),
        (MIXTRAL, {"dp_shard": 8, "ep": 4, "tp": 2, "recompute": "selective"}),
        (V3, {"pp": 4, "dp_shard": 64, "ep": 64, "recompute": "full"}),
        (V3, {"tp": 2, "recompute": "selective"}),
        (replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=0.6, overflow="fallback")), {"tp": 2}),
    ],
)
def test_products_have_all_matmul_flops_and_no_more(arch, settings):
    for position in positions(run_of(arch, **settings)):
        for stage in position.stages:
            counted = tuple(part.matmul_flops for part in stage_work(position, stage, "cuda"))
            assert stage_products(position, stage).flops == pytest.approx(counted, rel=1e-12)


def test_a_backward_has_two_products_of_the_same_size_in_other_shapes():
    product = Product("x", 8, 4, 2)
    assert [(p.m, p.n, p.k) for p in (product.for_inputs, product.for_weights)] == [(8, 2, 4), (4, 2, 8)]
    assert product.flops == product.for_inputs.flops == product.for_weights.flops == 128


def test_experts_are_grouped_products_of_their_own_rows():
    (position,) = positions(run_of(MIXTRAL, dp_shard=8, ep=4))
    up = next(p for p in block_products(position, True) if p.what == "gate, up of experts")
    assert (up.groups, up.m, up.n, up.k) == (2, 4096, 2 * 14336, 4096)
    assert total_flops(block_products(position, True)) > total_flops(block_products(position, False))
