"""The evidence for a diagnosis: step times from the event log, and the planner's predictions for changed settings.

Means are per step, without the first interval (of log lines) of each attempt. A proposed change never affects what the
model learns (schema/changes.py), so the run can continue with it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

from ingot.planner.predict.memory.peak_memory import memory_bill, rank_memory_bytes
from ingot.planner.predict.time.exposed import NAMES
from ingot.planner.predict.time.step_time import step_seconds
from ingot.report.diagnose.device_times import DeviceTimes, Spread
from ingot.report.diagnose.waits import by_axis, mean_waits, spread_of
from ingot.report.facts import RunData
from ingot.report.readable import is_finite
from ingot.schema.cluster import Cluster
from ingot.schema.parallel import PipelineSchedule
from ingot.schema.run import RunConfig
from ingot.theory.layout import layout_problems, resolve_parallel
from ingot.theory.memory import Term
from ingot.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The measured times of a run; seconds are per step unless noted.

    steps, intervals: the number of steps and of log lines that were measured.
    step_seconds: the mean step time without saves, evaluations, faults and the first interval of each attempt, which
    includes compilation and connection. fastest_seconds: the step time of the fastest log line. first_seconds: the
    total extra time of first intervals. data_seconds: the wait for data. bursts: the share of this wait in the worst
    tenth of the log lines. longest_wait_seconds: the largest total data wait of a log line. waits: the waits of each
    kind (telemetry/usage.py); empty for logs of older versions. exposed, hidden: the communication of each axis (mesh/
    axis_traffic.py); empty for older logs and a rank alone. saves, weights_saves: the number of periodic
    checkpoints, and of saves of the weights alone. save_seconds, evaluate_seconds: time of all of them, and of periodic
    evaluations. save_seconds_each: of a checkpoint. restarts: faults after which an attempt followed, of this command
    or a new one. redone_steps: that were trained again after faults. restart_seconds: time lost to faults, repeated
    work included. device, host: of the last attempt.
    """

    steps: int
    intervals: int
    step_seconds: float
    fastest_seconds: float
    first_seconds: float
    data_seconds: float
    waits: dict[str, Spread] = field(default_factory=dict)
    exposed: dict[str, Spread] = field(default_factory=dict)
    hidden: dict[str, Spread] = field(default_factory=dict)
    bursts: float = 0.0
    longest_wait_seconds: float = 0.0
    saves: int = 0
    weights_saves: int = 0
    save_seconds: float = 0.0
    save_seconds_each: float = 0.0
    evaluations: int = 0
    evaluate_seconds: float = 0.0
    untimed_evaluations: int = 0
    restarts: int = 0
    redone_steps: int = 0
    restart_seconds: float = 0.0
    device: str = ""
    host: str = ""

    @property
    def clock_seconds(self) -> float:
        """The wall-clock time per step, with its share of saves, evaluations and restarts."""
        return self.step_seconds + self.save_seconds + self.evaluate_seconds + self.restart_seconds


def measure(data: RunData) -> MeasuredSteps | None:
    """Return the measured times, None if the log has no progress line yet."""
    lines = _intervals(data)
    if not lines:
        return None
    first = {min((step for step in lines if step > start["from_step"]), default=0) for start in data.starts}
    steady = [step for step in lines if step not in first] or list(lines)
    each = {step: data.progress[step] for step in steady}
    counted = sum(lines[step] for step in steady)
    mean = sum(lines[step] * event["step_seconds"] for step, event in each.items()) / counted
    waiting = {step: _data_wait(data, step, lines[step]) for step in steady}
    done = max(data.last_step - data.starts[0]["from_step"], 1) if data.starts else counted
    start = data.starts[-1] if data.starts else {}
    hardware = start.get("hardware")
    return MeasuredSteps(
        steps=counted,
        intervals=len(steady),
        step_seconds=mean,
        fastest_seconds=min(event["step_seconds"] for event in each.values()),
        first_seconds=sum(
            max(data.progress[s]["step_seconds"] - mean, 0.0) * lines[s] for s in lines if s not in steady
        ),
        data_seconds=sum(lines[step] * seconds for step, seconds in waiting.items()) / counted,
        bursts=_bursts([lines[step] * seconds for step, seconds in waiting.items()]),
        longest_wait_seconds=max(lines[step] * seconds for step, seconds in waiting.items()),
        waits=mean_waits(data.waits, {step: lines[step] for step in steady}),
        exposed=mean_waits(by_axis(data.waits, "exposed"), {step: lines[step] for step in steady}),
        hidden=mean_waits(by_axis(data.waits, "hidden"), {step: lines[step] for step in steady}),
        device=str(start.get("device", "")),
        host=str(hardware.get("host", "")) if isinstance(hardware, dict) else "",
        **_interruptions(data, done, mean),
    )


