"""The diagnosis of a slow run: measured and planned step time, and the causes, most expensive first, with remedies.

Causes overlap (a rank that waits for data makes other ranks wait in collectives), so their times may add up to more
than the whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import DataMissing
from ingot.report.diagnose.causes import (
    checkpoint_stall,
    data_stall,
    evaluation,
    exposed_collectives,
    host_and_launches,
    no_free_core,
    pipeline_bubble,
    recompute,
    restarts,
    small_micro_batches,
    straggler,
)
from ingot.report.diagnose.classes import SlowClass, classes_of
from ingot.report.diagnose.device_times import device_times
from ingot.report.diagnose.evidence import Case, Cause, MeasuredSteps, Prospect, measure
from ingot.report.facts import RunData, gather, no_run_folder
from ingot.schema.cluster import Cluster
from ingot.theory.rules.parts import with_known_parts
from ingot.trainer.resilience.lock import is_locked
from ingot.units import counted

# Causes below this share of the wall-clock time per step are not shown.
LEAST_SHARE = 0.01
_DETECTORS: tuple[Callable[[Case], Iterator[Cause]], ...] = (
    data_stall,
    straggler,
    no_free_core,
    pipeline_bubble,
    exposed_collectives,
    recompute,
    small_micro_batches,
    host_and_launches,
    checkpoint_stall,
    evaluation,
    restarts,
)


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """The diagnosis of a run.

    running: a process trains the run now. planned_seconds, formulas: the planned time of each part of a step and its
    formula; empty if there is no comparable plan. classes: what it is bound by, the largest share first (classes.py).
    unknown: one sentence for each fact that the log does not give.
    """

    name: str
    running: bool
    last_step: int
    steps: int
    cluster: str
    measured: MeasuredSteps
    planned_seconds: dict[str, float]
    formulas: dict[str, str]
    causes: tuple[Cause, ...]
    classes: tuple[SlowClass, ...]
    unknown: tuple[str, ...]

    @property
    def planned_step_seconds(self) -> float:
        return sum(self.planned_seconds.values())


def explain_slow(root: Path, cluster: Cluster | None = None, *, unplanned: Cluster | None = None) -> Slowness:
    """Return the diagnosis of the run folder `root`; the run may still be training.

    cluster: the cluster to compare with (default: the cluster of the plan). unplanned: the cluster to compare with if
    the run has no plan.json. Raises UsageError if `root` is not a run folder, DataMissing if no progress was logged
    yet, DataError if the log cannot be read.
    """
    data = gather(root)
    run = data.run = with_known_parts(data.run) if data.run else None
    if run is None:
        raise no_run_folder(root)
    found = measure(data)
    running = is_locked(data.folder.lock)
    if found is None:
        raise DataMissing(
            "E-LOG-NO-PROGRESS",
            f"{data.folder.events} has no progress line yet",
            rule=f"steps are timed between two log lines, one every {run.watch.log_every} steps (watch.log_every)",
            fix=f"wait for the first log lines: ingot status {root}" if running else f"continue: ingot train {root}",
            path=str(data.folder.events),
            running=running,
        )
    planned_for = cluster or (data.plan.cluster if data.plan else unplanned)
    prospect = Prospect(run, planned_for, found.step_seconds) if planned_for else None
    on_gpu = found.device not in ("", "cpu")
    times = device_times(data.folder.metrics, run.parallel.world_size) if on_gpu else None
    unknown = tuple(_unknown(data, found, prospect, named=cluster is not None, timed=times is not None))
    if prospect and not (prospect.seconds and _same_kind(found, prospect.cluster)):
        prospect = None
    causes = find_causes(Case(data, found, run, prospect, times))
    return Slowness(
        name=run.name,
        running=running,
        last_step=data.last_step,
        steps=run.train.steps,
        cluster=planned_for.name if planned_for else "",
        measured=found,
        planned_seconds={name: term.value for name, term in prospect.terms.items()} if prospect else {},
        formulas={name: term.formula for name, term in prospect.terms.items()} if prospect else {},
        causes=tuple(causes),
        classes=classes_of(found, causes),
        unknown=unknown,
    )


def find_causes(case: Case) -> list[Cause]:
    """Return the causes that take at least LEAST_SHARE of the wall-clock time per step, largest first."""
    least = LEAST_SHARE * case.measured.clock_seconds
    found = [cause for detect in _DETECTORS for cause in detect(case) if cause.seconds >= least]
    return sorted(found, key=lambda cause: -cause.seconds)


def _same_kind(found: MeasuredSteps, cluster: Cluster) -> bool:
    return found.device in ("", cluster.device)


def _unknown(
    data: RunData, found: MeasuredSteps, prospect: Prospect | None, *, named: bool, timed: bool
) -> Iterator[str]:
    """Yield a sentence for each fact that is not known, with the reason. named: the user gave --cluster. timed: the
    record has the times of the devices."""
    if prospect is None:
        yield "there is no plan.json: name the machine (--cluster) for planned times and the gains of remedies"
    else:
        yield from _incomparable(found, prospect, named)
    if prospect and data.plan is None and not named:
        yield f"there is no plan.json: planned now, with the run's settings, for {prospect.cluster.name}"
    if not found.waits:
        yield "the log is from a version without `waits` events: how long ranks wait for each other is not known"
    elif timed and found.exposed:
        yield "the clocks of the GPUs time phases and waits for exchanges by axis: the bubble is a planned value"
    elif timed:
        yield "the clocks of the GPUs time phases, not single collectives: bubble and collectives are planned values"
    elif found.device != "cpu":
        yield "on GPUs only the host is timed: bubble and collectives are planned values, a slow GPU is not visible"
    if found.untimed_evaluations:
        yield f"{counted(found.untimed_evaluations, 'evaluation')} without a time"
    if data.unreadable_events:
        yield f"{counted(data.unreadable_events, 'event')} could not be read"
    if found.intervals < 2:
        yield "there is one log line so far, and the first steps take longer than others"


def _incomparable(found: MeasuredSteps, prospect: Prospect, named: bool) -> Iterator[str]:
    cluster = prospect.cluster
    other = f"planned for {cluster.name} ({cluster.device}), but it ran on "
    if not _same_kind(found, cluster):
        yield f"{other}{found.device}: name its machine (--cluster)"
    elif found.device == "cpu" and cluster.name != found.host and not named:
        yield f"{other}{found.host}: planned times are for another machine"
    if not prospect.seconds:
        yield f"{cluster.name} has no rate for {prospect.run.train.precision}: ingot doctor --bench measures one"
