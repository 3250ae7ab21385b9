"""The device mesh: axis names, their order and their legality, in one place."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.errors import ConfigError
from ingot.schema.run import Parallel

DP_SHARD = "dp_shard"


def build_mesh(parallel: Parallel, device_type: str) -> DeviceMesh:
    """One mesh axis per degree, outermost first. Raises ConfigError when the product is not the number of processes."""
    if parallel.world_size != dist.get_world_size():
        raise ConfigError(
            f"parallel.dp_shard={parallel.dp_shard} makes {parallel.world_size} processes, "
            f"but the job has {dist.get_world_size()}",
            rule="the degrees of the mesh multiply to the number of processes",
            fix=f"start {parallel.world_size} processes, or set parallel.dp_shard={dist.get_world_size()}",
        )
    return init_device_mesh(device_type, (parallel.dp_shard,), mesh_dim_names=(DP_SHARD,))
