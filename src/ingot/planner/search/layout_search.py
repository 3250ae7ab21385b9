"""One search of a space of layouts, in four steps that each drop layouts:

    1. shardings (space.py) whose parameters, gradients and optimizer state alone do not fit are dropped;
    2. the most promising of the others are combined with every possible micro-batch, recomputation and schedule, and
       all these layouts are ordered by a coarse estimate of their time;
    3. in that order the memory of each layout is computed in full if its lower bound fits; a layout that does not fit
       is tried again with more recomputation, and can rule out larger micro-batches of its sharding;
    4. the first layouts that fit are timed in full, a few of each mesh, followed by the neighbors of the fastest.

All times and memory sizes are computed by planner/predict.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ingot.planner.search.candidates import Candidate, Evaluator, RunKey, complexity
from ingot.planner.search.moves import moves
from ingot.planner.search.space import Space
from ingot.schema.parallel import Parallel
from ingot.schema.run import RunConfig

# The numbers of layouts to time in full: overall, and of each mesh.
_TIMED, _TIMED_OF_MESH = 40, 4
# A layout whose coarse time is this many times the fastest full time is not timed in full.
_HOPELESS = 1.15
# Tokens of a trial micro-batch: enough that matrix products are efficient.
_PROBE_TOKENS = 8192
# A schedule needs at least this share of 1f1b's memory, and a micro-batch at least this share of a smaller one's memory
# (checked by tests).
SLACK = 0.85
# The number of fastest layouts whose neighbors are tried.
_POLISHED = 3


class LayoutSearch:
    """A search for the fastest layouts in one space. A sharding is a mesh with its ZeRO stage and ep.

    considered: number of layouts whose memory was checked against the limit. fitting: number of these that fit.
    left_out: number of shardings whose state fits, but which were dropped as not promising enough.
    """

    def __init__(self, evaluator: Evaluator, space: Space):
        self.evaluator, self.space = evaluator, space
        self.considered = self.fitting = self.left_out = 0
        self._far_too_large: dict[Parallel, int] = {}

    def fastest(self) -> list[Candidate]:
        """Search, and return the layouts that were timed in full, in no particular order."""
        chosen: dict[RunKey, RunConfig] = {}
        best = math.inf
        for coarse, run in self._by_coarse_time():
            if len(chosen) >= _TIMED or coarse > _HOPELESS * best:
                break
            chosen[run.parallel, run.train.micro_batch] = run
            best = min(best, self.evaluator.seconds(run) or math.inf)
        self._polish(chosen)
        return [self.evaluator.candidate(run) for run in chosen.values()]

    def _polish(self, chosen: "dict[RunKey, RunConfig]") -> None:
        """Add to `chosen` the neighbors of the fastest layouts, until no neighbor is among the fastest."""
        done: set[RunKey] = set()
        while True:
            first = sorted(chosen, key=lambda key: self.evaluator.seconds(chosen[key]))[:_POLISHED]
            fresh = [key for key in first if key not in done]
            if not fresh:
                return
            for key in fresh:
                done.add(key)
                for _, other in moves(chosen[key], self.space):
                    place = other.parallel, other.train.micro_batch
                    if place not in chosen and self.evaluator.legal(other) and self._fits(other):
                        chosen[place] = other

    def _fits(self, run: RunConfig) -> bool:
        """Return True if the run fits. No schedule needs less than `SLACK` of 1f1b's memory, so a lower bound for 1f1b
        rules out most schedules that do not fit.
        """
        self.considered += 1
        plain = replace(run.parallel, schedule="1f1b", stages_per_rank=0)
        size = run.train.micro_batch
        if not self._has_room(plain, size, SLACK) or not self._has_room(run.parallel, size):
            return False
        self.fitting += (fits := self.evaluator.fits(run))
        return fits

    def _has_room(self, parallel: Parallel, size: int, share: float = 1.0) -> bool:
        """Return True if `share` of the lower bound of memory fits. size: the micro-batch, in sequences.

        With several micro-batches per step, a larger micro-batch needs at least `SLACK` of a smaller one's memory, so a
        size that is far too large rules out all larger sizes.
        """
        run = self.evaluator.laid_out(parallel, size)
        if run.accumulation > 1 and size > self._far_too_large.get(parallel, size):
            return False
        least, limit = self.evaluator.least_bytes(run), self.evaluator.limit_bytes(run)
        if SLACK * least > limit:
            self._far_too_large[parallel] = size
        return share * least <= limit

    def _by_coarse_time(self) -> Iterator[tuple[float, RunConfig]]:
        """Yield (coarse seconds, run) of legal layouts that fit, fastest first, at most a few of each mesh. Each has
        the least recomputation with which it fits.
        """
        heap: list[tuple[float, int, int, RunConfig, list[Parallel]]] = []
        count = itertools.count()

        def push(parallels: list[Parallel], micro_batch: int) -> None:
            run = self.evaluator.laid_out(parallels[0], micro_batch)
            heapq.heappush(heap, (self.evaluator.coarse_seconds(run), complexity(run), next(count), run, parallels[1:]))

        for parallel in self._shardings():
            for micro_batch in self.space.micro_batches(parallel):
                accumulation = self.evaluator.laid_out(parallel, micro_batch).accumulation
                for scheduled in self.space.schedules(parallel, accumulation):
                    push(self.space.recomputes(scheduled), micro_batch)
        of_mesh: Counter[tuple[int, ...]] = Counter()
        while heap:
            coarse, _, _, run, more = heapq.heappop(heap)
            mesh = run.parallel.tp, run.parallel.cp, run.parallel.pp, run.parallel.ep
            if of_mesh[mesh] == _TIMED_OF_MESH:
                continue
            if self._fits(run):
                if self.evaluator.legal(run):
                    of_mesh[mesh] += 1
                    yield coarse, run
            elif more:
                push(more, run.train.micro_batch)

    def _shardings(self) -> list[Parallel]:
        """Return the most promising shardings of all meshes whose state fits, most promising first."""
        found: list[tuple[float, int, Parallel]] = []
        for mesh in self.space.meshes():
            of_mesh = [
                (self._promise(p), complexity(self.evaluator.laid_out(p, 1)), p) for p in self._room_for_state(mesh)
            ]
            found += of_mesh
        most = self.space.reach.shardings
        self.left_out = max(len(found) - most, 0)
        return [parallel for _, _, parallel in sorted(found, key=lambda entry: entry[:2])[:most]]

    def _room_for_state(self, mesh: Parallel) -> Iterator[Parallel]:
        for parallel in self.space.shardings(mesh):
            sizes = self.space.micro_batches(parallel)
            self.considered += bool(sizes)
            runs = [self.evaluator.laid_out(parallel, size) for size in {*sizes[:1], *sizes[-1:]}]
            if any(self.evaluator.least_state_bytes(run) <= self.evaluator.limit_bytes(run) for run in runs):
                yield parallel

    def _promise(self, parallel: Parallel) -> float:
        """Return the coarse seconds of a step with a micro-batch of medium size and no recomputation."""
        wanted = max(_PROBE_TOKENS * parallel.cp // self.evaluator.run.train.seq_len, 1)
        sizes = self.space.micro_batches(parallel)
        size = min(sizes, key=lambda size: abs(math.log(size / wanted)))
        return self.evaluator.coarse_seconds(self.evaluator.laid_out(parallel, size))
