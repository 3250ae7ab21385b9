"""The time of one optimizer step: computation, exposed communication, waiting of pipeline ranks, and the update.

On a CPU, work and communication do not overlap.
"""

from ingot.planner.predict.time.constants import Constants, fitted
from ingot.planner.predict.time.exposed import (
    DATA_PARALLEL,
    NAMES,
    Overlappable,
    blocking,
    cpu_collectives,
    data_parallel,
    host_update,
)
from ingot.planner.predict.time.links import LineTime, counted_as, group_of, line_times, send
from ingot.planner.predict.time.stage_time import (
    ATTENTION,
    KINDS,
    LAUNCHES,
    PRODUCTS,
    MeasuredTimer,
    StageTimer,
    WorkTime,
)
from ingot.planner.predict.time.timed_step import StepTime, TimedPipeline
from ingot.schema.cluster import Cluster
from ingot.schema.plan import Communication
from ingot.schema.run import RunConfig
from ingot.schema.software import INGOT, Software
from ingot.theory.flops import TRAIN_TO_FORWARD
from ingot.theory.layout import PipelineStage, Position, positions
from ingot.theory.memory import Term
from ingot.theory.params import shared_parameters
from ingot.theory.schedule import Timeline, simulate
from ingot.theory.traffic import hidden_bytes
from ingot.theory.work import Work, stage_work, step_work, update_work
from ingot.units import format_bytes, format_flops, format_seconds

__all__ = ["StepTime", "estimate", "rank_work", "simulated", "step_seconds"]


def rank_work(run: RunConfig, device: str) -> Work:
    """Return the work per step of the pipeline rank with the most matrix-product FLOPs."""
    return max((step_work(p, device) for p in positions(run)), key=lambda work: work.matmul_flops)


def step_seconds(run: RunConfig, cluster: Cluster, software: Software = INGOT) -> dict[str, Term] | None:
    """Return the terms of the predicted step time (`estimate`), or None if there is no rate."""
    found = estimate(run, cluster, software)
    return found.terms if found else None


def estimate(
    run: RunConfig, cluster: Cluster, software: Software = INGOT, constants: Constants | None = None
) -> StepTime | None:
    """Return the predicted time of a step, or None if the cluster has no rate for the run's precision.

    On a GPU, the host launches operations ahead of their execution and some communication overlaps with them, so both
    count only by the part that exceeds the device's own work (exposed.py). On a CPU nothing overlaps; if its links were
    not measured, the fixed cost per step includes collectives. Experts are assumed to have equal loads.
    """
    if _rate(run, cluster) <= 0 or cluster.memory_bandwidth <= 0:
        return None
    if cluster.device == "cpu":
        return estimate_cpu_step(run, cluster, software)
    return _OverlappedStep(run, cluster, software, constants or fitted()).time()


def _rate(run: RunConfig, cluster: Cluster) -> float:
    return cluster.peak_flops.get(run.train.precision, 0.0)


