"""Why a run is slow: its measured step beside the planned one, and the causes, the dearest first, with their remedies.

Causes overlap (a rank that waits for data makes others wait in collectives), so they need not add up to the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import DataMissing, UsageError
from ingot.report.diagnose.slow_case import Case, Cause
from ingot.report.diagnose.slow_log import Measured, measure
from ingot.report.diagnose.slow_remedies import Prospect
from ingot.report.diagnose.slow_stops import checkpoint_stall, evaluation, restarts
from ingot.report.diagnose.slow_waits import data_stall, no_free_core, straggler
from ingot.report.diagnose.slow_work import (
    exposed_collectives,
    host_and_launches,
    pipeline_bubble,
    recompute,
    small_micro_batches,
)
from ingot.report.facts import Facts, gather
from ingot.schema.cluster import Cluster
from ingot.trainer.resilience.lock import is_locked

# Below this share of a step by the clock a cause is not worth a line.
LEAST_SHARE = 0.01
_JUDGES: tuple[Callable[[Case], Iterator[Cause]], ...] = (
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
    """planned_seconds: of a step, by part, with formulas; empty where no plan can be compared. unknown: what the log
    does not tell, one sentence each. running: the run goes on, and so does its log."""

    name: str
    running: bool
    last_step: int
    steps: int
    cluster: str
    measured: Measured
    planned_seconds: dict[str, float]
    formulas: dict[str, str]
    causes: tuple[Cause, ...]
    unknown: tuple[str, ...]

    @property
    def planned_step_seconds(self) -> float:
        return sum(self.planned_seconds.values())


def explain_slow(root: Path, cluster: Cluster | None = None, *, unplanned: Cluster | None = None) -> Slowness:
    """Of the run folder `root`; the run may still go on. cluster: instead of the one it was planned for. unplanned: of
    a run without plan.json (a layout that was set on the command line has none).

    Raises UsageError when `root` is no run folder, DataMissing when nothing was logged yet, DataError when the log
    cannot be read.
    """
    facts = gather(root)
    run = facts.run
    if run is None:
        raise UsageError(
            f"{root} has no {facts.folder.config.name}",
            rule="causes are told from the event log and the run file of a run",
            fix="ingot explain slow RUN, where RUN is the folder that `ingot train` filled",
        )
    found = measure(facts)
    running = is_locked(facts.folder.lock)
    if found is None:
        raise DataMissing(
            f"{facts.folder.events} has no line of progress yet",
            rule=f"steps are timed between two log lines, every {run.watch.log_every} steps (watch.log_every)",
            fix="wait for the first lines: ingot status shows them" if running else f"ingot train {root} goes on",
        )
    planned_for = cluster or (facts.plan.cluster if facts.plan else unplanned)
    prospect = Prospect(run, planned_for, found.step_seconds) if planned_for else None
    unknown = tuple(_unknown(facts, found, prospect, named=cluster is not None))
    if prospect and not (prospect.seconds and _same_kind(found, prospect.cluster)):
        prospect = None
    case = Case(facts, found, run, prospect)
    return Slowness(
        name=run.name,
        running=running,
        last_step=facts.last_step,
        steps=run.train.steps,
        cluster=planned_for.name if planned_for else "",
        measured=found,
        planned_seconds={name: term.value for name, term in prospect.terms.items()} if prospect else {},
        formulas={name: term.formula for name, term in prospect.terms.items()} if prospect else {},
        causes=tuple(find_causes(case)),
        unknown=unknown,
    )


def find_causes(case: Case) -> list[Cause]:
    least = LEAST_SHARE * case.measured.clock_seconds
    found = [cause for judge in _JUDGES for cause in judge(case) if cause.seconds >= least]
    return sorted(found, key=lambda cause: -cause.seconds)


def _same_kind(found: Measured, cluster: Cluster) -> bool:
    return found.device in ("", cluster.device)


def _unknown(facts: Facts, found: Measured, prospect: Prospect | None, *, named: bool) -> Iterator[str]:
    """What cannot be told, and why. named: the user said which machine it is."""
    if prospect is None:
        yield "there is no plan.json: name the machine (--cluster) to compare, and to have remedies judged"
    else:
        yield from _incomparable(found, prospect, named)
    if prospect and facts.plan is None and not named:
        yield f"there is no plan.json: planned now, with the run's settings, for {prospect.cluster.name}"
    if not found.waits:
        yield "the log has no `waits` events (they came later): what ranks wait for each other is not known"
    elif found.device != "cpu":
        yield "on GPUs only the host has clocks: bubble and collectives are planned, a slow GPU does not show"
    if found.untimed_evaluations:
        yield f"{found.untimed_evaluations} evaluations were not timed"
    if facts.unreadable_events:
        yield f"{facts.unreadable_events} events could not be read"
    if found.intervals < 2:
        yield "there is one log line so far, and the first steps take longer than others"


def _incomparable(found: Measured, prospect: Prospect, named: bool) -> Iterator[str]:
    cluster = prospect.cluster
    other = f"planned for {cluster.name} ({cluster.device}), but it ran on "
    if not _same_kind(found, cluster):
        yield f"{other}{found.device}: name its machine (--cluster)"
    elif found.device == "cpu" and cluster.name != found.host and not named:
        yield f"{other}{found.host}: planned times are those of another machine"
    if not prospect.seconds:
        yield f"{cluster.name} has no rate for {prospect.run.train.precision}: ingot doctor --bench measures one"
