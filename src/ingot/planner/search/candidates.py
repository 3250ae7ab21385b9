"""The memory and step time of the layouts of a search, computed on demand and then cached."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ingot.planner.predict.memory.peak_memory import memory_bill, position_bill, rank_memory_bytes
from ingot.planner.predict.time.step_time import estimate
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import SPLIT_BACKWARD, V_SHAPED, Parallel
from ingot.schema.run import RunConfig
from ingot.schema.software import Software
from ingot.theory import memory
from ingot.theory.flops import model_flops_utilization, train_flops_per_token
from ingot.theory.layout import Position, layout_problems, positions
from ingot.theory.memory import Term
from ingot.theory.schedule import PUBLISHED

# The share of a device's memory that a layout may use; the rest is a margin for errors of the prediction.
MEMORY_SHARE = 0.9
# Layouts whose times differ by less than this share count as equally fast, because predictions are not more accurate;
# the simpler one goes first.
EQUAL = 0.02
_DISTINCT = ("tp", "cp", "context", "pp", "ep", "zero", "schedule", "recompute", "offload", "offload_parameters")
_DIVIDES_STATE = ("dp_replicate", "dp_shard", "zero", "recompute", "offload", "offload_parameters")
# For schedules without a published bubble formula: the schedule whose formula is used for each of their stages.
_BUBBLE_LIKE = {"interleaved_zb": "zb_h1"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its predicted memory and time.

    run: the run with this layout. step_seconds: 0.0 if the cluster's FLOP/s are unknown. memory_bytes: peak memory of
      the fullest rank.
    mfu: model FLOPs utilization, with causal attention counted half (theory/flops.py); 0.0 if the peak is unknown.
      bubble: share of a step in which pipeline ranks wait.
    """

    run: RunConfig
    software: Software
    step_seconds: float
    memory_bytes: float
    mfu: float
    bubble: float


def complexity(run: RunConfig) -> int:
    """Return the complexity of a layout, with which `ranked` breaks ties.

    The sum has 2 for each of pp, cp, tp and ep above 1 and for offload, and 1 for each other feature: sharding,
    replication, recomputation, several stages per rank, a split backward.
    """
    parallel = run.parallel
    cuts = sum(degree > 1 for degree in (parallel.pp, parallel.cp, parallel.tp, parallel.ep))
    copies = (parallel.dp_replicate > 1) + (parallel.dp_shard > 1)
    extras = parallel.recompute != "none", parallel.stages_on_each_rank > 1, parallel.splits_backward
    return 2 * cuts + copies + sum(extras) + 2 * (parallel.offload != "none")


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, fastest first. Candidates within 2% of the fastest remaining one are ordered by
    simplicity."""
    waiting, found = sorted(candidates, key=lambda candidate: candidate.step_seconds), []
    while waiting:
        limit = waiting[0].step_seconds * (1 + EQUAL)
        equal = [candidate for candidate in waiting if candidate.step_seconds <= limit]
        found += sorted(equal, key=_simplicity)
        waiting = waiting[len(equal) :]
    return found


def distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates without repetitions: of those that differ only in dp_shard and dp_replicate or in stages
    per rank, only the first is kept."""
    first: dict[tuple, Candidate] = {}
    for candidate in candidates:
        key = tuple(getattr(candidate.run.parallel, name) for name in _DISTINCT)
        first.setdefault((key, candidate.run.train.micro_batch, candidate.software), candidate)
    return list(first.values())


def _simplicity(candidate: Candidate) -> tuple[int, int, int, int, float]:
    parallel = candidate.run.parallel
    zero = parallel.zero if parallel.zero != "auto" else 0
    cuts = parallel.tp * parallel.pp * parallel.cp * parallel.ep
    return complexity(candidate.run), zero, cuts, parallel.stages_on_each_rank, candidate.step_seconds


def _unfilled(schedule: str, pp: int, micro_batches: int) -> float:
    """Return the waiting time that is added to the published bubble if there are fewer micro-batches than its formula
    assumes.

    The unit is the time of one micro-batch on one rank, with F = I = W. In V-shaped schedules a rank only has forwards
    until its first micro-batch has passed all 2 pp stages, and only backwards at the end. In looped schedules each
    round takes as long as pp micro-batches.
    """
    if schedule in V_SHAPED:
        return max(2 * pp - micro_batches, 0) / 3
    if schedule == "looped_bfs":
        return max(pp - micro_batches, 0)
    return max(pp - micro_batches, 0) / 3 if schedule in SPLIT_BACKWARD else 0.0


def _total(bill: dict[str, Term]) -> float:
    return sum(term.value for term in bill.values())


