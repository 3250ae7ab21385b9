"""Copies of a node are kept as far from it as its cluster allows."""

import itertools

import pytest

from ingot.machine.topology import far_apart, node_path


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({}, ()),
        ({"SLURM_TOPOLOGY_ADDR": "node-17"}, ()),  # Slurm without a topology
        ({"SLURM_TOPOLOGY_ADDR": "spine1.leaf3.node-17"}, ("spine1", "leaf3")),
        ({"SLURM_TOPOLOGY_ADDR": "spine1.leaf3.node-17", "INGOT_TOPOLOGY": "row2/rack7/"}, ("row2", "rack7")),
    ],
)
def test_the_environment_names_the_place_of_a_node(environment, path):
    assert node_path(environment) == path


def test_nodes_without_a_place_are_in_the_order_of_their_numbers():
    for node, count, chosen in ((0, 1, [4]), (6, 1, [2]), (6, 3, [0, 2, 4]), (3, 0, [])):
        assert far_apart([()] * 8, node, count) == chosen


@pytest.mark.parametrize("nodes", range(1, 13))
def test_copies_are_apart_and_every_node_keeps_as_many(nodes):
    for racks in range(1, nodes + 1):
        # numbers jump from rack to rack, as where a scheduler gives out nodes that are free
        paths = [("row", f"rack{number % racks}") for number in range(nodes)]
        for count in range(nodes):
            chosen = [far_apart(paths, node, count) for node in range(nodes)]
            assert sorted(itertools.chain(*chosen)) == sorted(list(range(nodes)) * count)
            for node, others in enumerate(chosen):
                assert len({node, *others}) == count + 1
                if max(map(paths.count, paths)) <= nodes // (count + 1):
                    assert len({paths[one] for one in (node, *others)}) == count + 1
