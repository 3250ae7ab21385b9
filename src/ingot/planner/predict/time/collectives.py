"""How long collectives take, by algorithm and by tier: a latency for every hop, and bytes over the narrowest link.

S bytes over n ranks, g of which share a domain of fast links (n/g domains), b_l and b_n bytes/s of one rank inside and
between domains, a_l and a_n seconds of a hop (Thakur et al. 2005; Patarasuk & Yuan 2009; NCCL's own choices):

    ring          gather or reduce-scatter S(n-1)/n / min(b_l, g b_n) + (n - n/g) a_l + n/g a_n; all-reduce twice that.
                  Rings run over all network cards of a node at once, so g ranks share g cards
    tree          all-reduce 2 S / min(b_l, g b_n) + 2 log2(n) a; the least latency
    hierarchical  all-reduce: reduce-scatter in the domain, all-reduce of S/g between domains, gather in the domain
    switch        all-reduce inside of a domain whose switches add up (SHARP): S / b_l
    all-to-all    the larger of S(g-1)/n / b_l and S(n-g)/n / b_n
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# Of a link, what a message between two ranks reaches: it has few of the channels that a ring through all has. Of an
# A100's 300 GB/s, 47 are published (Qi et al. 2023, table 4: 28 MB of hidden states in 0.6 ms).
PAIR_SHARE = 0.25


@dataclass(frozen=True)
class Group:
    """Ranks of one collective. near: of them in one domain of fast links. link, network: bytes/s that one rank sends
    there in one direction. link_seconds, network_seconds: latency of a hop. sharp: the domain's switches add up.
    across: share of an all-to-all's bytes between domains that is sent, where rows for one domain travel together."""

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
        """Of a ring through all its ranks."""
        return min(self.link, self.near * self.network) if self.crosses and self.near > 1 else self._outer

    @property
    def _outer(self) -> float:
        return self.network if self.crosses else self.link

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.near)

    @property
    def ring_latency(self) -> float:
        """Of one round."""
        if not self.crosses:
            return (self.ranks - 1) * self.link_seconds
        return (self.ranks - self.domains) * self.link_seconds + (self.domains - 1) * self.network_seconds

    @property
    def tree_latency(self) -> float:
        """Up or down."""
        inside = math.ceil(math.log2(self.near)) * self.link_seconds
        return inside + math.ceil(math.log2(self.domains)) * self.network_seconds


def all_gather(group: Group, size: float) -> float:
    """Seconds until every rank has `size` bytes. Large groups of recent libraries go along trees."""
    if group.ranks == 1:
        return 0.0
    return size * (group.ranks - 1) / group.ranks / group.bandwidth + group.ring_latency


reduce_scatter = all_gather


def ring_all_reduce(group: Group, size: float) -> float:
    return 2 * all_gather(group, size)


def tree_all_reduce(group: Group, size: float) -> float:
    return 2 * size / group.bandwidth + 2 * group.tree_latency


def hierarchical_all_reduce(group: Group, size: float) -> float:
    """In turn: within a domain, between domains, within a domain."""
    inside = Group(group.near, group.near, group.link, link_seconds=group.link_seconds)
    between = Group(group.domains, 1, group.link, group.network, group.link_seconds, group.network_seconds)
    return ring_all_reduce(inside, size) + ring_all_reduce(between, size / group.near)


def all_reduce(group: Group, size: float) -> float:
    """By the fastest of the algorithms, which is what libraries tune for."""
    if group.ranks == 1:
        return 0.0
    ways = [ring_all_reduce(group, size), tree_all_reduce(group, size)]
    if group.crosses:
        ways.append(hierarchical_all_reduce(group, size))
    elif group.sharp:
        ways.append(size / group.link + 2 * group.link_seconds)
    return min(ways)


def all_to_all(group: Group, size: float) -> float:
    """size: what each rank has, its own part among it."""
    if group.ranks == 1:
        return 0.0
    inside = size * (group.near - 1) / group.ranks / group.link
    if not group.crosses:
        return inside + 2 * group.link_seconds
    across = group.across * size * (group.ranks - group.near) / group.ranks / group.network
    return max(inside, across) + 2 * group.network_seconds


def send(group: Group, size: float) -> float:
    """To the next rank. The last one of a domain sends over the network, and the others wait for it."""
    if group.crosses:
        return size / min(group.network, PAIR_SHARE * group.link) + group.network_seconds
    return size / (PAIR_SHARE * group.link) + group.link_seconds


SECONDS: dict[str, Callable[[Group, float], float]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "send": send,
}
