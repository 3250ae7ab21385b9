"""The search for the fastest layouts of a run that fit on a cluster. If none fits, the search proposes a change; if
fewer devices would be faster, it reports that.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ingot.planner.search.candidates import EQUAL, Candidate, Evaluator, distinct, ranked
from ingot.planner.search.cheapest import cheapest_fix, least_memory
from ingot.planner.search.layout_search import LayoutSearch
from ingot.planner.search.space import NARROW, OFFLOADED, PATIENT, WIDE, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Recipe, Software
from ingot.theory.devices import find_device
from ingot.theory.rules.nearest import shareable_batch

NO_PINS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search.

    best: candidates, fastest first, with nearly equal ones represented by one. considered: number of layouts whose
      memory was checked against the limit. fitting: number of these that fit. seconds: duration of the search.
    nearest: if nothing fits, the layout that needs the least memory (None if no layout is legal). fix: the cheapest
      change that would make a layout fit.
    idle: a sentence, if the run would be faster with some devices of each rack left idle; otherwise "".
    """

    best: tuple[Candidate, ...]
    considered: int
    fitting: int
    seconds: float
    nearest: Candidate | None = None
    fix: str = ""
    idle: str = ""


def search(
    run: RunConfig,
    cluster: Cluster,
    software: Software = INGOT,
    *,
    pinned: Mapping[str, object] = NO_PINS,
    limit: int = 10,
    recipes: Sequence[Recipe] = (),
    offload: bool = True,
) -> Found:
    """Search for the fastest layouts and micro-batches of a run.

    run: model, sequence length, global batch and steps. pinned: fixed values of Parallel's settings or of
      "micro_batch". All devices of the cluster take part, unless all degrees are pinned. limit: the most layouts to
      return. recipes: low-precision recipes to try besides the software's own. offload: optimizer state may go to host
      memory if nothing fits without that.

    Raises ConfigError if `pinned` has an unknown name.
    """
    start, considered, fitting = time.perf_counter(), 0, 0
    systems = [software, *(replace(software, recipe=recipe) for recipe in recipes if recipe != software.recipe)]
    evaluators = [Evaluator(run, cluster, system) for system in systems]
    found: list[Candidate] = []
    offload = offload and cluster.device != "cpu"
    reaches, left_out = [NARROW, WIDE, OFFLOADED, PATIENT] if offload else [NARROW, WIDE, PATIENT], 0
    while reaches and not found and (reaches[0] != PATIENT or left_out):
        reach = reaches.pop(0)
        for evaluator in evaluators:
            look = LayoutSearch(evaluator, Space(run=run, cluster=cluster, pinned=pinned, reach=reach))
            found += look.fastest()
            considered, fitting = considered + look.considered, fitting + look.fitting
            left_out += look.left_out
    nearest, fix = None, ""
    if not found:
        reach = OFFLOADED if offload else WIDE
        nearest = least_memory(evaluators[0], Space(run=run, cluster=cluster, pinned=pinned, reach=reach))
        fix = cheapest_fix(evaluators[0], pinned, nearest, offload=offload)
    best = tuple(distinct(ranked(found))[:limit])
    idle = better_idle(run, cluster, software, pinned, best[0]) if best else ""
    return Found(
        best=best,
        considered=considered,
        fitting=fitting,
        seconds=time.perf_counter() - start,
        nearest=nearest,
        fix=fix,
        idle=idle,
    )


_OF_ALL = ("dp_shard", "dp_replicate")


def better_idle(
    run: RunConfig, cluster: Cluster, software: Software, pinned: Mapping[str, object], best: Candidate
) -> str:
    """Return a sentence if the run has more tokens per second with a power of two of each domain's devices than with
    all of them; otherwise "".

    best: the fastest layout on all devices. Only models with experts are tried: the groups of ranks in other models are
    small enough to divide a rack.
    """
    smaller = _power_of_two(cluster)
    if not smaller or not run.model.is_moe or not best.step_seconds or any(name in pinned for name in _OF_ALL):
        return ""
    batch = shareable_batch(run.train.global_batch, smaller.devices)
    fewer = replace(run, train=replace(run.train, global_batch=batch))
    space = Space(run=fewer, cluster=smaller, pinned=pinned)
    speeds = [_speed(candidate) for candidate in LayoutSearch(Evaluator(fewer, smaller, software), space).fastest()]
    gain = max(speeds, default=0.0) / _speed(best) - 1
    if gain <= EQUAL:
        return ""
    few, all_of_them = smaller.domain, cluster.domain
    return (
        f"{few} of the {all_of_them} devices of each domain of fast links would be {gain:.0%} faster than all of them:"
        f" groups of ranks are powers of two, and then no group extends over two domains. Plan this with --cluster"
        f" {smaller.name}; its price does not include the {all_of_them - few} idle devices in each domain"
    )


def _speed(candidate: Candidate) -> float:
    return candidate.run.tokens_per_step / candidate.step_seconds if candidate.step_seconds else 0.0


def _power_of_two(cluster: Cluster) -> Cluster | None:
    """Return the cluster with each domain of fast links reduced to the largest power of two of devices. Return None if
    there is one domain, domains are powers of two already, or these powers of two are not whole nodes."""
    domain, node, device = cluster.domain, cluster.devices_per_node, find_device(cluster.device_name)
    few = 1 << (domain.bit_length() - 1)
    if few == domain or cluster.devices <= domain or few % node or not device:
        return None
    domains = cluster.devices // domain
    return replace(cluster, name=f"{domains}x{few}x{device.key}", nodes=domains * few // node, domain_devices=few)
