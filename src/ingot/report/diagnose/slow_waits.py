"""Causes that the run's own clocks show: waiting for data, for a slow rank, for a core."""

import math
from collections.abc import Iterator

from ingot.report.diagnose.slow_case import Case, Cause
from ingot.report.diagnose.slow_remedies import Remedy
from ingot.units import format_seconds

# Most of the waiting in a tenth of the log lines, with enough lines to say so.
_IN_BURSTS, _LEAST_LINES = 0.5, 10
_MOST_BATCHES = 64


def data_stall(case: Case) -> Iterator[Cause]:
    found = case.measured
    which = f"rank {found.waits['data'].rank} most" if "data" in found.waits else "on rank 0, the others were not timed"
    if found.bursts > _IN_BURSTS and found.intervals >= _LEAST_LINES:
        settings = {"data.prefetch": _bridging(case)}
        text = f"data.prefetch = {settings['data.prefetch']}, or storage without pauses"
        kind = f"in bursts, {found.bursts:.0%} of it in the worst tenth of the log lines"
    else:
        settings = {}
        text = "put the token folder on faster or local storage; a larger data.prefetch would not help"
        kind = "throughout: batches are read slower than they are used"
    remedy = Remedy(text=text, settings=settings, seconds=found.data_seconds, reason="all of it, with batches in time")
    yield Cause(
        name="data stall",
        seconds=found.data_seconds,
        source="measured",
        evidence=f"the trainer waits for its next batch, {which}; {kind}",
        remedies=(remedy,),
    )


def _bridging(case: Case) -> int:
    """Batches that last through the longest pause: one may have been all of the waiting of its log line."""
    found, prefetch = case.measured, case.run.data.prefetch
    return min(prefetch + math.ceil(found.longest_wait_seconds / found.fastest_seconds), _MOST_BATCHES)


def straggler(case: Case) -> Iterator[Cause]:
    """Ranks of a pipeline have different work; others have the same."""
    computing = case.measured.waits.get("computing")
    if computing is None or not case.on_cpu or case.run.parallel.pp > 1:
        return
    late = computing.most - computing.mean
    evidence = (
        f"rank {computing.rank} computes {format_seconds(computing.most)} of a step, the mean is "
        f"{format_seconds(computing.mean)}, and all wait for it"
    )
    text = f"look at the machine of rank {computing.rank}: clock, thermal limit, memory, other load"
    remedy = Remedy(text=text, settings={}, seconds=late, reason="what it takes longer than the mean")
    yield Cause(name="straggler", seconds=late, source="measured", evidence=evidence, remedies=(remedy,))


def no_free_core(case: Case) -> Iterator[Cause]:
    queued = case.measured.waits.get("queued")
    if queued is None or not case.on_cpu:
        return
    evidence = f"rank {queued.rank} was ready to run for {format_seconds(queued.most)} of a step, but had no core"
    text = "leave the cores to the run: end other work, or start no more ranks than there are cores"
    remedy = Remedy(text=text, settings={}, seconds=queued.most, reason="all of it, on a machine without other work")
    yield Cause(name="no free core", seconds=queued.most, source="measured", evidence=evidence, remedies=(remedy,))
