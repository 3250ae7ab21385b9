"""The links that a line uses, where racks do not end where lines do."""

from dataclasses import replace

import pytest

from ingot.planner.predict.time.constants import PRIOR
from ingot.planner.predict.time.links import crosses_nodes, group_of
from ingot.planner.request.clusters import load_cluster
from ingot.schema.parallel import Parallel

RACKS = load_cluster("16x72xgb200")


@pytest.mark.parametrize(("ep", "crosses"), [(8, False), (64, True), (32, True), (4, False)])
def test_experts_of_64_ranks_lie_across_the_border_of_racks_of_72(ep: int, crosses: bool):
    parallel = Parallel(dp_shard=576, tp=2, ep=ep)
    assert crosses_nodes(parallel, "ep", RACKS) == crosses
    assert not crosses_nodes(parallel, "ep", load_cluster("16x64xgb200"))


def test_the_smallest_part_of_a_line_in_a_rack_is_what_the_others_wait_for():
    parallel = Parallel(dp_shard=1152, ep=64)
    group = group_of(parallel, "ep", 64, RACKS, PRIOR)
    assert (group.ranks, group.near) == (64, 8)  # the second group: 8 in the first rack, 56 in the next
    whole = group_of(parallel, "shard", 1152, RACKS, PRIOR)
    assert (whole.near, whole.domains) == (72, 16)


def test_a_whole_rack_and_one_rank_cross_nothing():
    parallel = Parallel(dp_shard=72, dp_replicate=16)
    assert not crosses_nodes(parallel, "shard", RACKS)
    assert not crosses_nodes(parallel, "tp", RACKS)
    assert crosses_nodes(parallel, "dp_replicate", RACKS)


def test_racks_that_are_not_filled_have_equal_parts():
    assert RACKS.domain == 72
    assert replace(RACKS, nodes=64, devices_per_node=4).domain == 64
    assert replace(RACKS, nodes=9, devices_per_node=4).domain == 72
    assert replace(load_cluster("4x8xh100"), nodes=3).domain == 8
