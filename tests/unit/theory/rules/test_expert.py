"""Layouts that experts do not allow are refused with the way out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.theory.rules.test_layout import ARCH, problems

from ingot.schema.arch import Arch, Mla, Moe
from ingot.schema.parallel import Parallel
from ingot.theory.rules.expert import legal_ep
from ingot.theory.rules.layout import legal_tp

MOE = replace(ARCH, moe=Moe(num_experts=12, top_k=2, d_expert=20))


def with_moe(**changes) -> Arch:
    return replace(MOE, moe=replace(MOE.moe, **changes))


CASES = [
    (ARCH, {"ep": 2, "dp_shard": 2}, "parallel.ep", "2 ranks for experts, but the model has none"),
    (MOE, {"ep": 8, "dp_shard": 8}, "parallel.ep", "8 does not divide model.moe.num_experts=12; nearest: 4"),
    (
        MOE,
        {"ep": 6, "dp_shard": 2, "cp": 2},
        "parallel.ep",
        "6 does not divide the 4 ranks that share a copy of the model (dp_shard 2 x cp 2 x tp 1); nearest: 4",
    ),
    (
        MOE,
        {"ep": 2, "dp_replicate": 4, "pp": 2},
        "parallel.ep",
        "nearest: 1, or raise dp_shard, cp or tp, for example dp_shard = 2 with dp_replicate = 2; "
        "raising dp_replicate or pp does not help",
    ),
    (MOE, {"ep": 2, "pp": 2}, "parallel.ep", "nearest: 1, or raise dp_shard, cp or tp; raising dp_replicate"),
    (
        MOE,
        {"ep": 3, "dp_shard": 3, "cp": 2},
        "parallel.ep",
        "groups of 3 neighbors straddle tp 1 and cp 2: ep divides tp, or is tp times a divisor of cp, or tp x cp "
        "times a divisor of dp_shard; nearest: 2 or 6",
    ),
    (
        MOE,
        {"ep": 4, "dp_replicate": 4, "cp": 2, "reduce": "canonical", "virtual_ranks": 4},
        "parallel.ep",
        "nearest: 2, or raise cp or tp (a canonical sum keeps dp_shard = 1); raising dp_replicate",
    ),
    (MOE, {"tp": 2, "sequence": False}, "parallel.sequence", "set it to true, or tp = 1"),
    (
        with_moe(capacity_factor=0.01),
        {},
        "model.moe.capacity_factor",
        "0.01 x top_k 2 x seq_len 64 / 12 experts = 0.11, less than one token of a sequence; use at least 0.0938",
    ),
    (with_moe(shared_experts=1, d_expert=21), {"tp": 2}, "parallel.tp", "model.moe.shared_experts x d_expert=21"),
    (with_moe(first_dense=1), {"tp": 2}, "parallel.tp", "2 does not divide model.d_ffn=175"),
]


@pytest.mark.parametrize(("arch", "settings", "key", "way_out"), CASES)
def test_what_experts_do_not_allow_is_refused_with_the_way_out(arch, settings, key, way_out):
    arch = replace(arch, d_ffn=175) if "d_ffn" in way_out else arch
    found = problems(arch, **settings)
    assert any(way_out in message for message in found.get(key, [])), found


LEGAL = [
    (MOE, {"ep": 4, "dp_shard": 4}),
    (MOE, {"ep": 4, "dp_shard": 2, "cp": 2, "tp": 2}),
    (MOE, {"ep": 2, "cp": 2, "dp_replicate": 4, "reduce": "canonical", "virtual_ranks": 4}),
    (with_moe(d_expert=21), {"tp": 2}),  # chosen experts are not cut
    (replace(MOE, d_ffn=175), {"tp": 2}),  # no block is dense
    (with_moe(capacity_factor=0.094), {}),
]


@pytest.mark.parametrize(("arch", "settings"), LEGAL)
def test_legal_layouts_of_experts_have_no_problem(arch, settings):
    assert problems(arch, **settings) == {}


@given(st.integers(2, 24), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_the_legal_degrees_are_those_that_no_rule_refuses(experts, dp_shard, cp, ep_step):
    arch = with_moe(num_experts=experts)
    ranks = dp_shard * cp
    legal = legal_ep(experts, Parallel(dp_shard=dp_shard, cp=cp))
    for ep in range(1, 2 * ranks + 1, ep_step):
        assert ("parallel.ep" in problems(arch, dp_shard=dp_shard, cp=cp, ep=ep)) == (ep not in legal)


def test_latent_attention_is_cut_by_heads_alone():
    mla = Mla(kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8)
    arch = replace(ARCH, num_heads=6, num_kv_heads=6, head_dim=16, mla=mla, d_ffn=180, vocab_size=540)
    assert legal_tp(arch) == [1, 2, 3, 6]
