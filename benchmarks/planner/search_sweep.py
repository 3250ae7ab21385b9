"""Check that the search, which leaves most layouts out, finds the best layout.

python benchmarks/planner/search_sweep.py
    works out every legal layout where there are few enough, and writes results/planner_search_sweep.json. On large
    clusters it draws layouts at random and climbs from the best of them, step by step, to where no step is faster.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[2]))

from record import record
from search_time import run_of, shown
from tests.every_layout import every_candidate

from ingot.planner.request.clusters import load_cluster
from ingot.planner.search.candidates import Candidate, Evaluator, distinct, ranked
from ingot.planner.search.moves import moves
from ingot.planner.search.search import search
from ingot.planner.search.space import Reach, Space
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT

_DRAWN, _CLIMBS = 600, 4
ETHERNET = replace(load_cluster("4x8xh100"), network_bandwidth=1.25e9, network_kind="ethernet", name="4x8xh100, 10 GbE")
WHOLE = {
    "dense on a node": (run_of("llama3-8b", 32, 8192, num_layers=8), load_cluster("8xh100")),
    "wide on a node": (run_of("llama3-70b", 32, 4096, num_layers=8), load_cluster("8xh100")),
    "experts on a node": (run_of("mixtral-8x7b", 32, 4096, num_layers=4), load_cluster("8xh100")),
    "little memory": (run_of("llama3-8b", 16, 4096, num_layers=8), load_cluster("2x4xa100-40")),
    "PCIe cards": (run_of("llama3-8b", 24, 4096, num_layers=12), load_cluster("4x4xl40s")),
    "fine experts": (run_of("moe-671b", 32, 4096, num_layers=5), load_cluster("2x8xh100")),
}
DRAWN = {
    "70b on 1,024": (run_of("llama3-70b", 1024, 8192), load_cluster("128x8xh100")),
    "70b on racks": (run_of("llama3-70b", 1152, 8192), load_cluster("16x72xgb200")),
    "70b, slow network": (run_of("llama3-70b", 64, 8192, num_layers=16), ETHERNET),
    "405b on 16,384": (run_of("llama3-405b", 2048, 8192), load_cluster("2048x8xh100")),
    "671b on 1,024": (run_of("moe-671b", 4096, 4096), load_cluster("128x8xh100")),
}


def whole(run: RunConfig, cluster: Cluster) -> dict[str, object]:
    space = Space(run=run, cluster=cluster, pinned={}, reach=Reach(every=True))
    everything = list(every_candidate(Evaluator(run, cluster, INGOT), space))
    best, found = ranked(everything)[0], search(run, cluster).best
    rank = next((n for n, one in enumerate(found, 1) if len(distinct([best, one])) == 1), 0)
    return _compared(found, min(everything, key=_seconds)) | {"layouts": len(everything), "rank_of_best": rank}


def drawn(run: RunConfig, cluster: Cluster) -> dict[str, object]:
    """A layout that is faster than what was found would show what the search misses."""
    space = Space(run=run, cluster=cluster, pinned={}, reach=Reach(rank_tokens=1024, beyond_domain=True))
    evaluator, generator = Evaluator(run, cluster, INGOT), random.Random(1)
    meshes = list(space.meshes())
    start = [one for _ in range(_DRAWN) for one in _one(generator, meshes, evaluator, space)]
    tops = [_climbed(one, evaluator, space) for one in sorted(start, key=evaluator.seconds)[:_CLIMBS]]
    fastest = min((evaluator.candidate(one) for one in tops), key=_seconds)
    return _compared(search(run, cluster).best, fastest) | {"layouts": len(start)}


def _one(generator: random.Random, meshes: list, evaluator: Evaluator, space: Space) -> Iterator[RunConfig]:
    """A layout, if it is legal and fits."""
    sharding = generator.choice(list(space.shardings(generator.choice(meshes))))
    for micro_batch in generator.sample(space.micro_batches(sharding), 1):
        scheduled = list(space.schedules(sharding, evaluator.laid_out(sharding, micro_batch).accumulation))
        for parallel in generator.sample(scheduled, min(len(scheduled), 1)):
            run = evaluator.laid_out(generator.choice(space.recomputes(parallel)), micro_batch)
            if evaluator.legal(run) and evaluator.fits(run):
                yield run


def _climbed(run: RunConfig, evaluator: Evaluator, space: Space) -> RunConfig:
    while True:
        steps = [other for _, other in moves(run, space) if evaluator.legal(other) and evaluator.fits(other)]
        best = min([run, *steps], key=evaluator.seconds)
        if best is run:
            return run
        run = best


def _seconds(candidate: Candidate) -> float:
    return candidate.step_seconds


def _compared(found: tuple[Candidate, ...], fastest: Candidate) -> dict[str, object]:
    """slower: of the first layout found, and of the fastest one of those found."""
    return {
        "slower": {
            "first": round(found[0].step_seconds / fastest.step_seconds - 1, 4),
            "fastest": round(min(map(_seconds, found)) / fastest.step_seconds - 1, 4),
        },
        "first": shown(found[0]),
        "fastest_known": shown(fastest),
    }


if __name__ == "__main__":
    results: dict[str, object] = {}
    for cases, look in ((WHOLE, whole), (DRAWN, drawn)):
        for name, (run, cluster) in cases.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                results[name] = look(run, cluster)
                print(name, results[name], flush=True)
    if not sys.argv[1:]:
        print(record("planner_search_sweep", results, ()))
