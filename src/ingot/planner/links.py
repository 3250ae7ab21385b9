"""Which link the traffic of each line of the mesh uses, and how long it takes there.

A line is an axis of the mesh or a view of it (dist/mesh.py): ranks that differ on it alone.
"""

from dataclasses import dataclass

from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.theory.layout import Position
from ingot.theory.traffic import Traffic, step_traffic

# Traffic between ranks of a copy of the model, by what travels (theory/traffic.py).
_LINES = {
    "hidden states": "tp",
    "numbers of the loss": "tp",
    "gradients of shared weights": "tp",
    "heads of attention": "ulysses",
    "keys and values": "ring",
    "rows of experts": "ep",
    "counts of rows": "ep",
    "choices of experts": "sequence",
    "gradients": "shard",
    "parameters": "shard",
    "gradients of experts": "expert_shard",
    "parameters of experts": "expert_shard",
}


def line_of(traffic: Traffic) -> str:
    return traffic.axis if traffic.axis in ("pp", "dp_replicate") else _LINES[traffic.what]


def span(parallel: Parallel, line: str) -> int:
    """Over how many neighbouring ranks a line stretches: neighbours share a node. `parallel` is resolved."""
    copy = parallel.dp_shard * parallel.cp * parallel.tp
    return {
        "tp": parallel.tp,
        "ulysses": parallel.tp * max(parallel.ulysses, 1),
        "ring": parallel.tp * parallel.cp,
        "sequence": parallel.tp * parallel.cp,
        "ep": parallel.ep,
        "shard": copy,
        "expert_shard": copy,
        "dp_replicate": copy * parallel.dp_replicate,
        "pp": parallel.world_size,
    }[line]


def crosses_nodes(parallel: Parallel, line: str, cluster: Cluster) -> bool:
    """Whether a line can have ranks on different nodes. One of a single rank sends nothing anywhere."""
    return cluster.nodes > 1 and span(parallel, line) > cluster.devices_per_node


def bandwidth_of(parallel: Parallel, line: str, cluster: Cluster) -> float:
    """Bytes/s that one rank sends to the next on `line`; 0 when unknown."""
    return cluster.network_bandwidth if crosses_nodes(parallel, line, cluster) else cluster.link_bandwidth


@dataclass(frozen=True)
class LineTime:
    """sent: bytes per step of one rank. seconds: of them alone on the link, 0 when its bandwidth is unknown."""

    sent: float
    seconds: float
    crosses: bool


def line_times(position: Position, cluster: Cluster) -> dict[str, LineTime]:
    """By line, for those that send anything."""
    sent: dict[str, float] = {}
    for traffic in step_traffic(position, cluster.device):
        line = line_of(traffic)
        sent[line] = sent.get(line, 0.0) + traffic.sent
    return {line: _time(position.parallel, line, amount, cluster) for line, amount in sent.items()}


def _time(parallel: Parallel, line: str, sent: float, cluster: Cluster) -> LineTime:
    bandwidth = bandwidth_of(parallel, line, cluster)
    return LineTime(sent, sent / bandwidth if bandwidth else 0.0, crosses_nodes(parallel, line, cluster))
