"""The time of a restart for a plan, from the restarts of an earlier run."""

from pathlib import Path
from statistics import median

from ingot.errors import UsageError
from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.theory.memory import Term
from ingot.units import format_seconds


def measured_restart(run: Path) -> Term:
    """Return the median seconds of the restarts of the run folder `run`, from the fault to steps of the usual length.

    First starts do not count: nothing was detected, killed or waited for. Raises UsageError if the event log has no
    restart that was measured.
    """
    starts = read_events(RunFolder(run).events, events.START_TIMES)
    found = [event["total_seconds"] for event in starts if event["seconds"].get("kill") is not None]
    if not found:
        raise UsageError(
            "E-RESTART-UNMEASURED",
            f"the event log of {run} has no restart whose time was measured",
            rule="the supervisor of `ingot train` measures a restart after a fault, once two log lines were written",
            fix="name a run that recovered from a fault, or assume a time: --assume restart_seconds=10min",
            run=str(run),
        )
    s = "s" if len(found) > 1 else ""
    return Term(median(found), f"median of {len(found)} restart{s} of {run}: {format_seconds(median(found))}")