class _OverlappedStep:
    """One step on devices that compute and communicate at the same time."""

    def __init__(self, run: RunConfig, cluster: Cluster, software: Software, constants: Constants):
        self.run, self.cluster, self.constants = run, cluster, constants
        self.everyone = positions(run, software)
        first = self.everyone[0]
        self.parallel, self.accumulation = first.parallel, first.accumulation
        self.timer = MeasuredTimer(first, cluster) if cluster.measured else StageTimer(first, cluster, constants)
        self._parts: dict[tuple, tuple[WorkTime, WorkTime, WorkTime]] = {}
        self._lines: dict[tuple, tuple[dict[str, LineTime], dict[str, Term]]] = {}

    def time(self) -> StepTime:
        busiest = max(self.everyone, key=self.micro_batch_seconds)
        own = self.micro_batch_seconds(busiest) * self.accumulation
        terms = self._work_terms(busiest)
        times, waits = self.lines(busiest)
        terms |= waits
        bubble, pipeline = 0.0, None
        if self.parallel.pp > 1:
            whole, bubble, pipeline = self._pipeline()
            terms["pipeline bubble"] = Term(max(whole - own, 0.0), self._pipeline_formula(whole, bubble))
        busy = sum(self._compute(busiest).values())
        terms["collectives"] = data_parallel(busiest, self.cluster, times, busy, self.constants)
        terms["optimizer step"] = self._update(busiest)
        return StepTime(terms, self._communication(times, waits, terms["collectives"]), bubble, pipeline)

    def parts(self, position: Position, stage: PipelineStage) -> tuple[WorkTime, WorkTime, WorkTime]:
        key = _kind_of(position, stage)
        if key not in self._parts:
            self._parts[key] = self.timer.stage(position, stage)
        return self._parts[key]

    def lines(self, position: Position) -> tuple[dict[str, LineTime], dict[str, Term]]:
        """Return (traffic of each line, exposed communication of blocks by name) of a rank in one step."""
        key = tuple(_kind_of(position, stage) for stage in position.stages)
        if key not in self._lines:
            times = line_times(position, self.cluster, self.constants)
            self._lines[key] = (
                times,
                blocking(position, self.cluster, times, self._overlappable(position), self.constants),
            )
        return self._lines[key]

    def _compute(self, position: Position) -> dict[str, float]:
        """Return the device's seconds by kind of work, for all micro-batches of a step together."""
        total: dict[str, float] = {}
        for stage in position.stages:
            for part in self.parts(position, stage):
                for kind, seconds in part.device.items():
                    total[kind] = total.get(kind, 0.0) + seconds * self.accumulation
        return total

    def _overlappable(self, position: Position) -> Overlappable:
        compute = self._compute(position)
        blocks = sum(len(stage.expert_layers) for stage in position.stages)
        products = 2.0 * position.tokens * shared_parameters(position.arch) / self.parallel.tp
        flops = TRAIN_TO_FORWARD * products * blocks * self.accumulation
        rate = _rate(self.run, self.cluster) * self.cluster.matmul_efficiency
        return Overlappable(sum(compute.values()), compute.get(ATTENTION, 0.0), flops / rate)

    def micro_batch_seconds(self, position: Position) -> float:
        work = sum(part.seconds for stage in position.stages for part in self.parts(position, stage))
        return work + sum(term.value for term in self.lines(position)[1].values()) / self.accumulation

    def stage_times(self) -> tuple[list[float], list[float], list[float]]:
        """Return three lists of seconds over stages: forward, backward for the inputs, backward for the weights.

        The exposed communication of blocks is included, half in the forward and half in the backward for the inputs.
        """
        times: dict[int, tuple[float, float, float]] = {}
        for position in self.everyone:
            waiting = sum(term.value for term in self.lines(position)[1].values()) / self.accumulation
            blocks = max(sum(len(stage.layers) for stage in position.stages), 1)
            for stage in position.stages:
                forward, inputs, weights = (part.seconds for part in self.parts(position, stage))
                between = waiting * len(stage.layers) / blocks / 2
                times[stage.number] = forward + between, inputs + between, weights
        forward, inputs, weights = zip(*(times[number] for number in sorted(times)), strict=True)
        return list(forward), list(inputs), list(weights)

    def send_seconds(self) -> float:
        """Return the seconds to send hidden states to the next stage. If sequences are divided, or the software
        scatters the hidden states, each tensor-parallel rank sends only a part.
        """
        position = self.everyone[0]
        group = group_of(self.parallel, "pp", self.parallel.pp, self.cluster, self.constants)
        parts = self.parallel.tp if position.software.scatter_sends else position.sequence_ranks
        known = group.network if group.crosses else group.link
        return send(group, hidden_bytes(position) / parts) if known else 0.0

    def _pipeline(self) -> tuple[float, float, TimedPipeline]:
        """Return (seconds of all micro-batches, share of these in which ranks wait, the timed pipeline)."""
        parallel, times, message = self.parallel, self.stage_times(), self.send_seconds()
        played = times
        if not self.everyone[0].software.overlap_pipeline:  # sender and receiver wait until a message has arrived
            played = [f + 2 * message for f in times[0]], [i + 2 * message for i in times[1]], times[2]
            message = 0.0
        each = parallel.stages_on_each_rank
        pipeline = TimedPipeline(parallel.schedule, parallel.pp, self.accumulation, each, played, message)
        whole = pipeline.seconds(played)
        work = sum(sum(part) for part in times) * self.accumulation
        return whole, max(1 - work / (parallel.pp * whole), 0.0), pipeline

    def _pipeline_formula(self, whole: float, bubble: float) -> str:
        parallel = self.parallel
        shape = f"{parallel.schedule}, {parallel.pp} ranks x {parallel.stages_on_each_rank} stages"
        simulated = f"{self.accumulation} micro-batches, simulated: {format_seconds(whole)}"
        return f"{shape}, {simulated}, ranks wait {bubble:.0%}"

    def _work_terms(self, position: Position) -> dict[str, Term]:
        compute = self._compute(position)
        host = sum(part.host for stage in position.stages for part in self.parts(position, stage))
        whole = sum(part.seconds for stage in position.stages for part in self.parts(position, stage))
        late = (whole * self.accumulation) - sum(compute.values())
        waits = compute.pop(LAUNCHES, 0.0)
        amounts = {**compute, LAUNCHES: waits + max(late, 0.0)}
        done = step_work(position, counted_as(self.cluster))
        amounts_text = {
            PRODUCTS: f"{format_flops(done.matmul_flops)}, by their shapes",
            ATTENTION: format_flops(done.attention_flops),
            LAUNCHES: f"{format_seconds(host * self.accumulation)} on the host, as far as the device waits for it",
        }
        terms = {}
        for kind in KINDS:
            seconds = amounts.get(kind, 0.0)
            if seconds or kind in amounts_text:
                amount = amounts_text.get(kind, f"of {format_bytes(done.moved_bytes)} in all")
                each = format_seconds(seconds / self.accumulation)
                terms[kind] = Term(seconds, f"{amount}: {self.accumulation} micro-batches x {each}")
        return terms

    def _update(self, position: Position) -> Term:
        moved = update_work(position, in_place=self.cluster.device == "tpu").moved_bytes
        share = 1.0 if self.cluster.measured else self.constants.bandwidth_share
        rate = self.cluster.memory_bandwidth * share
        here = Term(moved / rate, f"{format_bytes(moved)} / {format_bytes(rate)}/s")
        there = host_update(position, self.cluster, sum(self._compute(position).values()), self.constants)
        return Term(here.value + there.value, f"{here.formula} + {there.formula}") if there else here

    def _communication(
        self, times: dict[str, LineTime], waits: dict[str, Term], data: Term
    ) -> dict[str, Communication]:
        """Return the communication by line. The exposed time of the data-parallel collectives is divided among their
        lines in proportion to seconds.
        """
        total = sum(times[line].seconds for line in DATA_PARALLEL if line in times)
        found = {}
        for line, time in times.items():
            if line in DATA_PARALLEL:
                exposed = data.value * time.seconds / total if total else 0.0
            else:
                exposed = waits[NAMES[line]].value if NAMES.get(line) in waits else 0.0
            found[line] = Communication(
                sent_bytes=time.sent,
                seconds=time.seconds,
                exposed_seconds=min(exposed, time.seconds),
                crosses=time.crosses,
            )
        return found


