"""Collectives by algorithm and tier, against what anyone can work out on paper."""

from dataclasses import replace

import pytest

from ingot.planner.predict.time.constants import PRIOR
from ingot.planner.predict.time.links import (
    PAIR_SHARE,
    CollectiveGroup,
    all_gather,
    all_reduce,
    all_to_all,
    dispatched_once,
    group_of,
    hierarchical_all_reduce,
    line_times,
    ring_all_reduce,
    send,
    tree_all_reduce,
)
from ingot.planner.request.clusters import load_cluster
from ingot.planner.request.presets import load_model
from ingot.schema.parallel import Parallel
from ingot.schema.run import Data, RunConfig, Train
from ingot.schema.software import INGOT
from ingot.theory.layout import positions

NODE = CollectiveGroup(8, 8, 450e9)  # eight H100, one direction of NVLink
NODES = CollectiveGroup(1024, 8, 450e9, 50e9)  # 128 of them, 400 Gbit/s for each GPU
BF16_GRADIENTS = 7e9 * 2


def test_gradients_of_7b_over_eight_h100_take_54_ms():
    """2 (n-1)/n S / b: the printed 30 ms count both directions of NVLink."""
    assert (
        ring_all_reduce(NODE, BF16_GRADIENTS) == pytest.approx(2 * 7 / 8 * 14e9 / 450e9) == pytest.approx(0.054, 0.01)
    )


def test_over_128_nodes_they_take_an_eighth_of_a_second_by_rails_and_more_than_half_by_one_card():
    assert hierarchical_all_reduce(NODES, BF16_GRADIENTS) == pytest.approx(0.124, rel=0.01)
    assert ring_all_reduce(replace(NODES, near=1), BF16_GRADIENTS) == pytest.approx(0.56, rel=0.01)
    assert all_reduce(NODES, BF16_GRADIENTS) <= hierarchical_all_reduce(NODES, BF16_GRADIENTS)


def test_a_gather_is_half_of_an_all_reduce_and_nothing_is_sent_to_oneself():
    assert 2 * all_gather(NODE, 1e9) == ring_all_reduce(NODE, 1e9)
    alone = CollectiveGroup(1, 1, 450e9)
    assert all_gather(alone, 1e9) == all_reduce(alone, 1e9) == all_to_all(alone, 1e9) == 0.0


def test_small_messages_take_latency_and_trees_have_less_of_it():
    slow = replace(NODES, link_seconds=3e-6, network_seconds=8e-6)
    assert ring_all_reduce(slow, 8) == pytest.approx(2 * (896 * 3e-6 + 127 * 8e-6), rel=1e-3)
    assert tree_all_reduce(slow, 8) == pytest.approx(2 * (3 * 3e-6 + 7 * 8e-6), rel=1e-3) == all_reduce(slow, 8)
    half = replace(NODE, link_seconds=3e-6)  # bus bandwidth saturates above 16-32 MiB
    shares = [ring_all_reduce(NODE, size) / ring_all_reduce(half, size) for size in (2**20, 2**24, 2**28)]
    assert shares[0] < 0.2 and 0.5 < shares[1] < 0.8 and shares[2] > 0.95


def test_switches_that_add_up_send_data_once():
    assert all_reduce(replace(NODE, sharp=True), 1e9) == pytest.approx(1e9 / 450e9)
    assert all_reduce(replace(NODES, sharp=True), 1e9) == all_reduce(NODES, 1e9)


def test_an_all_to_all_waits_for_its_network_cards():
    group = CollectiveGroup(16, 8, 450e9, 50e9)
    assert all_to_all(group, 1e9) == pytest.approx(1e9 * 8 / 16 / 50e9)
    assert all_to_all(replace(group, across=0.5), 1e9) == pytest.approx(1e9 * 8 / 16 / 100e9)
    assert all_to_all(NODE, 1e9) == pytest.approx(1e9 * 7 / 8 / 450e9)
    assert send(group, 1e9) == 1e9 / 50e9 and send(NODE, 1e9) == 1e9 / (PAIR_SHARE * 450e9)


def test_a_message_between_two_ranks_takes_what_was_published_of_it():
    """Qi et al. 2023, table 4: 6 x 1024 tokens of 2304 numbers in 0.601 ms on A100."""
    assert send(CollectiveGroup(8, 8, PRIOR.link_share * 300e9), 6 * 1024 * 2304 * 2) == pytest.approx(
        0.601e-3, rel=0.2
    )


def run_of(arch, **settings) -> RunConfig:
    parallel = Parallel(**settings)
    train = Train(steps=1, seq_len=4096, global_batch=4 * parallel.data_ranks, micro_batch=1)
    return RunConfig(name="x", model=arch, data=Data(tokens="t"), train=train, parallel=parallel)


def test_ranks_of_a_line_that_share_a_node_share_its_network_cards():
    cluster, parallel = load_cluster("4x8xh100"), Parallel(tp=4, dp_shard=8)
    assert [group_of(parallel, line, n, cluster, PRIOR).near for line, n in (("tp", 4), ("shard", 8))] == [4, 2]
    assert group_of(parallel, "shard", 8, load_cluster("72xgb200"), PRIOR).near == 8


def test_one_card_for_all_is_what_old_systems_did():
    cluster, run = load_cluster("4x8xh100"), run_of(load_model("llama3-8b").arch, dp_shard=32, zero=3)
    (position,) = positions(run)
    (slow,) = positions(run, replace(INGOT, rails=False))
    assert line_times(slow, cluster, PRIOR)["shard"].seconds > 5 * line_times(position, cluster, PRIOR)["shard"].seconds


def test_a_token_that_crosses_once_sends_less():
    """4 nodes and 8 experts of a token: 4 (1 - (3/4)^8) nodes instead of 8 rows."""
    cluster, run = load_cluster("4x8xh100"), run_of(load_model("qwen3-30b-a3b").arch, dp_shard=32, ep=32)
    (position,) = positions(run, replace(INGOT, dispatch_once=True))
    group = group_of(position.parallel, "ep", 32, cluster, PRIOR)
    assert dispatched_once(position, group) == pytest.approx(4 * (1 - 0.75**8) / 8)
    (each,) = positions(run)
    assert line_times(position, cluster, PRIOR)["ep"].seconds < 0.5 * line_times(each, cluster, PRIOR)["ep"].seconds
