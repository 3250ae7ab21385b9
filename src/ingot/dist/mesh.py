"""The device mesh: axis names, their order, and what a rank has to know about its place in it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.errors import ConfigError
from ingot.schema.parallel import Parallel

# Outermost first. Neighbouring ranks share a node: what talks most stands last.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """All axes are there, also those of size 1."""

    parallel: Parallel
    devices: DeviceMesh

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


def build_mesh(parallel: Parallel, device_type: str) -> Mesh:
    """Collective. Raises ConfigError when the product of the degrees is not the number of processes."""
    if parallel.world_size != dist.get_world_size():
        degrees = " x ".join(f"{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1)
        raise ConfigError(
            f"parallel {degrees or 'dp_shard=1'} makes {parallel.world_size} processes, "
            f"but the job has {dist.get_world_size()}",
            rule="the degrees of the mesh multiply to the number of processes",
            fix=f"start {parallel.world_size} processes, or change a degree",
        )
    sizes = tuple(getattr(parallel, axis) for axis in AXES)
    return Mesh(parallel, init_device_mesh(device_type, sizes, mesh_dim_names=AXES))
