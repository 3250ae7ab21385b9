"""The job of a leader, from its first attempt until it has parted from the other nodes."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.errors import EXIT_PREEMPTED, IngotError, NodeUnhealthy, RunBusyError
from ingot.events import EventLog, read_events
from ingot.machine.health.report import node_name
from ingot.schema import events
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.interrupts import PendingSignals
from ingot.trainer.launch.handover import STARTED
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.job_on_nodes import JobOnNodes
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.link import signs_of_life
from ingot.trainer.launch.local import UNKILLABLE
from ingot.units import format_seconds

# The first two begin an attempt, the others end it.
_ATTEMPTS = (events.RUN_STARTED, events.RESTART, events.FAULT, events.PLANNED_RESTART, events.STOPPED, events.FINISHED)


@contextlib.contextmanager
def leading(
    folder: RunFolder,
    here: JobHere,
    launch: Launch,
    layouts: Layouts,
    *,
    terms: Mapping[str, Any],
    facts: Mapping[str, str],
    signals: PendingSignals,
    say: Callable[[str], None],
) -> Iterator[JobOnNodes]:
    """Lead a job: listen for other nodes, and part from them with the error that ends the block, if it is one of the
    run. signals: catches the stop signals to this process from here on. The others as for JobOnNodes."""
    signals.catch()  # this process may step down, and ranks that trained need an end of their run in the event log
    with EventLog(folder.events) as log:
        record_lost_leader(folder, log.write, say)
        running = JobOnNodes(folder, here, launch, layouts, terms=terms, facts=facts, say=say, record=log.write)
        try:
            with signs_of_life(running.links, launch.node_seconds):
                yield running
        except (RunBusyError, NodeUnhealthy) as error:
            if isinstance(error, NodeUnhealthy):
                own = {"host": node_name(), "pid": os.getpid(), "started": STARTED, "node": 0}
                log.write(events.NODE, action="drained", reason=error.found, **own)
            # Another launcher leads, or will; not if too few machines are sound.
            running.part(None, error if error.code == "E-NODES-UNFIT" else None)
            raise
        except IngotError as error:  # a machine that cannot end its own processes says nothing about the run
            running.part(None, error if error.code != UNKILLABLE else None)
            raise
        except KeyboardInterrupt:
            step = resume_step(folder)
            running.part({"exit_code": EXIT_PREEMPTED, "step": step, "saved_step": step, "restarts": 0, "seconds": 0.0})
            raise
        finally:
            running.release()


def record_lost_leader(folder: RunFolder, record: Callable[..., None], say: Callable[[str], None]) -> None:
    """Record the loss of the leader before this one, if an attempt of its job began and nothing ended it.

    The lost one cannot record that itself, and the nodes that followed it only end their ranks. record: writes an
    event.
    """
    leads: dict[str, Any] | None = None
    begun, step, newest = False, 0, 0.0
    for event in read_events(folder.events, events.NODE, events.PROGRESS, *_ATTEMPTS):
        if event["kind"] == events.NODE:
            leads = event if event["action"] == "leads" else leads
            own = leads is not None and events.launcher_of(event) == events.launcher_of(leads)
            begun = begun and not (own and event["action"] in ("steps_down", "drained"))  # it is there, without ranks
            continue
        newest = event["time"]
        if event["kind"] == events.PROGRESS:
            step = event["step"]
        else:
            begun = event["kind"] in _ATTEMPTS[:2]
    if leads is None or not begun:
        return
    seconds = max(time.time() - newest, 0.0)  # the clocks of two machines may differ
    cause = f"was lost with the leader, {leads['host']} (process {leads['pid']})"
    who = {name: leads[name] for name in ("host", "pid", "started") if name in leads}  # older logs lack the start
    record(events.NODE, **who, action="lost", node=0, reason="another node leads")
    record(
        events.FAULT,
        rank=0,
        failure="node",
        cause=cause,
        code="",
        step=step,
        detected_by="supervisor",
        evidence="",
        seconds=round(seconds, 3),
    )
    say(f"nodes     rank 0 {cause} near step {step}, {format_seconds(seconds)} after its last sign in the event log")
