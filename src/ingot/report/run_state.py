"""The state of a run in a word, for all commands that show one."""

from ingot.schema import events

ENDS = (events.RUN_STARTED, events.STOPPED, events.FINISHED, events.FAULT)


def state_of(*, running: bool, end: str, steps: int = 0) -> str:
    """Return "running", "finished", "stopped" (on request), "failed" (the last attempt ended in a fault), "interrupted"
    (the process ended without an event, as after a power loss) or "not started".

    end: the kind of the last event of ENDS in the log; "": it has none. steps: that the log has.
    """
    if running:
        return "running"
    ends = {events.FINISHED: "finished", events.STOPPED: "stopped", events.FAULT: "failed"}
    return ends.get(end, "interrupted" if end or steps else "not started")
