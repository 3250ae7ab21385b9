"""The state of a run in a word, for all commands that show one."""

import time
from collections.abc import Mapping
from typing import Any

from ingot.schema import events
from ingot.schema.run import RunConfig

ENDS = (events.RUN_STARTED, events.STOPPED, events.FINISHED, events.FAULT)


def state_of(*, running: bool, end: str, steps: int = 0, waits: bool = False) -> str:
    """Return "running", "waiting" (its leader stepped down, and waits for other nodes), "finished", "stopped" (on
    request), "failed" (the last attempt ended in a fault), "interrupted" (the process ended without an event, as after
    a power loss) or "not started".

    end: the kind of the last event of ENDS in the log; "": it has none. steps: that the log has. waits: as of
    `waits_for_nodes`.
    """
    if running:
        return "running"
    if waits:
        return "waiting"
    ends = {events.FINISHED: "finished", events.STOPPED: "stopped", events.FAULT: "failed"}
    return ends.get(end, "interrupted" if end or steps else "not started")


def stepped_down(before: float | None, event: Mapping[str, Any]) -> float | None:
    """Return when the leader of a run stepped down, in Unix seconds, after an event of its log; None: it did not, or
    something followed. before: what this function returned for the event before."""
    kind, action = event.get("kind"), event.get("action")
    if kind == events.NODE and action == "steps_down":
        return event.get("time")
    return None if kind in ENDS or (kind == events.NODE and action == "leads") else before


def waits_for_nodes(since: float | None, run: RunConfig | None, now: float | None = None) -> bool:
    """Return whether a leader that stepped down at `since` waits. It gives up after launch.node_wait_seconds; whether
    it was killed meanwhile cannot be known from here. now: Unix seconds; None: the time of the call."""
    if since is None or run is None:
        return False
    return 0 <= (time.time() if now is None else now) - since < run.launch.node_wait_seconds
