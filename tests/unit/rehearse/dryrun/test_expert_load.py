"""Numbers of rows that follow from given loads of experts."""

from dataclasses import replace

from tests.expect import refused

from ingot.rehearse.dryrun.expert_load import AssumedLoad, read_loads
from ingot.schema.arch import Arch, Moe

MOE = Moe(num_experts=4, top_k=2, d_expert=8)
ARCH = Arch(
    vocab_size=64, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, d_ffn=32, max_seq_len=16, moe=MOE
)


def test_balanced_experts_have_the_same_and_keep_all():
    load = AssumedLoad.of(replace(MOE, capacity_factor=1.0), (), 1, 2)
    assert load.kept(40) == 40 and load.sent(40) == [10] * 4
    assert load.coming(40, 2) == [10, 10, 10, 10] and load.own_parts(40) == [20, 20]


def test_loads_are_any_measure_and_numbers_of_rows_sum_up():
    load = AssumedLoad.of(MOE, (1, 2, 4, 1), 0, 2)
    assert load.sent(80) == [10, 20, 40, 10] and load.coming(80, 2) == [10, 20, 10, 20]
    assert load.own_parts(60) == [20, 40] and load.kept(7) == 7
    assert all(sum(load.sent(rows)) == rows == sum(load.own_parts(rows)) for rows in range(30))


def test_what_is_above_the_capacity_is_dropped():
    load = AssumedLoad.of(replace(MOE, capacity_factor=1.0), (1, 2, 4, 1), 0, 1)
    assert load.kept(80) == 60 and load.sent(60) == [10, 20, 20, 10]
    half = AssumedLoad.of(replace(MOE, capacity_factor=0.5), (), 0, 1)
    assert half.kept(80) == 40 and half.sent(40) == [10] * 4


def test_an_expert_without_tokens_has_none():
    assert AssumedLoad.of(MOE, (0, 0, 1, 1), 0, 2).own_parts(0) == [0, 0]


def test_a_list_of_loads_is_read_or_refused(tmp_path):
    path = tmp_path / "loads.json"
    path.write_text("[1, 2.5, 0, 1]")
    assert read_loads(path, ARCH) == (1.0, 2.5, 0.0, 1.0)
    for text in ("[1, 2]", "[1, 2, -3, 4]", '{"a": 1}', "[0, 0, 0, 0]", "not json", '[1, 2, 3, "x"]'):
        path.write_text(text)
        with refused("E-EXPERT-LOAD-FILE"):
            read_loads(path, ARCH)
    with refused("E-EXPERT-LOAD-DENSE"):
        read_loads(path, replace(ARCH, moe=Moe()))
    with refused("E-EXPERT-LOAD-FILE"):
        read_loads(tmp_path / "nowhere", ARCH)
