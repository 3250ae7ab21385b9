"""The device mesh: axis names, their order, what a rank has to know about its place in it, and its process groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ingot.errors import ConfigError
from ingot.schema.parallel import Parallel
from ingot.schema.run import Launch

# Outermost first. Neighbouring ranks share a node: what talks most stands last.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """All axes are there, also those of size 1. timeout: of every group of the run."""

    parallel: Parallel
    devices: DeviceMesh
    timeout: timedelta

    def size(self, axis: str) -> int:
        return getattr(self.parallel, axis)

    def index(self, axis: str) -> int:
        """This rank's coordinate on `axis`."""
        return self.devices.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on `axis` alone, in order of their coordinate."""
        return self.devices.get_group(axis)

    def ranks(self, axis: str) -> list[int]:
        """The global ranks of `group(axis)`."""
        return dist.get_process_group_ranks(self.group(axis))

    @property
    def data_rank(self) -> int:
        """Which part of the batch this rank reads: 0..data_ranks-1."""
        return self.index("dp_replicate") * self.parallel.dp_shard + self.index("dp_shard")

    @property
    def data_ranks(self) -> int:
        return self.parallel.data_ranks

    @property
    def layout(self) -> dict[str, int]:
        """The axes that divide something, by size; dp_shard always."""
        return {axis: self.size(axis) for axis in AXES if self.size(axis) > 1 or axis == "dp_shard"}

    def one_per_data_rank(self, stage_rank: int) -> list[int]:
        """Global ranks, by data rank, that hold pipeline position `stage_rank` and are first on tp and cp."""
        return self.devices.mesh[stage_rank, :, :, 0, 0].flatten().tolist()


def build_mesh(parallel: Parallel, device_type: str, timeout_seconds: float = Launch.timeout_seconds) -> Mesh:
    """Collective. Raises ConfigError when the product of the degrees is not the number of processes.

    timeout_seconds: of the group of each axis. An axis of all ranks is the world group, which has its own.
    """
    if parallel.world_size != dist.get_world_size():
        degrees = " x ".join(f"{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1)
        raise ConfigError(
            f"parallel {degrees or 'dp_shard=1'} makes {parallel.world_size} processes, "
            f"but the job has {dist.get_world_size()}",
            rule="the degrees of the mesh multiply to the number of processes",
            fix=f"start {parallel.world_size} processes, or change a degree",
        )
    timeout = timedelta(seconds=timeout_seconds)
    ranks = torch.arange(parallel.world_size).view([getattr(parallel, axis) for axis in AXES])
    groups = [_axis_group(ranks, dim, timeout) for dim in range(len(AXES))]
    return Mesh(parallel, DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES), timeout)


def _axis_group(ranks: torch.Tensor, dim: int, timeout: timedelta) -> dist.ProcessGroup:
    lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    group = dist.group.WORLD if len(lines) == 1 else own_group(lines, timeout, f"mesh_{AXES[dim]}")
    assert group is not None  # every rank is in a line
    return group


def own_group(groups: Sequence[Sequence[int]], timeout: timedelta, description: str) -> dist.ProcessGroup | None:
    """The one of these groups of global ranks, which share no rank, that this rank is in. Collective over the world.

    The timeout is given when a group is made: Gloo's receives do not follow a later change. A rank that is in none
    gets None, or a group of its own. description: in logs of NCCL and its flight recorder.
    """
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # One split of the communicator makes all groups. Ranks without one come along as groups of one, because names
        # of groups are counted on each rank.
        alone = set(range(dist.get_world_size())).difference(*groups)
        parts = [sorted(group) for group in groups] + [[rank] for rank in sorted(alone)]
        return dist.split_group(split_ranks=parts, timeout=timeout, group_desc=description)
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
        if isinstance(group, dist.ProcessGroup):
            own = group
    return own
