"""The links that the traffic on each line of the mesh uses, and the time of collectives on them.

A line is an axis of the mesh, or of one of its views (trainer/mesh); the ranks of one group on a line differ only in
their index on it. Neighbors on a line are `stride` ranks apart, so a domain of fast links holds as many ranks of the
group as strides fit into the domain.

The time of a collective is a latency for each hop, plus its bytes over the slowest link. S is the number of bytes, n
the number of ranks, g the number of ranks in one domain of fast links (there are n/g domains), b_l and b_n the bytes/s
of one rank inside and between domains, and a_l and a_n the seconds of a hop (Thakur et al. 2005; Patarasuk & Yuan 2009;
NCCL's own choices):

    ring          gather or reduce-scatter S(n-1)/n / min(b_l, g b_n) + (n - n/g) a_l + n/g a_n; all-reduce twice that.
                  Rings use all network cards of a node at once, so g ranks share g cards
    tree          all-reduce 2 S / min(b_l, g b_n) + 2 log2(n) a; the least latency
    hierarchical  all-reduce: reduce-scatter in the domain, all-reduce of S/g between domains, gather in the domain
    switch        all-reduce inside a domain whose switches reduce (SHARP): S / b_l
    all-to-all    the larger of S(g-1)/n / b_l and S(n-g)/n / b_n
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ingot.planner.predict.time.constants import Constants, fitted
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import Parallel
from ingot.theory.layout import Position
from ingot.theory.traffic import Traffic, step_traffic

# The share of a link's bandwidth that a message between two ranks reaches; it uses fewer channels than a ring through
# all ranks. For an A100's 300 GB/s, 47 GB/s are published (Qi et al. 2023, table 4: 28 MB of hidden states in 0.6 ms).
PAIR_SHARE = 0.25


@dataclass(frozen=True)
class CollectiveGroup:
    """The ranks of one collective.

    near: ranks of the group in one domain of fast links. link, network: bytes/s that one rank sends inside the domain
      and between domains, in one direction.
    link_seconds, network_seconds: latency of a hop. sharp: the domain's switches do reductions in the network (SHARP).
    across: the share of an all-to-all's inter-domain bytes that is really sent; below 1 if the rows for one domain are
      sent once.
    """

    ranks: int
    near: int
    link: float
    network: float = 0.0
    link_seconds: float = 0.0
    network_seconds: float = 0.0
    sharp: bool = False
    across: float = 1.0

    @property
    def crosses(self) -> bool:
        return self.ranks > self.near

    @property
    def bandwidth(self) -> float:
        """The bytes/s of a ring through all ranks."""
        return min(self.link, self.near * self.network) if self.crosses and self.near > 1 else self._outer

    @property
    def _outer(self) -> float:
        return self.network if self.crosses else self.link

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.near)

    @property
    def ring_latency(self) -> float:
        """The latency of one round of a ring through all ranks, in seconds."""
        if not self.crosses:
            return (self.ranks - 1) * self.link_seconds
        return (self.ranks - self.domains) * self.link_seconds + (self.domains - 1) * self.network_seconds

    @property
    def tree_latency(self) -> float:
        """The latency of one pass up or down a tree of all ranks, in seconds."""
        inside = math.ceil(math.log2(self.near)) * self.link_seconds
        return inside + math.ceil(math.log2(self.domains)) * self.network_seconds


def all_gather(group: CollectiveGroup, size: float) -> float:
    """Return the seconds of an all-gather on a ring, after which every rank has all `size` bytes."""
    if group.ranks == 1:
        return 0.0
    return size * (group.ranks - 1) / group.ranks / group.bandwidth + group.ring_latency


reduce_scatter = all_gather


def ring_all_reduce(group: CollectiveGroup, size: float) -> float:
    return 2 * all_gather(group, size)


def tree_all_reduce(group: CollectiveGroup, size: float) -> float:
    return 2 * size / group.bandwidth + 2 * group.tree_latency


def hierarchical_all_reduce(group: CollectiveGroup, size: float) -> float:
    """Return the seconds of an all-reduce in three phases: reduce-scatter inside each domain, all-reduce between
    domains, all-gather inside each domain."""
    inside = CollectiveGroup(group.near, group.near, group.link, link_seconds=group.link_seconds)
    between = CollectiveGroup(group.domains, 1, group.link, group.network, group.link_seconds, group.network_seconds)
    return ring_all_reduce(inside, size) + ring_all_reduce(between, size / group.near)


def all_reduce(group: CollectiveGroup, size: float) -> float:
    """Return the seconds of an all-reduce with the fastest algorithm, which libraries select."""
    if group.ranks == 1:
        return 0.0
    ways = [ring_all_reduce(group, size), tree_all_reduce(group, size)]
    if group.crosses:
        ways.append(hierarchical_all_reduce(group, size))
    elif group.sharp:
        ways.append(size / group.link + 2 * group.link_seconds)
    return min(ways)


def all_to_all(group: CollectiveGroup, size: float) -> float:
    """Return the seconds of an all-to-all. size: bytes that each rank distributes, including the part it keeps."""
    if group.ranks == 1:
        return 0.0
    inside = size * (group.near - 1) / group.ranks / group.link
    if not group.crosses:
        return inside + 2 * group.link_seconds
    across = group.across * size * (group.ranks - group.near) / group.ranks / group.network
    return max(inside, across) + 2 * group.network_seconds


def send(group: CollectiveGroup, size: float) -> float:
    """Return the seconds of a message to the next rank. If the group crosses domains, this is the time over the
    network, because all ranks wait for the last rank of a domain.
    """
    if group.crosses:
        return size / min(group.network, PAIR_SHARE * group.link) + group.network_seconds
    return size / (PAIR_SHARE * group.link) + group.link_seconds


SECONDS: dict[str, Callable[[CollectiveGroup, float], float]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "send": send,
}


# The line of each kind of traffic inside one copy of the model, by Traffic.what (theory/traffic.py).
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
    "whole matrices": "copy",
}


def counted_as(cluster: Cluster) -> str:
    """Return the device kind with which theory/ counts work and traffic. TPUs are counted as "cuda"."""
    return "cpu" if cluster.device == "cpu" else "cuda"


def line_of(traffic: Traffic) -> str:
    """Return the line of the mesh that the traffic goes over."""
    return traffic.axis if traffic.axis in ("pp", "dp_replicate") else _LINES[traffic.what]


def stride(parallel: Parallel, line: str) -> int:
    """Return the distance in ranks between neighbors on a line. `parallel` has no "auto" values."""
    copy = parallel.dp_shard * parallel.cp * parallel.tp
    return {
        "tp": 1,
        "ulysses": parallel.tp,
        "ring": parallel.tp * max(parallel.ulysses, 1),
        "sequence": 1,
        "ep": 1,
        "copy": 1,
        "shard": parallel.tp,
        "expert_shard": parallel.ep,
        "dp_replicate": copy,
        "pp": copy * parallel.dp_replicate,
    }[line]


def span(parallel: Parallel, line: str) -> int:
    """Return the number of consecutive ranks that contain a whole group of a line. `parallel` has no "auto" values."""
    copy = parallel.dp_shard * parallel.cp * parallel.tp
    return {
        "tp": parallel.tp,
        "ulysses": parallel.tp * max(parallel.ulysses, 1),
        "ring": parallel.tp * parallel.cp,
        "sequence": parallel.tp * parallel.cp,
        "ep": parallel.ep,
        "shard": copy,
        "expert_shard": copy,
        "copy": copy,
        "dp_replicate": copy * parallel.dp_replicate,
        "pp": parallel.world_size,
    }[line]


def crosses_nodes(parallel: Parallel, line: str, cluster: Cluster) -> bool:
    """Return True if a group of this line can have ranks in different domains of fast links (usually nodes)."""
    reach = span(parallel, line)
    return cluster.devices > cluster.domain and reach > 1 and cluster.domain % reach != 0


def least_in_domain(parallel: Parallel, line: str, cluster: Cluster) -> int:
    """Return the smallest number of ranks of a span that share one domain.

    Spans and domains need not end together: with spans of 64 ranks and domains of 72, the second span has only 8 ranks
    in the first domain, and the other ranks wait for those 8.
    """
    reach, domain = span(parallel, line), cluster.domain
    return domain if reach % domain == 0 else math.gcd(reach, domain)


def bandwidth_of(parallel: Parallel, line: str, cluster: Cluster) -> float:
    """Return the bytes/s at which one rank sends to the next on `line`; 0 if unknown."""
    return cluster.network_bandwidth if crosses_nodes(parallel, line, cluster) else cluster.link_bandwidth


def group_of(parallel: Parallel, line: str, ranks: int, cluster: Cluster, constants: Constants) -> CollectiveGroup:
    """Return the group of `ranks` ranks on a line, with the rates that collectives reach on its links.

    On a CPU these are the cluster's full rates, because they were measured with the library that runs the collectives.
    """
    reached = 1.0 if cluster.device == "cpu" else constants.link_share
    network = 1.0 if cluster.device == "cpu" else constants.network_share
    near = ranks
    if crosses_nodes(parallel, line, cluster):
        near = min(max(least_in_domain(parallel, line, cluster) // stride(parallel, line), 1), ranks)
        if line == "pp" and near > 1:
            near = 1  # at least one rank's neighbor is in another domain, and the other ranks wait for it
    return CollectiveGroup(
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
    """The traffic of a line. sent: bytes that one rank sends per step. seconds: time of this traffic without other
    traffic on its links, 0 if a bandwidth is unknown. crosses: the line leaves the domain of fast links.
    """

    sent: float
    seconds: float
    crosses: bool


def line_times(position: Position, cluster: Cluster, constants: Constants | None = None) -> dict[str, LineTime]:
    """Return the traffic and its time per step, for each line on which the ranks at `position` send anything."""
    constants = constants or fitted()
    sent: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for traffic in step_traffic(position, counted_as(cluster)):
        line = line_of(traffic)
        sent[line] = sent.get(line, 0.0) + traffic.sent
        seconds[line] = seconds.get(line, 0.0) + traffic_seconds(position, traffic, cluster, constants)
    parallel = position.parallel
    return {line: LineTime(sent[line], seconds[line], crosses_nodes(parallel, line, cluster)) for line in sent}


def dispatched_once(position: Position, group: CollectiveGroup) -> float:
    """Return the share of inter-domain rows that is sent if each token is sent only once to each domain, even if
    several of its experts are there.

    With d domains and k experts chosen at random, the expected share is d (1 - (1 - 1/d)^k) / k.
    """
    d, k = group.domains, position.arch.moe.top_k
    return d * (1 - (1 - 1 / d) ** k) / k


def traffic_seconds(position: Position, traffic: Traffic, cluster: Cluster, constants: Constants) -> float:
    """Return the seconds of all operations of `traffic` in a step; 0 if the bandwidth is unknown."""
    parallel, software, line = position.parallel, position.software, line_of(traffic)
    if not bandwidth_of(parallel, line, cluster):
        return 0.0
    group = group_of(parallel, line, traffic.ranks, cluster, constants)
    if group.crosses and line == "ep" and software.dispatch_once:
        group = replace(group, across=dispatched_once(position, group))
    if group.crosses and not software.rails:
        group = replace(group, near=1)
    return traffic.count * SECONDS[traffic.kind](group, traffic.bytes / traffic.count)
