"""The part of a model that a rank holds, compared with the model cut by the same rules; and what "auto" means."""

from dataclasses import replace
from typing import Any

import pytest
from tests.expect import refused

from ingot.planner.request.presets import load_model
from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.layout import (
    derived_problems,
    layout_problems,
    positions,
    rank_of_stage,
    require_layout,
    resolve_parallel,
    stage_layers,
)
from ingot.theory.params import count_parameters
from ingot.theory.schedule import build_table

TINY = Arch(vocab_size=512, d_model=64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16, d_ffn=176)
EXPERTS = Moe(
    num_experts=8, top_k=2, d_expert=24, shared_experts=1, first_dense=2, capacity_factor=1.0, overflow="fallback"
)
SPARSE = replace(TINY, moe=EXPERTS)
LATENT = replace(TINY, num_kv_heads=4, head_dim=20, mla=Mla(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=4, v_dim=12))


def run_of(arch: Arch = TINY, micro_batches: int = 8, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    batch = micro_batches * parallel.data_ranks
    train = Train(steps=1, seq_len=64, global_batch=batch, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens=""), train=train, parallel=parallel)


@pytest.mark.parametrize(
    ("arch", "settings", "zero"),
    [
        (TINY, {"dp_shard": 8}, 1),
        (load_model("llama3-8b").arch, {"dp_shard": 8}, 3),
        (load_model("llama3-8b").arch, {"dp_replicate": 8}, 1),
        (load_model("llama3-8b").arch, {"dp_shard": 8, "pp": 2}, 1),
        (TINY, {"dp_shard": 8, "zero": 2}, 2),
        # Ranks of context parallelism divide the state like those of dp_shard.
        (load_model("llama3-8b").arch, {"cp": 8}, 3),
        (load_model("llama3-8b").arch, {"cp": 8, "reduce": "canonical", "virtual_ranks": 1}, 1),
    ],
)
def test_auto_is_decided_in_sight(arch, settings, zero):
    assert resolve_parallel(run_of(arch, **settings)).zero == zero


def test_a_resolved_layout_is_legal_and_stays():
    cases: list[dict[str, Any]] = [{}, {"pp": 4}, {"pp": 3, "schedule": "zb_v"}, {"dp_shard": 2}]
    for settings in cases:
        run = run_of(**settings)
        resolved = replace(run, parallel=resolve_parallel(run))
        assert resolve_parallel(resolved) == resolved.parallel and not list(layout_problems(resolved))


