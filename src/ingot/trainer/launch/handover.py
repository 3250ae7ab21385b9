"""The knowledge of a job that its next leader has from the event log, when the leader before is gone. No torch."""

import os
import time
from dataclasses import dataclass
from typing import Any

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder
from ingot.trainer.resilience.incidents import JobIncident

# Of this process, which began before it joined anything. A container that is started again has the same name and id.
STARTED = time.time()


@dataclass(frozen=True, kw_only=True)
class EarlierJob:
    """The job so far, under other leaders. restarts: each with its age in seconds, oldest first. is_checked: its
    machines were checked, or its ranks started, so this is no launch."""

    restarts: tuple[tuple[float, JobIncident], ...]
    is_checked: bool


def earlier_job(folder: RunFolder) -> EarlierJob | None:
    """Return the job that this process goes on with when it leads; None if it begins one.

    A launcher that had joined a leader goes on with the job of that one. Call it before the event of the new leader.
    """
    own = events.launcher_of({"pid": os.getpid(), "started": STARTED})
    takes_part, members = False, set[tuple[str, ...]]()
    restarts, is_checked = list[tuple[float, JobIncident]](), False
    for event in read_events(folder.events):
        kind = event.get("kind")
        if kind == events.NODE and event["action"] in ("leads", "joined"):
            who = events.launcher_of(event)
            if event["action"] == "leads" and who not in members:
                takes_part, members, restarts, is_checked = False, set(), [], False
            members.add(who)
            takes_part = takes_part or who == own
        elif events.ends_run(kind, event):
            takes_part, members, restarts, is_checked = False, set(), [], False
        elif kind == events.RESTART:
            restarts.append((max(time.time() - event["time"], 0.0), _incident(event)))
        elif kind in (events.RUN_STARTED, events.FLEET_CHECK):
            is_checked = True
    return EarlierJob(restarts=tuple(restarts), is_checked=is_checked) if takes_part else None


def _incident(event: dict[str, Any]) -> JobIncident:
    """Return what a restart needs to be compared with later ones."""
    return JobIncident(
        rank=-1,
        kind="job",
        cause="",
        signature=str(event.get("signature", "")),
        step=int(event.get("step", -1)),
        adapted=bool(event.get("adapted")),
    )
