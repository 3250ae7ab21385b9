"""The job of a leader, from its first attempt until it has parted from the other nodes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ingot.errors import EXIT_PREEMPTED, IngotError, NodeUnhealthy, RunBusyError
from ingot.events import EventLog
from ingot.schema.launch import Launch
from ingot.schema.run_folder import RunFolder
from ingot.trainer.checkpoint.resumable import resume_step
from ingot.trainer.launch.job_here import JobHere
from ingot.trainer.launch.job_on_nodes import JobOnNodes
from ingot.trainer.launch.layouts import Layouts
from ingot.trainer.launch.link import signs_of_life
from ingot.trainer.launch.local import UNKILLABLE


@contextlib.contextmanager
def leading(
    folder: RunFolder,
    here: JobHere,
    launch: Launch,
    layouts: Layouts,
    *,
    terms: Mapping[str, Any],
    facts: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[JobOnNodes]:
    """Lead a job: listen for other nodes, and part from them with the error that ends the block, if it is one of the
    run. Arguments as for JobOnNodes."""
    with contextlib.closing(EventLog(folder.events)) as log:
        running = JobOnNodes(folder, here, launch, layouts, terms=terms, facts=facts, say=say, record=log.write)
        try:
            with signs_of_life(running.links, launch.node_seconds):
                yield running
        except (RunBusyError, NodeUnhealthy):
            running.part(None)  # another launcher leads, or will
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
