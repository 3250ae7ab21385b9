"""Which link each mesh axis uses, and how long its traffic takes there."""

from dataclasses import dataclass

from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.theory.layout import Position
from ingot.theory.traffic import Traffic, step_traffic

# Innermost first: neighbouring ranks share a node (dist/mesh.py has the same order, outermost first).
_INNERMOST_FIRST = ("tp", "cp", "dp_shard", "dp_replicate", "pp")


def crosses_nodes(parallel: Parallel, axis: str, cluster: Cluster) -> bool:
    """Whether ranks that differ on `axis` alone can be on different nodes."""
    inside = 1
    for name in _INNERMOST_FIRST:
        if name == axis:
            return inside * getattr(parallel, axis) > cluster.devices_per_node and getattr(parallel, axis) > 1
        inside *= getattr(parallel, name)
    raise KeyError(axis)


def axis_bandwidth(parallel: Parallel, axis: str, cluster: Cluster) -> float:
    """Bytes/s that one rank sends to the next on `axis`; 0 when unknown."""
    return cluster.network_bandwidth if crosses_nodes(parallel, axis, cluster) else cluster.link_bandwidth


@dataclass(frozen=True)
class AxisTime:
    """sent: bytes per step of one rank. seconds: of them alone on the link, 0 when its bandwidth is unknown."""

    sent: float
    seconds: float
    crosses: bool


def axis_times(position: Position, cluster: Cluster) -> dict[str, AxisTime]:
    """By mesh axis, for those that send anything."""
    traffic = step_traffic(position, cluster.device)
    return {
        axis: _axis_time(position.parallel, axis, traffic, cluster) for axis in dict.fromkeys(t.axis for t in traffic)
    }


def _axis_time(parallel: Parallel, axis: str, traffic: tuple[Traffic, ...], cluster: Cluster) -> AxisTime:
    sent, bandwidth = sum(t.sent for t in traffic if t.axis == axis), axis_bandwidth(parallel, axis, cluster)
    return AxisTime(sent, sent / bandwidth if bandwidth else 0.0, crosses_nodes(parallel, axis, cluster))
