"""Illegal layouts are refused, all their problems at once, with the rule and the nearest legal values."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ingot.schema.arch import Arch, Moe
from ingot.schema.guard import Guard
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.theory.rules import run_problems
from ingot.theory.rules.layout import legal_tp
from ingot.theory.rules.nearest import divisors, multiples, nearest

ARCH = Arch(
    vocab_size=512, d_model=64, num_layers=6, num_heads=8, num_kv_heads=2, head_dim=8, d_ffn=176, max_seq_len=128
)
TRAIN = Train(steps=10, seq_len=64, global_batch=32, micro_batch=2)


def problems(arch: Arch = ARCH, **settings) -> dict[str, list[str]]:
    """Return the problems by key. settings: of Parallel or Train."""
    of_train = {name: settings.pop(name) for name in list(settings) if hasattr(TRAIN, name)}
    run = RunConfig(
        name="x",
        model=arch,
        data=Data(tokens=""),
        train=replace(TRAIN, **of_train),
        guard=settings.pop("guard", Guard()),
        parallel=Parallel(**settings),
    )
    found: dict[str, list[str]] = {}
    for key, message in [*((f"parallel.{n}", m) for n, m in run.parallel.problems()), *run_problems(run)]:
        found.setdefault(key, []).append(message)
    return found


CASES = [
    ({"tp": 3}, "parallel.tp", "3 does not divide model.num_heads=8; nearest: 2 or 4"),
    ({"tp": 16}, "parallel.tp", "num_heads=8; nearest: 8"),
    ({"tp": 4, "seq_len": 62}, "parallel.tp", "nearest: 2, or a seq_len of 60 or 64, or parallel.sequence = false"),
    (
        {"tp": 4, "cp": 2, "seq_len": 60},
        "parallel.tp",
        "4 does not divide train.seq_len=60 / cp 2 = 30 tokens, which sequence parallelism cuts; nearest: 2, "
        "or a seq_len of 56 or 64, or parallel.sequence = false",
    ),
    ({"pp": 8}, "parallel.pp", "8 stages are more than model.num_layers=6; use at most 6"),
    ({"pp": 4, "schedule": "interleaved"}, "parallel.pp", "4 ranks x 2 stages are more than"),
    ({"pp": 2, "stage_layers": (3, 2)}, "parallel.stage_layers", "sums to 5 blocks, but model.num_layers is 6"),
    ({"pp": 2, "stage_layers": (3, 2, 1)}, "parallel.stage_layers", "has 3 entries for 2 stages"),
    ({"pp": 3, "stage_layers": (3, 0, 3)}, "parallel.stage_layers", "stage 1 has 0 blocks"),
    ({"stage_layers": (6,)}, "parallel.stage_layers", "without a pipeline"),
    ({"stages_per_rank": 2}, "parallel.stages_per_rank", "without a pipeline"),
    ({"schedule": "zb_v"}, "parallel.schedule", "without a pipeline"),
    ({"pp": 2, "schedule": "zb_h1", "zero": 3}, "parallel.zero", "use zero 1 or 2, or one of the schedules gpipe"),
    ({"pp": 2, "schedule": "zb_v", "compile": "on"}, "train.compile", 'use "auto" or "off"'),
    ({"reduce": "canonical"}, "parallel.virtual_ranks", "needs a power of two"),
    ({"reduce": "canonical", "virtual_ranks": 6}, "parallel.virtual_ranks", "nearest: 4 or 8"),
    ({"reduce": "canonical", "virtual_ranks": 4, "dp_shard": 2}, "parallel.dp_shard", "use dp_replicate = 2"),
    ({"reduce": "canonical", "virtual_ranks": 4, "zero": 3}, "parallel.zero", 'use "auto" or 1'),
    ({"reduce": "canonical", "virtual_ranks": 8, "dp_replicate": 3}, "parallel.dp_replicate", "nearest: 2 or 4"),
    (
        {"reduce": "canonical", "virtual_ranks": 8, "dp_replicate": 4, "global_batch": 24},
        "train.global_batch",
        "24 is not micro_batch 2 x accumulation x 8 virtual ranks; nearest: 16 or 32",
    ),
    (
        {"reduce": "canonical", "virtual_ranks": 4, "pp": 2, "schedule": "zb_h1"},
        "parallel.schedule",
        "mixes the parts of the batch",
    ),
    ({"virtual_ranks": 4}, "parallel.virtual_ranks", 'set parallel.reduce = "canonical", or remove it'),
    ({"offload": "nvme"}, "parallel.offload_folder", "needs a folder"),
    ({"offload_folder": "/tmp"}, "parallel.offload_folder", 'set parallel.offload = "nvme"'),
    ({"offload_parameters": True, "zero": 3}, "parallel.offload_parameters", 'needs offload = "cpu"'),
    ({"offload_parameters": True, "zero": 2, "offload": "cpu"}, "parallel.offload_parameters", "needs zero = 3"),
    ({"recompute_every": 2}, "parallel.recompute_every", 'set parallel.recompute to "full" or "selective"'),
    ({"async_tp": True}, "parallel.async_tp", "needs tp of at least 2"),
    ({"async_tp": True, "tp": 2, "sequence": False}, "parallel.async_tp", "needs sequence = true"),
    ({"async_tp": True, "tp": 2, "device": "cpu"}, "parallel.async_tp", "GPUs with symmetric memory"),
    ({"async_tp": True, "tp": 2, "compile": "off"}, "parallel.async_tp", 'set train.compile to "auto" or "on"'),
    ({"async_tp": True, "tp": 2, "pp": 2, "schedule": "zb_v"}, "parallel.async_tp", "use one of the schedules gpipe"),
    ({"tp_chunks": 0}, "parallel.tp_chunks", "must be at least 1"),
    ({"tp_chunks": 2}, "parallel.tp_chunks", "needs tp of at least 2"),
    ({"tp_chunks": 2, "tp": 2, "sequence": False}, "parallel.tp_chunks", "needs sequence = true"),
    ({"tp_chunks": 9, "tp": 2, "cp": 4, "seq_len": 64}, "parallel.tp_chunks", "use at most 8"),
    ({"tp_chunks": 2, "tp": 2, "async_tp": True}, "parallel.tp_chunks", "set it to 1, or remove parallel.async_tp"),
    ({"grads": "bf16", "precision": "fp32"}, "parallel.grads", 'use "fp32"'),
    ({"dp_replicate": 3}, "train.global_batch", "3 data-parallel ranks; nearest: 30 or 36"),
    ({"tp": 0}, "parallel.tp", "must be at least 1"),
    ({"prefetch": -1}, "parallel.prefetch", "must be at least 0"),
]


@pytest.mark.parametrize(("settings", "key", "way_out"), CASES, ids=[f"{k}-{i}" for i, (_, k, _) in enumerate(CASES)])
def test_an_illegal_layout_is_refused_with_the_way_out(settings, key, way_out):
    found = problems(**settings)
    assert any(way_out in message for message in found.get(key, [])), found


def test_gradients_are_recomputed_by_another_group_of_experts():
    experts = replace(ARCH, moe=Moe(num_experts=4, top_k=2, d_expert=64))
    key, two = "guard.recompute_every", Guard(recompute_every=8)
    assert "there is one data rank" in problems(guard=two)[key][0]
    assert "one group of experts (ep = 4)" in problems(experts, guard=two, dp_shard=4, ep=4)[key][0]
    assert "one group of experts" in problems(experts, guard=two, dp_shard=2, tp=2, ep=4)[key][0]
    for legal in ({"dp_shard": 2}, {"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 4}):
        assert key not in problems(experts, guard=two, **legal)
    assert "hash_every is 0" in dict(Guard(recompute_every=8, hash_every=0).problems())["recompute_every"]


def test_all_of_them_come_at_once():
    found = problems(
        tp=3, pp=8, cp=7, offload="nvme", virtual_ranks=3, grads="bf16", precision="fp64", recompute_every=4
    )
    keys = {"tp", "pp", "cp", "offload_folder", "virtual_ranks", "grads", "recompute_every"}
    assert {key.removeprefix("parallel.") for key in found} >= keys


LEGAL = [
    {},
    {"tp": 2},
    {"tp": 8},  # each key/value head on four ranks
    {"tp": 2, "pp": 2, "dp_shard": 2},
    {"pp": 3, "schedule": "zb_v"},
    {"pp": 3, "stage_layers": (0, 5, 1)},
    {"pp": 2, "schedule": "interleaved", "stages_per_rank": 3, "zero": 3, "dp_shard": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "grads": "bf16"},
    {"reduce": "canonical", "virtual_ranks": 8, "dp_replicate": 4},
    {"offload": "cpu", "offload_parameters": True, "zero": 3},
    {"offload": "nvme", "offload_folder": "state"},
    {"recompute": "full", "recompute_every": 2},
    {"tp": 4, "sequence": False, "seq_len": 62},
    {"tp": 2, "pp": 2, "async_tp": True, "device": "cuda"},
    {"tp": 2, "cp": 4, "dp_shard": 2, "pp": 2},
    {"reduce": "canonical", "virtual_ranks": 8, "dp_replicate": 4, "cp": 2},
]


@pytest.mark.parametrize("settings", LEGAL, ids=str)
def test_legal_layouts_have_no_problem(settings):
    assert problems(**settings) == {}


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 500), st.integers(1, 1000))
def test_a_legal_degree_is_refused_by_no_rule_and_an_illegal_one_by_some(tp, kv_heads, d_ffn, vocab_size):
    arch = replace(ARCH, num_kv_heads=kv_heads, d_ffn=d_ffn, vocab_size=vocab_size)
    assume(tp > 1)
    assert ("parallel.tp" in problems(arch, tp=tp)) == (tp not in legal_tp(arch, TRAIN.seq_len))


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_the_nearest_multiples_surround_the_value(value, of):
    low, high = map(int, multiples(value, of).split(" or "))
    assert low % of == 0 and high == low + of and low >= of and (low <= value < high or value < of)


def test_nearest():
    assert nearest(3, [1, 2, 4, 8]) == "2 or 4"
    assert nearest(9, [1, 2, 4, 8]) == "8"


def test_divisors_of_a_large_number_are_found_by_its_root():
    assert all(divisors(number) == [n for n in range(1, number + 1) if number % n == 0] for number in range(200))
    found = divisors(62_500_000)
    assert found == sorted(set(found)) and len(found) == 6 * 10 and found[-1] == 62_500_000
    assert divisors(10**12)[:3] == [1, 2, 4]