def _intervals(data: RunData) -> dict[int, int]:
    """Return, for the step of each progress line, the number of trained steps since the line before. Lines without a
    step time are left out."""
    starts = sorted({start["from_step"] for start in data.starts})

    def timed(step: int) -> bool:
        return step in data.progress and data.progress[step]["step_seconds"] > 0

    borders = sorted({*data.progress, *starts, 0})
    trained = {step: data.trained_between(before, step) for before, step in pairwise(borders) if timed(step)}
    return {step: number for step, number in trained.items() if number > 0}


def _data_wait(data: RunData, step: int, steps: int) -> float:
    """Return the data wait per step of the rank that waited most; older logs have only rank 0.

    Returns 0 if each GPU had more than one step of queued work at the end of the log line: the GPUs worked while the
    host waited for data.
    """
    waits, seconds = data.waits.get(step, {}), data.progress[step]["step_seconds"]
    queued, spread = spread_of(waits.get("reading")), spread_of(waits.get("data"))
    if queued and queued.least * steps > seconds:
        return 0.0
    return spread.most if spread else data.progress[step]["data_wait_seconds"]


def _bursts(seconds: list[float]) -> float:
    worst = sorted(seconds, reverse=True)[: -(-len(seconds) // 10)]
    return sum(worst) / sum(seconds) if sum(seconds) > 0 else 0.0


def _interruptions(data: RunData, done: int, step_seconds: float) -> dict[str, Any]:
    """Return the fields of `MeasuredSteps` on periodic saves, evaluations and restarts. The save and the evaluation at
    the end of a run are not periodic. done: the number of completed steps."""
    every = data.run.checkpoint.interval.steps if data.run else 1
    last = data.finished["step"] if data.finished else 0
    periodic = [event for event in data.checkpoints if (event["step"] % every == 0 if every else event["step"] != last)]
    saves = [event["stall_seconds"] for event in periodic]
    between = [event for event in data.evaluations if event["step"] != last and not event.get("background")]
    timed = [event["seconds"] for event in between if is_finite(event.get("seconds"))]
    back = [fault for fault in data.faults if not fault.is_open]
    redone = sum(fault.redone_steps or 0 for fault in data.faults)  # a new command trains them again, too
    lost = sum(fault.gap_seconds or 0.0 for fault in back) + redone * step_seconds
    weights = [event["stall_seconds"] for event in data.weights_saves]
    return {
        "saves": len(saves),
        "weights_saves": len(weights),
        "save_seconds": (sum(saves) + sum(weights)) / done,
        "save_seconds_each": sum(saves) / max(len(saves), 1),
        "evaluations": len(between),
        "evaluate_seconds": sum(timed) / done,
        "untimed_evaluations": len(between) - len(timed),
        "restarts": len(back),
        "redone_steps": redone,
        "restart_seconds": lost / done,
    }


LEAST_GAIN = 0.01  # share of a step; smaller gains are below the accuracy of a plan
# The planner's names of the parts of a step that are exposed communication. "collectives" is data-parallel
# communication; on a CPU it is all communication.
_EXPOSED = (*NAMES.values(), "collectives")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that may help. text: a description of the change. settings: dotted keys of the run file with their new
    values, empty if no setting helps. seconds: the gain per step, None if unknown. reason: why there is a gain."""

    text: str
    settings: dict[str, Any]
    seconds: float | None
    reason: str

    @property
    def overrides(self) -> list[str]:
        """The settings as KEY=VALUE arguments of --set."""
        return [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.settings.items()
        ]


class Prospect:
    """The planner's prediction for a run, and for the same run with other settings.

    measured_seconds: the measured step time. A gain is the planned relative gain times this step time.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, measured_seconds: float):
        self.run, self.cluster, self.measured_seconds = run, cluster, measured_seconds
        self.terms = step_seconds(run, cluster) or {}
        self.seconds = sum(term.value for term in self.terms.values())

    def gain(self, run: RunConfig) -> float:
        """Return the seconds per step that `run` would save, scaled to the measured step time; negative if `run` is
        slower."""
        planned = _seconds(run, self.cluster)
        return (1 - planned / self.seconds) * self.measured_seconds if self.seconds and planned else 0.0

    def gain_of(self, settings: dict[str, Any]) -> float:
        """Return the seconds that a step would save with these settings; 0 if they are not legal."""
        other = changed(self.run, settings)
        return self.gain(other) if other else 0.0

    def savings(self, settings: dict[str, Any]) -> Iterator[str]:
        """Yield a phrase for each part of the planned step that these settings shorten."""
        other = changed(self.run, settings)
        terms = step_seconds(other, self.cluster) or {} if other else {}
        for name, term in self.terms.items():
            after = terms.get(name, term).value
            if term.value - after > LEAST_GAIN * self.seconds:
                yield f"{name} {format_seconds(term.value)} -> {format_seconds(after)}"

    @property
    def device_seconds(self) -> float:
        """The planned step's seconds without the time of kernel launches."""
        return self.seconds - (self.terms["launches"].value if "launches" in self.terms else 0.0)

    def lacks_bytes(self, run: RunConfig) -> float:
        """Return how many bytes more than its memory a rank of `run` would need; 0 if the run fits."""
        needed = sum(term.value for term in memory_bill(run, self.cluster).values())
        return max(needed - rank_memory_bytes(self.cluster, run.parallel.world_size), 0.0)

    def best(self, changes: Iterable[dict[str, Any]]) -> tuple[Remedy, ...]:
        """Return the change with the largest gain among legal changes that fit in memory; an empty tuple if none
        gains."""
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
        """Return the reason why these settings are not possible; "" if they are possible."""
        other = changed(self.run, settings)
        if other is None:
            return "this layout does not allow it"
        lacks = self.lacks_bytes(other)
        return f"would need {format_bytes(lacks)} more memory per rank" if lacks else ""


def changed(run: RunConfig, settings: dict[str, Any]) -> RunConfig | None:
    """Return `run` with changed settings, such as {"parallel.zero": 1}; None if the result is not legal."""
    for key, value in settings.items():
        section, name = key.split(".")
        run = replace(run, **{section: replace(getattr(run, section), **{name: value})})
    return None if any(layout_problems(run)) else run


def _seconds(run: RunConfig, cluster: Cluster) -> float:
    return sum(term.value for term in (step_seconds(run, cluster) or {}).values())


def larger_micro_batches(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings of all larger micro-batches that divide the same global batch."""
    for times in range(2, run.accumulation + 1):
        if run.accumulation % times == 0:
            yield {"train.micro_batch": run.train.micro_batch * times}


def shorter_bubbles(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield settings that may shorten the bubble: other pipeline schedules, more micro-batches, and both."""
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
    """Yield settings that may lower communication: fewer shards, fewer gathers, or less tensor parallelism."""
    parallel, zero = run.parallel, resolve_parallel(run).zero
    yield from ({"parallel.zero": lower} for lower in (1, 2) if zero in range(lower + 1, 4))
    if zero == 3:
        yield {"parallel.reshard": False}
    for copies in _divisors(parallel.dp_shard):
        fewer = {"parallel.dp_shard": parallel.dp_shard // copies}
        yield fewer | {"parallel.dp_replicate": parallel.dp_replicate * copies}
    for part in _divisors(parallel.tp):
        yield {"parallel.tp": parallel.tp // part, "parallel.dp_shard": parallel.dp_shard * part}
    if parallel.tp > 1 and not parallel.async_tp and parallel.tp_chunks == 1:
        yield {"parallel.async_tp": True}


def fewer_exchanges(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings of larger micro-batches if each micro-batch communicates; nothing otherwise."""
    parallel = run.parallel
    if resolve_parallel(run).zero in (2, 3) or max(parallel.tp, parallel.cp, parallel.ep) > 1:
        yield from larger_micro_batches(run)


def less_recompute(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings with which less is recomputed."""
    parallel = run.parallel
    yield {"parallel.recompute": "none"}
    if parallel.recompute == "full":
        yield {"parallel.recompute": "selective"}
    yield {"parallel.recompute_every": 2 * parallel.recompute_every}


def _divisors(number: int) -> Iterator[int]:
    return (n for n in range(2, number + 1) if number % n == 0)


def exposed_seconds(terms: dict[str, Term]) -> float:
    """Return the seconds of exposed communication in a planned step."""
    return sum(term.value for name, term in terms.items() if name in _EXPOSED)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of slow steps. seconds: the time per step. source: whether this time is measured or planned. evidence: a
    sentence."""

    name: str
    seconds: float
    source: Literal["measured", "planned"]
    evidence: str
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True)
class Case:
    """A run with its evidence. prospect: the planner's predictions; None if there is no plan for the machine on which
    the run was trained. device_times: of GPUs, None without any."""

    data: RunData
    measured: MeasuredSteps
    run: RunConfig
    prospect: Prospect | None
    device_times: DeviceTimes | None = None

    @property
    def on_cpu(self) -> bool:
        return self.measured.device == "cpu"

    @property
    def pace(self) -> float:
        """The measured step time divided by the planned one; 0 without a plan."""
        prospect = self.prospect
        return self.measured.step_seconds / prospect.seconds if prospect and prospect.seconds else 0.0

    def planned(self, part: str) -> tuple[float, str] | None:
        """Return the seconds of a part of the planned step, scaled to the measured step, and its formula; None if the
        plan has no such part."""
        term = self.prospect.terms.get(part) if self.prospect else None
        return (term.value * self.pace, term.formula) if term else None