def _kind_of(position: Position, stage: PipelineStage) -> tuple:
    """Return a key for a stage; stages with equal keys take the same time."""
    again = position.recomputed(stage), position.recomputed_with_experts(stage)
    return len(stage.layers), len(stage.expert_layers), stage.first, stage.last, *again


def simulated(
    run: RunConfig, cluster: Cluster, everyone: tuple[Position, ...], constants: Constants | None = None
) -> Timeline:
    """Return the run's simulated pipeline, action by action. If the cluster has no rate, the times are FLOPs instead of
    seconds.
    """
    known = _rate(run, cluster) > 0 and cluster.memory_bandwidth > 0
    if not known or cluster.device == "cpu":
        return cpu_timeline(run, cluster, everyone, known)
    step = _OverlappedStep(run, cluster, everyone[0].software, constants or fitted())
    (forward, inputs, weights), message = step.stage_times(), step.send_seconds()
    table = everyone[0].table
    return simulate(table, forward=forward, backward_input=inputs, backward_weight=weights, send=message)


# -- CPU --


def estimate_cpu_step(run: RunConfig, cluster: Cluster, software: Software) -> StepTime:
    """Return the time of one step on a CPU cluster. The cluster must have a rate for the run's precision."""
    everyone = positions(run, software)
    timer = MeasuredTimer(everyone[0], cluster)
    work = {position.rank: step_work(position, cluster.device) for position in everyone}

    def seconds(position: Position) -> float:
        part = timer.part(work[position.rank])
        return part.busy + part.host

    busiest = max(everyone, key=seconds)
    mine = work[busiest.rank]
    rate = cluster.peak_flops[run.train.precision]
    terms = {
        "matrix products": _at(mine.matmul_flops, rate * cluster.matmul_efficiency, "FLOP"),
        "attention": _at(mine.attention_flops, rate * cluster.attention_efficiency, "FLOP"),
        "everything elementwise": _at(mine.moved_bytes, cluster.memory_bandwidth, "B"),
        "operations": Term(
            mine.operations * cluster.op_seconds,
            f"{mine.operations:,.0f} operations x {cluster.op_seconds * 1e6:.1f} µs",
        ),
        "step": Term(cluster.step_overhead_seconds, "measured once per step: the loop (and unmeasured links)"),
    }
    if run.parallel.world_size > 1 and cluster.link_bandwidth:
        terms["collectives"] = cpu_collectives(busiest, cluster)
    bubble = 0.0
    if run.parallel.pp > 1:
        timeline = cpu_timeline(run, cluster, everyone, known=True)
        bubble = timeline.bubble_fraction
        terms["pipeline bubble"] = Term(timeline.step_time - max(timeline.busy), _waiting(run, everyone, timeline))
    lines = {
        line: Communication(sent_bytes=t.sent, seconds=t.seconds, exposed_seconds=t.seconds, crosses=t.crosses)
        for line, t in line_times(busiest, cluster).items()
    }
    return StepTime(terms, lines, bubble)


