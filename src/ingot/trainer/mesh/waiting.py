"""The time that this rank waits for other ranks: in collectives, and for messages.

Ranks of a job wait for each other several times in a step, so all have steps of the same length, and a slow rank is the
one that waits least. On a GPU the host does not wait for collectives, so the time says nothing there.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class WaitClock:
    """The seconds that the thread which started this clock has waited. One clock runs at a time.

    set_waiting: called with True when such a wait begins, and with False when it ends.

    FSDP2 and torch's own blocking functions wait inside of torch, so the clock takes the place of `Work.wait`, with
    which all of them wait. Operators of compiled code wait elsewhere (see `collectives.finish`), and are not counted.
    """

    def __init__(self, set_waiting: Callable[[bool], object] = bool):
        self.seconds = 0.0
        self._set_waiting = set_waiting
        self._wait: Any = None

    def start(self) -> None:
        global running
        self._thread, self._wait = threading.get_ident(), dist.Work.wait
        clock, wait = self, self._wait

        def timed_wait(work: dist.Work, *args, **kwargs) -> bool:
            return clock.time(wait, work, *args, **kwargs)

        dist.Work.wait = timed_wait  # pyright: ignore[reportAttributeAccessIssue]
        running = self

    def stop(self) -> None:
        """Stop the clock. It may be stopped already."""
        global running
        if self._wait is not None:
            dist.Work.wait, self._wait, running = self._wait, None, None

    def time(self, wait: Callable[..., Any], *args, **kwargs) -> Any:
        """Call `wait` and count its time, in the thread of this clock: a thread that saves keeps nobody waiting."""
        if threading.get_ident() != self._thread:
            return wait(*args, **kwargs)
        began = time.monotonic()
        self._set_waiting(True)
        try:
            return wait(*args, **kwargs)
        finally:
            self._set_waiting(False)
            self.seconds += time.monotonic() - began


running: WaitClock | None = None