@pytest.mark.parametrize(
    ("pp", "layers", "expected"), [(2, 6, (3, 3)), (4, 6, (1, 2, 2, 1)), (4, 7, (2, 2, 2, 1)), (4, 5, (1, 2, 1, 1))]
)
def test_what_does_not_divide_goes_to_the_middle(pp, layers, expected):
    assert stage_layers(Parallel(pp=pp), layers) == expected
    assert stage_layers(Parallel(pp=2, stage_layers=(1, 5)), 6) == (1, 5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_where_the_tables_put_them(schedule, pp):
    parallel = Parallel(pp=pp, schedule=schedule)
    assert rank_of_stage(parallel) == build_table(schedule, pp, 4 * pp).rank_of_stage


@pytest.mark.parametrize("arch", [TINY, replace(TINY, tied_embeddings=False, qk_norm=True), SPARSE, LATENT])
@pytest.mark.parametrize("settings", [{}, {"pp": 2}, {"pp": 3, "schedule": "zb_v"}, {"pp": 3, "schedule": "1f1b"}])
def test_stages_hold_the_model_once_but_for_a_tied_matrix_on_two_ranks(arch, settings):
    held = sum(position.parameters for position in positions(run_of(arch, **settings)))
    owner = rank_of_stage(Parallel(**settings))
    twice = arch.vocab_size * arch.d_model if arch.tied_embeddings and owner[0] != owner[-1] else 0
    assert held == count_parameters(arch) + twice


@pytest.mark.parametrize(
    ("arch", "tp", "ep"),
    [(arch, tp, 1) for arch in (TINY, replace(TINY, tied_embeddings=False, qk_norm=True), LATENT) for tp in (2, 4)]
    + [(SPARSE, tp, ep) for tp, ep in ((2, 1), (4, 1), (2, 2), (4, 2), (1, 4))],
)
def test_a_rank_holds_what_the_trainer_leaves_it(arch, tp, ep):
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from ingot.trainer.model.transformer import SHARDING, Transformer
    from ingot.trainer.parallel.tensor import cut_tensors

    parallel = Parallel(tp=tp, dp_shard=4, ep=ep)
    sizes = {"tp": tp, "ep": ep}
    mesh: Any = SimpleNamespace(size=sizes.get, index=lambda axis: 0, group=lambda axis: None, parallel=parallel)
    with torch.device("meta"):
        model = Transformer(arch)
        cuts = cut_tensors(model, SHARDING, mesh)
    (position,) = positions(run_of(arch, tp=tp, dp_shard=4, ep=ep))
    assert position.parameters == sum(p.numel() for p in model.parameters())
    assert position.routed == sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    partial = sum(p.numel() for name, p in model.named_parameters() if cuts[name].partial)
    assert position.stages[0].partial == partial


def test_rules_that_need_tables_and_counts():
    (problem,) = derived_problems(run_of(pp=3, schedule="interleaved"))
    assert problem[0] == "parallel.schedule" and "use 6 or 9" in problem[1]
    (problem,) = derived_problems(run_of(offload="cpu", offload_parameters=True))
    assert problem[0] == "parallel.offload_parameters" and "set parallel.zero = 3" in problem[1]


def test_all_rules_speak_at_once_before_anything_is_built():
    require_layout(run_of(tp=2, pp=2, dp_shard=2))
    with refused("E-LAYOUT-ILLEGAL") as error:
        require_layout(run_of(tp=3, pp=7, ep=2))
    assert {f"parallel.{axis}" for axis in ("tp", "pp", "ep")} <= set(error.value.facts["keys"])


@pytest.mark.parametrize("arch", [TINY, SPARSE])
def test_units_are_the_trainers(arch):
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from ingot.trainer.model.transformer import SHARDING, Transformer
    from ingot.trainer.parallel.tensor import cut_tensors
    from ingot.trainer.parallel.units import cut_units

    mesh: Any = SimpleNamespace(size=lambda axis: 1, index=lambda axis: 0, group=lambda axis: None, parallel=Parallel())
    with torch.device("meta"):
        model = Transformer(arch)
        cuts = cut_tensors(model, SHARDING, mesh)
    for layers in (0, 1, 4, 9):
        (position,) = positions(run_of(arch, unit_layers=layers))
        (stage,), units = position.stages, cut_units(model, layers, cuts)
        assert position.common_units(stage) == len(units)
        assert position.expert_units(stage) == sum(bool(unit.expert_names) for unit in units)
        assert position.units(stage) == position.common_units(stage) + position.expert_units(stage)
        sizes = [sum(model.get_parameter(n).numel() for n in u.names + u.expert_names) for u in units]
        if layers:
            assert [stage.block_parameters(group) for group in position.groups(stage)] == sizes[1:]


def test_recomputed_blocks_are_those_whose_number_divides():
    first, second = positions(run_of(pp=2, recompute="full", recompute_every=2))
    assert [p.recomputed(p.stages[0]) for p in (first, second)] == [2, 1]  # layers 0, 2 and 4


def test_blocks_with_experts_are_told_apart():
    first, second = positions(run_of(SPARSE, pp=2, recompute="full", recompute_every=2))
    assert [list(p.stages[0].expert_layers) for p in (first, second)] == [[2], [3, 4, 5]]
    assert [p.recomputed_with_experts(p.stages[0]) for p in (first, second)] == [1, 1]  # layers 2 and 4
    first, last = positions(run_of(replace(SPARSE, moe=replace(EXPERTS, first_dense=5)), pp=2))
    assert (first.routed, last.routed) == (0, 8 * 3 * 64 * 24)


def test_tokens_and_assignments_are_those_of_a_rank():
    (position,) = positions(run_of(SPARSE, cp=4, tp=2, ep=4))
    assert position.tokens == 64 / 4 and position.sequence_ranks == 2
    assert position.assignments == 16 / 2 * 2  # a capacity of one even share takes all
    half = replace(SPARSE, moe=replace(EXPERTS, capacity_factor=0.5))
    (position,) = positions(run_of(half, cp=4, tp=2, ep=4))
    assert position.assignments == 16 / 2 * 2 / 2
    # A load of 64 x 2 / 8 = 16 tokens of a sequence for each expert, of which it takes ceil(0.3 x 16) = 5.
    (position,) = positions(run_of(replace(SPARSE, moe=replace(EXPERTS, capacity_factor=0.3))))
    assert position.assignments == 64 * 2 * 5 / 16