def _at(amount: float, rate: float, unit: str) -> Term:
    shown = format_flops(amount) if unit == "FLOP" else format_bytes(amount)
    per = f"{format_flops(rate)}/s" if unit == "FLOP" else f"{format_bytes(rate)}/s"
    return Term(amount / rate, f"{shown} / {per}")


def _waiting(run: RunConfig, everyone: tuple[Position, ...], timeline: Timeline) -> str:
    parallel = everyone[0].parallel
    shape = f"{parallel.schedule}, {parallel.pp} ranks x {parallel.stages_on_each_rank} stages"
    whole, share = format_seconds(timeline.step_time), timeline.bubble_fraction
    return f"{shape}, {run.accumulation} micro-batches, simulated: {whole}, ranks wait {share:.0%}"


def cpu_timeline(run: RunConfig, cluster: Cluster, everyone: tuple[Position, ...], known: bool) -> Timeline:
    """Return the run's simulated pipeline, action by action. known: the cluster has rates; if not, the times are FLOPs
    instead of seconds.
    """
    timer, message = MeasuredTimer(everyone[0], cluster), 0.0
    stages = sorted(((s.number, p, s) for p in everyone for s in p.stages), key=lambda found: found[0])
    if known:
        parts = [timer.stage(position, stage) for _, position, stage in stages]
        times = [[part.busy + part.host for part in three] for three in parts]
        rate, size = cluster.link_bandwidth, hidden_bytes(everyone[0]) / everyone[0].sequence_ranks
        message = size / rate + cluster.link_seconds if rate else 0.0
    else:
        times = [[part.matmul_flops for part in stage_work(p, s, cluster.device)] for _, p, s in stages]
    forward, inputs, weights = (list(part) for part in zip(*times, strict=True))
    return simulate(everyone[0].table, forward=forward, backward_input=inputs, backward_weight=weights, send=message)
