"""Every group of a run ends a wait after the run's timeout, and each rank finds its own groups."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ingot.dist.mesh import AXES, build_mesh, own_group
from ingot.parallel.channels import Channels
from ingot.parallel.stages import TiedEnds
from ingot.schema.parallel import Parallel
from ingot.theory.schedule import build_table

CPU = torch.device("cpu")


def groups_of(mesh):
    """By what they are for; those of size 1 have nobody to wait for."""
    groups = {axis: mesh.group(axis) for axis in AXES}
    data = mesh.devices["dp_replicate", "dp_shard"]  # as FSDP2 gets it
    groups |= {f"fsdp {i}": data.get_group(i) for i in range(2)}
    if mesh.size("pp") > 1:
        channels = Channels(build_table("1f1b", mesh.size("pp"), 4, 1), mesh, torch.float64, CPU)
        groups |= {f"channel {c.sender} to {c.receiver}": group for c, group in channels.groups.items()}
        groups["tied"] = TiedEnds(mesh, range(mesh.size("pp")), []).group
    return {name: group for name, group in groups.items() if group.size() > 1}


@pytest.mark.parametrize(
    "degrees, expected",
    [
        ({"pp": 2, "tp": 2}, {"pp", "tp", "channel 0 to 1", "channel 1 to 0", "tied"}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate", "dp_shard", "fsdp 0", "fsdp 1"}),
    ],
)
def test_every_group_has_the_timeout_of_the_run(fork_ranks, degrees, expected):
    def timeouts(rank, ranks):
        groups = groups_of(build_mesh(Parallel(**degrees), "cpu", 7.5))
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


def test_an_axis_of_all_ranks_is_the_world_group(fork_ranks):
    def same(rank, ranks):
        mesh = build_mesh(Parallel(dp_shard=2), "cpu")
        return mesh.group("dp_shard") == dist.group.WORLD, mesh.ranks("tp"), mesh.index("dp_shard")

    assert fork_ranks(same, 2) == [(True, [0], 0), (True, [1], 1)]


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
