"""Changes of a run file that may help against a cause, judged by the planner: each is planned like a run of its own.

Every change here leaves what is learned as it is (schema/run.py, FREE_SETTINGS), so that the run can go on with it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.exposed import NAMES
from ingot.planner.predict.time.step_time import step_seconds
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import PipelineSchedule
from ingot.schema.run import RunConfig
from ingot.theory.layout import layout_problems, resolve_parallel
from ingot.theory.memory import Term
from ingot.units import format_bytes, format_seconds

LEAST_GAIN = 0.01  # of the planned step: less is below what a plan can tell
# The planner's names of parts in which ranks talk and nothing else happens. "collectives" are data-parallel ones, on a
# CPU all of them.
_EXPOSED = (*NAMES.values(), "collectives")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """text: what to do. settings: of the run file, dotted; empty where no setting does it. seconds: what a step gains,
    None where nobody can say. reason: how that is known."""

    text: str
    settings: dict[str, Any]
    seconds: float | None
    reason: str

    @property
    def overrides(self) -> list[str]:
        """As `--set` takes them."""
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.settings.items()
        ]


class Prospect:
    """The planner's view of a run, and of the same run with other settings.

    measured_seconds: of its real step. Gains are told in its measure: planned gains in proportion to the planned step.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, measured_seconds: float):
        self.run, self.cluster, self.measured_seconds = run, cluster, measured_seconds
        self.terms = step_seconds(run, cluster) or {}
        self.seconds = sum(term.value for term in self.terms.values())

    def gain(self, run: RunConfig) -> float:
        """Of a measured step, in seconds; negative where `run` is slower."""
        planned = _seconds(run, self.cluster)
        return (1 - planned / self.seconds) * self.measured_seconds if self.seconds and planned else 0.0

    def gain_of(self, settings: dict[str, Any]) -> float:
        """0 where these settings make no legal run."""
        other = changed(self.run, settings)
        return self.gain(other) if other else 0.0

    def savings(self, settings: dict[str, Any]) -> Iterator[str]:
        """The parts of the planned step that these settings shorten, for people."""
        other = changed(self.run, settings)
        terms = step_seconds(other, self.cluster) or {} if other else {}
        for name, term in self.terms.items():
            after = terms.get(name, term).value
            if term.value - after > LEAST_GAIN * self.seconds:
                yield f"{name} {format_seconds(term.value)} -> {format_seconds(after)}"

    @property
    def device_seconds(self) -> float:
        """Of the planned step, launches aside."""
        return self.seconds - (self.terms["launches"].value if "launches" in self.terms else 0.0)

    def lacks_bytes(self, run: RunConfig) -> float:
        """Memory that a rank would need beyond what it has."""
        needed = sum(term.value for term in memory_bill(run, self.cluster).values())
        return max(needed - rank_memory_bytes(self.cluster, run.parallel.world_size), 0.0)

    def best(self, changes: Iterable[dict[str, Any]]) -> tuple[Remedy, ...]:
        """The one of `changes` that gains most, legal and with room in memory; none where none gains."""
        if not self.seconds:
            return ()
        found = [remedy for change in changes if (remedy := self._judged(change))]
        return tuple(sorted(found, key=lambda r: -(r.seconds or 0.0))[:1])

    def _judged(self, settings: dict[str, Any]) -> Remedy | None:
        other = changed(self.run, settings)
        if other is None or other.parallel.world_size != self.run.parallel.world_size or self.lacks_bytes(other):
            return None
        planned, gain = _seconds(other, self.cluster), self.gain(other)
        if gain < LEAST_GAIN * self.measured_seconds:
            return None
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        reason = f"planned {format_seconds(self.seconds)} -> {format_seconds(planned)} per step"
        return Remedy(text=shown, settings=settings, seconds=gain, reason=reason)

    def shortage(self, settings: dict[str, Any]) -> str:
        """Why these settings cannot be had, for people; "" if they can."""
        other = changed(self.run, settings)
        if other is None:
            return "this layout does not allow it"
        lacks = self.lacks_bytes(other)
        return f"would need {format_bytes(lacks)} more memory per rank" if lacks else ""


def changed(run: RunConfig, settings: dict[str, Any]) -> RunConfig | None:
    """`run` with settings like {"parallel.zero": 1}, None if that is no legal run."""
    for key, value in settings.items():
        section, name = key.split(".")
        run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return None if any(layout_problems(run)) else run


def _seconds(run: RunConfig, cluster: Cluster) -> float:
    return sum(term.value for term in (step_seconds(run, cluster) or {}).values())


def larger_micro_batches(run: RunConfig) -> Iterator[dict[str, Any]]:
    """All that divide the same global batch."""
    for times in range(2, run.accumulation + 1):
        if run.accumulation % times == 0:
            yield {"train.micro_batch": run.train.micro_batch * times}


def shorter_bubbles(run: RunConfig) -> Iterator[dict[str, Any]]:
    """More micro-batches, and every schedule."""
    smaller = [m for m in range(1, run.train.micro_batch + 1) if run.train.micro_batch % m == 0]
    for schedule in get_args(PipelineSchedule):
        other = {} if schedule == run.parallel.schedule else {"parallel.schedule": schedule}
        if other and (run.parallel.stages_per_rank or run.parallel.stage_layers):
            other |= {"parallel.stages_per_rank": 0, "parallel.stage_layers": ()}
        for size in smaller:
            settings = other | ({} if size == run.train.micro_batch else {"train.micro_batch": size})
            if settings:
                yield settings


def less_communication(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Fewer shards, fewer gathers, less tensor parallelism."""
    parallel, zero = run.parallel, resolve_parallel(run).zero
    yield from ({"parallel.zero": lower} for lower in (1, 2) if zero in range(lower + 1, 4))
    if zero == 3:
        yield {"parallel.reshard": False}
    for copies in _divisors(parallel.dp_shard):
        fewer = {"parallel.dp_shard": parallel.dp_shard // copies}
        yield fewer | {"parallel.dp_replicate": parallel.dp_replicate * copies}
    for part in _divisors(parallel.tp):
        yield {"parallel.tp": parallel.tp // part, "parallel.dp_shard": parallel.dp_shard * part}
    if parallel.tp > 1 and not parallel.async_tp:
        yield {"parallel.async_tp": True}


def fewer_exchanges(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Larger micro-batches, where each of them communicates."""
    parallel = run.parallel
    if resolve_parallel(run).zero in (2, 3) or max(parallel.tp, parallel.cp, parallel.ep) > 1:
        yield from larger_micro_batches(run)


def less_recompute(run: RunConfig) -> Iterator[dict[str, Any]]:
    parallel = run.parallel
    yield {"parallel.recompute": "none"}
    if parallel.recompute == "full":
        yield {"parallel.recompute": "selective"}
    yield {"parallel.recompute_every": 2 * parallel.recompute_every}


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(2, number + 1) if number % n == 0)


def exposed_seconds(terms: dict[str, Term]) -> float:
    return sum(term.value for name, term in terms.items() if name in _EXPOSED)
