"""The fastest layouts of a run on a cluster that fit, and what would help where none does."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ingot.planner.search.candidates import Candidate, Evaluator, distinct, ranked
from ingot.planner.search.cheapest import cheapest_fix, least_memory
from ingot.planner.search.idle import better_idle
from ingot.planner.search.look import Look
from ingot.planner.search.space import NARROW, OFFLOADED, PATIENT, WIDE, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Recipe, Software

NO_PINS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Found:
    """best: fastest first, one of those that hardly differ. considered: layouts whose memory was compared. fitting: of
    those, the ones that fit. seconds: that the search took. nearest: where nothing fits, the layout that needs least
    (None where the rules allow no layout at all); fix: then, the cheapest change with which one would fit. idle: what
    would be faster with devices of each rack left idle, "" where nothing is."""

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
    """run: model, sequence, global batch and steps; its layout and micro-batch are searched for, but for those settings
    of Parallel, and "micro_batch", that are `pinned`. All devices of the cluster take part, unless the pins say
    otherwise. recipes: of low-precision products, tried beside the software's own. offload: of optimizer state to the
    host, where nothing fits without.

    Raises ConfigError where a pin has no such name.
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
            look = Look(evaluator, Space(run=run, cluster=cluster, pinned=pinned, reach=reach))
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
