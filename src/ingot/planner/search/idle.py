"""Whether a part of each rack would be faster than all of it: ranks come in powers of two, racks need not."""

from collections.abc import Mapping
from dataclasses import replace

from ingot.planner.search.candidates import EQUAL, Candidate, Evaluator
from ingot.planner.search.look import Look
from ingot.planner.search.space import Space
from ingot.schema.cluster import Cluster
from ingot.schema.nearest import shareable_batch
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.theory.devices import find_device

_OF_ALL = ("dp_shard", "dp_replicate")


def better_idle(
    run: RunConfig, cluster: Cluster, software: Software, pinned: Mapping[str, object], best: Candidate
) -> str:
    """What is faster, by tokens per second, when the devices of each domain of fast links beyond a power of two are
    left idle; "" where all are better, or no domain has such. best: the layout on all of them. Asked of models with
    experts: other groups of ranks are small enough to divide a rack."""
    smaller = _power_of_two(cluster)
    if not smaller or not run.model.is_moe or not best.step_seconds or any(name in pinned for name in _OF_ALL):
        return ""
    batch = shareable_batch(run.train.global_batch, smaller.devices)
    fewer = replace(run, train=replace(run.train, global_batch=batch))
    space = Space(run=fewer, cluster=smaller, pinned=pinned)
    speeds = [_speed(candidate) for candidate in Look(Evaluator(fewer, smaller, software), space).fastest()]
    gain = max(speeds, default=0.0) / _speed(best) - 1
    if gain <= EQUAL:
        return ""
    few, all_of_them = smaller.domain, cluster.domain
    return (
        f"{few} of the {all_of_them} devices of each domain of fast links would be {gain:.0%} faster than all of them:"
        f" groups of ranks are powers of two, and then none lies across a border. --cluster {smaller.name} plans that;"
        f" the price of the {all_of_them - few} idle ones comes on top"
    )


def _speed(candidate: Candidate) -> float:
    return candidate.run.tokens_per_step / candidate.step_seconds if candidate.step_seconds else 0.0


def _power_of_two(cluster: Cluster) -> Cluster | None:
    """As many domains, each the largest power of two within."""
    domain, node, device = cluster.domain, cluster.devices_per_node, find_device(cluster.device_name)
    few = 1 << (domain.bit_length() - 1)
    if few == domain or cluster.devices <= domain or few % node or not device:
        return None
    domains = cluster.devices // domain
    return replace(cluster, name=f"{domains}x{few}x{device.key}", nodes=domains * few // node, domain_devices=few)
