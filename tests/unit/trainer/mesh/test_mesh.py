"""Every group of a run ends a wait after the run's timeout, and each rank finds its own groups."""

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ingot.schema.parallel import Parallel
from ingot.theory.schedule import build_table
from ingot.trainer.mesh.mesh import AXES, build_mesh, own_group
from ingot.trainer.parallel.channels import Channels
from ingot.trainer.parallel.pipeline import TiedEnds

CPU = torch.device("cpu")


def groups_of(mesh):
    """Groups by purpose; a group of one rank waits for nobody."""
    groups = {name: mesh.group(name) for name in (*AXES, *mesh.views)}
    data = mesh.plane("shard")  # as FSDP2 gets it
    groups |= {f"fsdp {i}": data.get_group(i) for i in range(data.ndim)}
    if mesh.size("pp") > 1:
        channels = Channels(build_table("1f1b", mesh.size("pp"), 4, 1), mesh, torch.float64, CPU)
        groups |= {f"channel {c.sender} to {c.receiver}": group for c, group in channels.groups.items()}
        groups["tied"] = TiedEnds(mesh, range(mesh.size("pp")), []).group
    return {name: group for name, group in groups.items() if group.size() > 1}


@pytest.mark.parametrize(
    "degrees, expected",
    [
        ({"pp": 2, "tp": 2}, {"pp", "tp", "channel 0 to 1", "channel 1 to 0", "tied", "sequence", "expert_shard"}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate", "dp_shard", "shard", "fsdp 0", "fsdp 1", "expert_shard"}),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard", "tp", "shard", "fsdp 0", "sequence", "ep", "expert_shard"}),
        (
            {"dp_replicate": 2, "cp": 2},
            {"dp_replicate", "cp", "shard", "ring", "fsdp 0", "fsdp 1"} | {"sequence", "expert_shard"},
        ),
    ],
)
def test_every_group_has_the_timeout_of_the_run(fork_ranks, degrees, expected):
    def timeouts(rank, ranks):
        groups = groups_of(build_mesh(Parallel(**degrees), "cpu", 7.5, experts=True))
        return {name: group._get_backend(CPU).options._timeout for name, group in groups.items()}

    for found in fork_ranks(timeouts, 4):
        assert found == dict.fromkeys(expected, timedelta(seconds=7.5))


@pytest.mark.parametrize("name", ["tp", "channel 0 to 1", "tied"])
def test_a_rank_that_does_not_come_is_noticed_in_time(fork_ranks, name):
    def wait_for_the_other(rank, ranks):
        group = groups_of(build_mesh(Parallel(pp=2, tp=2), "cpu", 0.5))[name]
        members, one, waited = dist.get_process_group_ranks(group), torch.zeros(1), None
        dist.all_reduce(one, group=group)
        if rank == members[0]:
            started = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
                # Gloo ends these two by different clocks.
                if "channel" in name:
                    dist.recv(one, members[1], group=group)
                else:
                    dist.all_reduce(one, group=group)
            waited = time.monotonic() - started
        dist.barrier()
        return waited

    waited = [seconds for seconds in fork_ranks(wait_for_the_other, 4) if seconds is not None]
    assert len(waited) == 2  # groups
    assert min(waited) > 0.4 and max(waited) < 10  # the world group of these ranks has 60


