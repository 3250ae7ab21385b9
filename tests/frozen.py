"""Processes that are stopped for a while: nothing is closed, and nothing answers."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Within the context, these processes are stopped (SIGSTOP)."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