class Evaluator:
    """An evaluator of one run's layouts on one cluster. Memory and step time of each layout are computed only once."""

    def __init__(self, run: RunConfig, cluster: Cluster, software: Software):
        self.run, self.cluster, self.software = run, cluster, software
        self._bytes: dict[RunKey, float] = {}
        self._least: dict[RunKey, float] = {}
        self._seconds: dict[RunKey, tuple[float, float]] = {}
        self._known_places: dict[Parallel, tuple[Position, Position, Position]] = {}
        self._flops = train_flops_per_token(run.model, run.train.seq_len)

    def laid_out(self, parallel: Parallel, micro_batch: int) -> RunConfig:
        return replace(self.run, parallel=parallel, train=replace(self.run.train, micro_batch=micro_batch))

    def limit_bytes(self, run: RunConfig) -> float:
        return MEMORY_SHARE * rank_memory_bytes(self.cluster, run.parallel.world_size)

    def memory_bytes(self, run: RunConfig) -> float:
        key = run.parallel, run.train.micro_batch
        if key not in self._bytes:
            self._bytes[key] = _total(memory_bill(run, self.cluster, self.software))
        return self._bytes[key]

    def fits(self, run: RunConfig) -> bool:
        return self.memory_bytes(run) <= self.limit_bytes(run)

    def least_bytes(self, run: RunConfig) -> float:
        """Return a lower bound of `memory_bytes`, the memory of the fullest pipeline rank.

        The bound is the larger of two bills: that of the first rank, which in most schedules keeps the most
        micro-batches, and that of the rank with the most parameters.
        """
        key = run.parallel, run.train.micro_batch
        if key not in self._least:
            first, _, most = self._places(run)
            ends = (first,) if first.rank == most.rank else (first, most)
            bills = [_total(position_bill(place, self.cluster.device)) for place in ends]
            self._least[key] = self._with_runtime(max(bills))
        return self._least[key]

    def least_state_bytes(self, run: RunConfig) -> float:
        """Return a lower bound of `memory_bytes` that is valid for every schedule except looped_bfs, in which the
        gradients of a rank never all exist at the same time.

        The bound is the state of the rank with the fewest parameters, without activations: in every schedule, some rank
        has at least that many.
        """
        place = self._places(run)[1]
        parts = [memory.weights(place), memory.optimizer(place)]
        if place.parallel.zero != 3:  # ZeRO-3 gathers only the units in use
            parts.append(memory.gathered(place))
        if run.accumulation > (1 if place.parallel.pp == 1 else 2 * place.parallel.pp):
            parts.append(memory.gradients_kept(place))
        return self._with_runtime(sum(part.value for part in parts))

    def _with_runtime(self, held: float) -> float:
        return held * (1 + self.cluster.fragmentation) + self.cluster.runtime_bytes

    def _places(self, run: RunConfig) -> tuple[Position, Position, Position]:
        """Return the positions of three pipeline ranks: the first, the one with the fewest and the one with the most
        parameters. Data-parallel degrees do not change which ranks these are.
        """
        settings = {name: getattr(run.parallel, name) for name in _DIVIDES_STATE}
        plain = {"recompute": "none", "offload": "none", "offload_parameters": False}
        key = replace(run.parallel, dp_replicate=1, dp_shard=1, zero=1, **plain)
        if key not in self._known_places:
            everyone = sorted(positions(replace(run, parallel=key), self.software), key=lambda place: place.rank)
            by_size = sorted(everyone, key=lambda place: place.parameters)
            self._known_places[key] = everyone[0], by_size[0], by_size[-1]
        first, fewest, most = (
            replace(place, train=run.train, accumulation=run.accumulation, parallel=replace(place.parallel, **settings))
            for place in self._known_places[key]
        )
        return first, fewest, most

    def seconds(self, run: RunConfig) -> float:
        return self._timed(run)[0]

    def _timed(self, run: RunConfig) -> tuple[float, float]:
        """Return (seconds of a step, share of the step in which pipeline ranks wait)."""
        key = run.parallel, run.train.micro_batch
        if key not in self._seconds:
            time = estimate(run, self.cluster, self.software)
            self._seconds[key] = (time.seconds, time.bubble) if time else (0.0, 0.0)
        return self._seconds[key]

    def coarse_seconds(self, run: RunConfig) -> float:
        """Return an estimate of the seconds of a step that does not simulate the pipeline schedule.

        The estimate is the step time without a pipeline divided by pp, times the excess of the longest stage over an
        equal share, plus the published bubble of the schedule.
        """
        parallel = run.parallel
        if parallel.pp == 1:
            return self.seconds(run)
        whole = replace(parallel, pp=1, schedule="1f1b", stages_per_rank=0)
        alone = self.seconds(replace(run, parallel=whole))
        each, layers = parallel.stages_on_each_rank, run.model.num_layers
        longest = -(-layers // parallel.stages) * parallel.stages / layers
        idle = PUBLISHED[_BUBBLE_LIKE.get(parallel.schedule, parallel.schedule)].bubble(parallel.pp, 1.0, 1.0, 1.0, 3.0)
        waits = max(idle, 0.0) / (3 * each) + _unfilled(parallel.schedule, parallel.pp, run.accumulation)
        return alone / parallel.pp * longest * (1 + waits / run.accumulation)

    def candidate(self, run: RunConfig) -> Candidate:
        seconds, bubble = self._timed(run)
        peak = self.cluster.peak_flops.get(run.train.precision, 0.0) * run.parallel.world_size
        known = seconds and peak and self.cluster.device != "cpu"
        mfu = model_flops_utilization(run.tokens_per_step / seconds, self._flops, peak) if known else 0.0
        return Candidate(
            run=run,
            software=self.software,
            step_seconds=seconds,
            memory_bytes=self.memory_bytes(run),
            mfu=mfu,
            bubble=bubble,
        )

    @staticmethod
    def legal(run: RunConfig) -> bool:
        return not any(layout_problems(run))


RunKey = tuple[Parallel, int]
