"""A run's pipeline as a timeline to look at, and any other schedule beside it."""

from ingot.errors import ConfigError
from ingot.planner.predict.time.step_time import simulated
from ingot.schema.cluster import Cluster
from ingot.schema.run import RunConfig
from ingot.theory.layout import positions
from ingot.theory.schedule import NAMES, PUBLISHED, build_table, schedule_problems, simulate, timeline_text


def timeline_lines(run: RunConfig, cluster: Cluster, schedule: str = "", width: int = 120) -> list[str]:
    """Head, one line per pipeline rank, and what is published of the bubble. schedule: "" is the run's own, drawn with
    the planned times of its stages; others, also those that are simulated only, with F = I = W.

    Raises ConfigError when there is no pipeline, or when the schedule does not fit it.
    """
    parallel, own = run.parallel, not schedule or schedule == run.parallel.schedule
    if parallel.pp == 1:
        raise ConfigError(
            "the run has no pipeline (parallel.pp = 1)", fix="--set parallel.pp=2, or another number of ranks"
        )
    name = schedule or parallel.schedule
    if name not in NAMES:
        raise ConfigError(f"there is no schedule {name!r}", rule=f"schedules are {', '.join(NAMES)}")
    if problems := list(schedule_problems(name, parallel.pp, run.accumulation)):
        raise ConfigError("; ".join(problems), rule="a schedule fits its ranks and micro-batches")
    if own:
        timeline, times = simulated(run, cluster, positions(run)), "planned times"
    else:
        table = build_table(name, parallel.pp, run.accumulation)
        timeline, times = simulate(table, forward=1.0, backward_input=1.0, backward_weight=1.0), "F = I = W"
    keeps = ", ".join(map(str, timeline.peak_in_flight))
    head = (
        f"{name}, {parallel.pp} ranks, {run.accumulation} micro-batches, {times}: idle {timeline.bubble_fraction:.1%}"
    )
    lines = [head, *timeline_text(timeline, width).split("\n"), f"micro-batches that ranks keep at once: {keeps}"]
    if published := PUBLISHED.get(name):
        lines.append(f"published: idle {published.formula} ({published.source})")
    return lines