VIEWS = [
    # degrees, the ranks of rank 5's line on each view
    (
        {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
        {"shard": [1, 3, 5, 7], "sequence": [4, 5, 6, 7], "ring": [5, 7], "ep": [4, 5, 6, 7], "expert_shard": [1, 5]},
    ),
    (
        {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
        {"shard": [5, 7], "sequence": [4, 5], "ring": [5], "ep": [4, 5], "expert_shard": [5, 7]},
    ),
    (
        {"dp_replicate": 2, "cp": 4, "ulysses": 2, "ep": 2},
        {"shard": [4, 5, 6, 7], "ring": [5, 7], "ulysses": [4, 5], "ep": [4, 5], "expert_shard": [5, 7]},
    ),
    (
        {"dp_replicate": 2, "cp": 2, "tp": 2, "reduce": "canonical", "virtual_ranks": 2},
        {"shard": [5], "sequence": [4, 5, 6, 7], "ep": [5], "expert_shard": [4, 5, 6, 7]},
    ),
]


@pytest.mark.parametrize("settings, lines", VIEWS)
def test_views_hold_the_ranks_that_share_something(fork_ranks, settings, lines):
    def found(rank, ranks):
        mesh = build_mesh(Parallel(**settings), "cpu", experts=True)
        for name in lines:
            assert dist.get_process_group_ranks(mesh.group(name)) == mesh.ranks(name)
            assert mesh.ranks(name)[mesh.index(name)] == rank and len(mesh.ranks(name)) == mesh.size(name)
        return {name: mesh.ranks(name) for name in lines}, mesh.plane("expert_shard").mesh.tolist()

    by_rank = fork_ranks(found, 8)
    assert by_rank[5][0] == lines
    copies = settings.get("dp_replicate", 1)
    for rank, (_, plane) in enumerate(by_rank):
        assert rank in (np.array(plane).flatten() if copies > 1 else plane)
    if copies > 1:
        assert by_rank[5][1] == [[n - 4 for n in lines["expert_shard"]], lines["expert_shard"]]
    else:
        assert by_rank[5][1] == lines["expert_shard"]


def test_ranks_read_the_batch_copy_by_copy(fork_ranks):
    """The ledger and canonical sums take the parts of the batch in the order of the ranks."""
    found = fork_ranks(
        lambda rank, ranks: build_mesh(Parallel(dp_replicate=2, dp_shard=2, tp=2), "cpu", 20).data_rank, 8
    )
    assert found == [0, 0, 1, 1, 2, 2, 3, 3]


def test_axes_of_one_rank_share_a_group(fork_ranks):
    def groups(rank, world):
        mesh = build_mesh(Parallel(dp_shard=2, tp=2), "cpu")
        of_axis = {axis: mesh.group(axis) for axis in AXES}
        alone = [axis for axis, group in of_axis.items() if group.size() == 1]
        return alone, len({group.group_name for group in of_axis.values()}), len(dist.distributed_c10d._world.pg_map)

    # The groups of two axes, one group for the others, and the world group.
    assert fork_ranks(groups, 4) == [(["pp", "dp_replicate", "cp"], 3, 4)] * 4


def test_an_axis_of_all_ranks_is_the_world_group(fork_ranks):
    def same(rank, ranks):
        mesh = build_mesh(Parallel(dp_shard=2), "cpu")
        return mesh.group("dp_shard") == dist.group.WORLD, mesh.ranks("tp"), mesh.index("dp_shard")

    assert fork_ranks(same, 2) == [(True, [0], 0), (True, [1], 1)]


@pytest.mark.parametrize(
    "degrees, talks, gathers",
    [
        ({"cp": 2, "ulysses": 1}, "ring", ("cp", "shard", "sequence")),
        ({"cp": 2, "ulysses": 2}, "ulysses", ("cp", "shard", "sequence")),
        ({"dp_shard": 2, "ep": 2}, "ep", ("dp_shard", "shard")),
        ({"tp": 2, "ep": 2}, "ep", ("tp", "sequence")),
    ],
)
def test_what_blocks_exchange_does_not_queue_behind_gathers(fork_ranks, degrees, talks, gathers):
    def groups(rank, ranks):
        mesh = build_mesh(Parallel(**degrees), "cpu", experts=True)
        others = [mesh.group(name) for name in gathers]
        return mesh.group(talks).size(), mesh.group(talks) in others, len(set(others))

    assert fork_ranks(groups, 2) == [(2, False, 1)] * 2


def test_ranks_find_their_own_group_and_the_others_none(fork_ranks):
    def ranks_of_mine(rank, ranks):
        group = own_group([[3, 0], [1]], timedelta(seconds=10), "test")
        return group and dist.get_process_group_ranks(group)

    assert fork_ranks(ranks_of_mine, 4) == [[0, 3], [1], None, [0, 3]]


def test_with_bound_devices_one_split_makes_all_groups(fork_ranks, monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "split_group", lambda **settings: calls.append(settings))

    def split(rank, ranks):
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda", rank)
        own_group([[3, 0], [1, 4]], timedelta(seconds=10), "test")
        world.bound_device_id = None
        return calls

    expected = {"split_ranks": [[0, 3], [1, 4], [2]], "timeout": timedelta(seconds=10), "group_desc": "test"}
    assert fork_ranks(split, 5) == [[expected]] * 5


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"pp": 2, "dp_shard": 2}, [[0, 1], [2, 3]]),
        ({"dp_shard": 2, "cp": 2}, [[0, 2], [1, 3]]),
        ({"dp_replicate": 2, "tp": 2}, [[0, 1, 2, 3]]),
    ],
)
def test_ranks_with_the_same_work(fork_ranks, degrees, expected):
    """The same pipeline stages, and the same part of each sequence."""
    found = fork_ranks(lambda rank, world: build_mesh(Parallel(**degrees), "cpu").equal_work(), 4)
    assert found == [expected] * 4
