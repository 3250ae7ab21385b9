"""The device mesh: its axes and their order, a rank's coordinates, and the process groups.

Besides the axes there are views: other divisions of the ranks into groups, each used by one form of parallelism.

    shard          dp_shard x cp: the ranks that divide the state of one copy of the model (canonical sums: dp_shard)
    sequence       cp x tp: the ranks that have parts of the same sequences
    ring, ulysses  the two dimensions of the grid of cp ranks
    ep             neighbors among dp_shard x cp x tp: the ranks that divide the experts
    expert_shard   across ep: the ranks that hold the same experts and divide their state
    copy           dp_shard x cp x tp: the ranks of one copy of a pipeline stage
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ingot.errors import ConfigError
from ingot.schema.launch import Launch
from ingot.schema.parallel import Parallel

# Outermost first. Neighboring ranks share a node, so the axis with the most traffic comes last.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_IN_BLOCKS = ("ring", "ulysses", "ep")  # views whose ranks exchange tensors in the middle of a block


@dataclass(frozen=True)
class Mesh:
    """The mesh of a run. It has all axes, including axes of size 1.

    timeout: the timeout of every process group of the run. views: for each view, the global ranks that form a group
    with this rank, and their process group. lines: for each view, the global ranks of all its groups.
    """

    parallel: Parallel
    devices: DeviceMesh
    timeout: timedelta
    views: Mapping[str, tuple[list[int], dist.ProcessGroup]]
    lines: Mapping[str, list[list[int]]]

    def size(self, axis: str) -> int:
        return len(self.views[axis][0]) if axis in self.views else getattr(self.parallel, axis)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate on an axis or view."""
        if axis in self.views:
            return self.views[axis][0].index(dist.get_rank())
        return self.devices.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the group of the ranks whose other coordinates equal this rank's, in the order of the axis or view."""
        return self.views[axis][1] if axis in self.views else self.devices.get_group(axis)

    def ranks(self, axis: str) -> list[int]:
        """Return the global ranks of `group(axis)`."""
        return list(self.views[axis][0]) if axis in self.views else dist.get_process_group_ranks(self.group(axis))

    def plane(self, axis: str) -> DeviceMesh:
        """Return the DeviceMesh for FSDP2: dp_replicate x the view `axis`, or only `axis` if the model has one copy."""
        copies, size = self.size("dp_replicate"), self.size(axis)
        if copies == 1:
            return DeviceMesh.from_group(self.group(axis), self.devices.device_type, mesh_dim_names=(axis,))
        every = self.devices.mesh[self.index("pp")]  # [copies, dp_shard, cp, tp]
        own = set(self.ranks(axis))
        flat = every.reshape(copies, -1)
        places = [place for place, rank in enumerate(flat[self.index("dp_replicate")].tolist()) if rank in own]
        ranks, groups = flat[:, places].reshape(copies, size), [self.group("dp_replicate"), self.group(axis)]
        return DeviceMesh.from_group(groups, self.devices.device_type, ranks, mesh_dim_names=("dp_replicate", axis))

    @property
    def data_rank(self) -> int:
        """The index of the part of the batch that this rank reads: 0..data_ranks-1."""
        return self.index("dp_replicate") * self.parallel.dp_shard + self.index("dp_shard")

    @property
    def data_ranks(self) -> int:
        return self.parallel.data_ranks

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the axes larger than 1, and of dp_shard."""
        return {axis: self.size(axis) for axis in AXES if self.size(axis) > 1 or axis == "dp_shard"}

    def equal_work(self) -> list[list[int]]:
        """Return the groups of global ranks that have the same pipeline stages and the same part of the sequences."""
        return self.devices.mesh.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1).tolist()

    def data_line(self) -> tuple[list[int], dist.ProcessGroup]:
        """Return the global ranks that differ from this rank in their part of the batch alone, by data rank, and their
        group. Collective over the world if dp_replicate and dp_shard are both larger than 1."""
        for axis, other in (("dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard")):
            if self.size(other) == 1:
                return self.ranks(axis), self.group(axis)
        lines = self.devices.mesh.permute(0, 3, 4, 1, 2).flatten(3).flatten(0, 2).tolist()
        group = dist.group.WORLD if len(lines) == 1 else own_group(lines, self.timeout, "mesh_data")
        assert group is not None  # every rank is in a line
        return next(line for line in lines if dist.get_rank() in line), group

    def one_per_token_rank(self, stage_rank: int) -> list[int]:
        """Return the global ranks at pipeline position `stage_rank` with tp index 0, ordered by data rank, then cp."""
        return self.devices.mesh[stage_rank, :, :, :, 0].flatten().tolist()

    def one_per_data_rank(self, stage_rank: int) -> list[int]:
        """Return the global ranks at pipeline position `stage_rank` with tp and cp index 0, ordered by data rank."""
        return self.devices.mesh[stage_rank, :, :, 0, 0].flatten().tolist()


def build_mesh(
    parallel: Parallel,
    device_type: str,
    timeout_seconds: float = Launch.timeout_seconds,
    *,
    experts: bool = False,
    copy: bool = False,
) -> Mesh:
    """Build the mesh and its process groups. Collective.

    parallel: the degrees, with every "auto" resolved. experts: make the views for experts as well. copy: make the view
    "copy" as well. timeout_seconds: the timeout of all new groups; a group of all ranks is the world group, which keeps
    its timeout. Raises ConfigError if the product of the degrees is not the number of processes.
    """
    if parallel.world_size != dist.get_world_size():
        degrees = " x ".join(f"{axis}={getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1)
        raise ConfigError(
            "E-WORLD-SIZE",
            f"parallel {degrees or 'dp_shard=1'} needs {parallel.world_size} processes, "
            f"but the job has {dist.get_world_size()}",
            rule="the product of the parallel degrees is the number of processes",
            fix=f"start {parallel.world_size} processes, or change a degree in [parallel]",
            needed=parallel.world_size,
            processes=dist.get_world_size(),
        )
    timeout = timedelta(seconds=timeout_seconds)
    ranks = torch.arange(parallel.world_size).view([getattr(parallel, axis) for axis in AXES])
    groups = _axis_groups(ranks, timeout)
    devices = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)
    lines = _view_lines(parallel, ranks, experts, copy)
    return Mesh(parallel, devices, timeout, _views(lines, ranks, groups, timeout), lines)


def _view_lines(parallel: Parallel, ranks: torch.Tensor, experts: bool, copy: bool) -> dict[str, list[list[int]]]:
    """Return, for each view, the global ranks of its groups."""
    pp, copies, dp_shard, cp, tp = ranks.shape
    over_cp = ranks.movedim(3, -1).reshape(-1, parallel.ring, cp // parallel.ring)
    tables = {
        "shard": ranks.permute(0, 1, 4, 3, 2) if parallel.shard_ranks == dp_shard else ranks.permute(0, 1, 4, 2, 3),
        "ulysses": over_cp,
        "ring": over_cp.transpose(1, 2),
    }
    sizes = {"shard": parallel.shard_ranks, "ulysses": cp // parallel.ring, "ring": parallel.ring}
    if experts:
        over_experts = ranks.reshape(pp * copies, -1, parallel.ep)
        tables |= {"sequence": ranks, "ep": over_experts, "expert_shard": over_experts.transpose(1, 2)}
        sizes |= {"sequence": cp * tp, "ep": parallel.ep, "expert_shard": parallel.expert_ranks}
    if copy:
        tables["copy"], sizes["copy"] = ranks, dp_shard * cp * tp
    return {name: sorted(table.reshape(-1, sizes[name]).tolist()) for name, table in tables.items()}


def _views(
    lines: Mapping[str, list[list[int]]], ranks: torch.Tensor, axes: list[dist.ProcessGroup], timeout: timedelta
) -> dict[str, tuple[list[int], dist.ProcessGroup]]:
    """Make the groups of the views. Collective.

    A view that divides the ranks as an axis or an earlier view does shares its groups. Exchanges inside a block get
    groups of their own: a communicator works in order, so messages of a ring would wait for gathers of later units.
    """
    known = {(False, str(sorted(_lines(ranks, dim)))): group for dim, group in enumerate(axes)}
    views = {}
    for name, of_all in lines.items():
        apart = name in _IN_BLOCKS and len(of_all[0]) > 1
        key = apart, str(of_all)
        if key not in known:
            is_world = len(of_all) == 1 and not apart
            made = dist.group.WORLD if is_world else own_group(of_all, timeout, f"mesh_{name}")
            assert made is not None  # every rank is in a line
            known[key] = made
        views[name] = next(line for line in of_all if dist.get_rank() in line), known[key]
    return views


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    return ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()


def _axis_groups(ranks: torch.Tensor, timeout: timedelta) -> list[dist.ProcessGroup]:
    """Make the groups of the axes. Collective. All axes of degree 1 have one group, of this rank alone."""
    known: dict[str, dist.ProcessGroup] = {}
    for dim, axis in enumerate(AXES):
        lines = _lines(ranks, dim)
        if str(lines) not in known:
            name = f"mesh_{axis}" if ranks.shape[dim] > 1 else "mesh_alone"
            group = dist.group.WORLD if len(lines) == 1 else own_group(lines, timeout, name)
            assert group is not None  # every rank is in a line
            known[str(lines)] = group
    return [known[str(_lines(ranks, dim))] for dim in range(len(AXES))]


def own_group(groups: Sequence[Sequence[int]], timeout: timedelta, description: str) -> dist.ProcessGroup | None:
    """Make these disjoint groups of global ranks and return this rank's group. Collective over the world.

    A rank in no group gets None, or a group of only itself. The timeout is set when the group is made, because Gloo's
    receives ignore a later change. description: a name shown in NCCL's logs and flight recorder.
    """
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # One split of the communicator makes all groups. Ranks without a group join as groups of one rank, because
        # group names contain a counter that must be the same on every rank.
        alone = set(range(dist.get_world_size())).difference(*groups)
        parts = [sorted(group) for group in groups] + [[rank] for rank in sorted(alone)]
        return dist.split_group(split_ranks=parts, timeout=timeout, group_desc=description)
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
        if isinstance(group, dist.ProcessGroup):
            own = group
    return own


def callback_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make another group of all ranks, for the sums of callbacks. Collective over the world.

    Gloo and NCCL match the collectives of a group by their order alone. A sum that a callback leaves out on one rank is
    then taken for the next one of the same group: here, of a callback, and never for the vote to stop a run.
    """
    # Not `own_group`: the tensors of a callback may be on the host of a rank with a GPU.
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, group_desc="callbacks")
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def cpu_group(timeout: timedelta, description: str) -> dist.ProcessGroup:
    """Make a Gloo group of all ranks, for values on the host that a thread beside the training thread exchanges.
    Collective over the world. description: a name for logs.
    """
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=description)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group
