"""Which links the traffic of each line of the mesh uses, and how long it takes there.

A line is an axis of the mesh or a view of it (dist/mesh.py): ranks that differ on it alone. Its neighbours are `stride`
ranks apart, so that of its ranks as many are in one domain of fast links as strides fit there.
"""

import math
from dataclasses import dataclass, replace

from ingot.planner.predict.time.collectives import SECONDS, Group
from ingot.planner.predict.time.constants import Constants, fitted
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


def counted_as(cluster: Cluster) -> str:
    """For theory/, a TPU has the chunks and norms of a GPU."""
    return "cpu" if cluster.device == "cpu" else "cuda"


def line_of(traffic: Traffic) -> str:
    return traffic.axis if traffic.axis in ("pp", "dp_replicate") else _LINES[traffic.what]


def stride(parallel: Parallel, line: str) -> int:
    """How many ranks lie between neighbours on a line, one of them included. `parallel` is resolved."""
    copy = parallel.dp_shard * parallel.cp * parallel.tp
    return {
        "tp": 1,
        "ulysses": parallel.tp,
        "ring": parallel.tp * max(parallel.ulysses, 1),
        "sequence": 1,
        "ep": 1,
        "shard": parallel.tp,
        "expert_shard": parallel.ep,
        "dp_replicate": copy,
        "pp": copy * parallel.dp_replicate,
    }[line]


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
    """Whether a line can have ranks in different domains of fast links, which mostly are nodes. One of a single rank
    sends nothing anywhere."""
    reach = span(parallel, line)
    return cluster.devices > cluster.domain and reach > 1 and cluster.domain % reach != 0


def least_in_domain(parallel: Parallel, line: str, cluster: Cluster) -> int:
    """Of the neighbouring ranks that a line stretches over, those in one domain; the fewest, where domains do not end
    where lines do: of 64 ranks in racks of 72 the second line has 8 in the first rack, and the others wait for them."""
    reach, domain = span(parallel, line), cluster.domain
    return domain if reach % domain == 0 else math.gcd(reach, domain)


def bandwidth_of(parallel: Parallel, line: str, cluster: Cluster) -> float:
    """Bytes/s that one rank sends to the next on `line`; 0 when unknown."""
    return cluster.network_bandwidth if crosses_nodes(parallel, line, cluster) else cluster.link_bandwidth


def group_of(parallel: Parallel, line: str, ranks: int, cluster: Cluster, constants: Constants) -> Group:
    """`ranks` of a line, with what its links reach. On a CPU, links were measured with the library that uses them."""
    reached = 1.0 if cluster.device == "cpu" else constants.link_share
    network = 1.0 if cluster.device == "cpu" else constants.network_share
    near = ranks
    if crosses_nodes(parallel, line, cluster):
        near = min(max(least_in_domain(parallel, line, cluster) // stride(parallel, line), 1), ranks)
        if line == "pp" and near > 1:
            near = 1  # some rank's neighbour is in another domain, and the others wait for it
    return Group(
        ranks=ranks,
        near=near,
        link=cluster.link_bandwidth * reached,
        network=cluster.network_bandwidth * network,
        link_seconds=cluster.link_seconds,
        network_seconds=cluster.network_seconds,
        sharp=cluster.sharp,
    )


@dataclass(frozen=True)
class LineTime:
    """sent: bytes per step of one rank. seconds: of them alone on the links, 0 when a bandwidth is unknown. crosses:
    the domain of fast links."""

    sent: float
    seconds: float
    crosses: bool


def line_times(position: Position, cluster: Cluster, constants: Constants | None = None) -> dict[str, LineTime]:
    """By line, for those that send anything."""
    constants = constants or fitted()
    sent: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for traffic in step_traffic(position, counted_as(cluster)):
        line = line_of(traffic)
        sent[line] = sent.get(line, 0.0) + traffic.sent
        seconds[line] = seconds.get(line, 0.0) + traffic_seconds(position, traffic, cluster, constants)
    parallel = position.parallel
    return {line: LineTime(sent[line], seconds[line], crosses_nodes(parallel, line, cluster)) for line in sent}


def dispatched_once(position: Position, group: Group) -> float:
    """Of the rows that leave a domain, the expected share that is left when those of one token to one other domain are
    sent as one: d domains and k experts, drawn alike, d (1 - (1 - 1/d)^k) / k."""
    d, k = group.domains, position.arch.moe.top_k
    return d * (1 - (1 - 1 / d) ** k) / k


def traffic_seconds(position: Position, traffic: Traffic, cluster: Cluster, constants: Constants) -> float:
    """Of all its operations together."""
    parallel, software, line = position.parallel, position.software, line_of(traffic)
    if not bandwidth_of(parallel, line, cluster):
        return 0.0
    group = group_of(parallel, line, traffic.ranks, cluster, constants)
    if group.crosses and line == "ep" and software.dispatch_once:
        group = replace(group, across=dispatched_once(position, group))
    if group.crosses and not software.rails:
        group = replace(group, near=1)
    return traffic.count * SECONDS[traffic.kind](group, traffic.bytes / traffic.count)
