"""Who hears Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Ctrl-C goes to the whole group, and the parent ends its workers: those started in this block do not hear it.

    Not even while they import.
    """
    resource_tracker.ensure_running()  # a process beside the first worker; its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
