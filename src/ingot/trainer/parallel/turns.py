"""Two computations of one rank that take turns, so that each computes while the other's exchange is on its way.

In a pair of DualPipeV, a forward and a backward of two micro-batches (DeepSeek-AI 2024, section 3.2.1), both wait for
all-to-alls of their experts. A computation that has started an exchange and has nothing else to do gives the turn to
the other one, and waits for the exchange when it gets the turn back:

    forward    attention, send rows | ................... | wait, experts, send results | ................... | ...
    backward   .................... | sum, send gradients | ........................... | wait, experts, send | ...

Only one of them runs at a time, and the turn changes at places of the program, never by time. So the order of a rank's
operations and collectives is the same in every run and on every rank with the same layers, and results keep their bits.
theory/schedule/pairs.py has the order and the time of the parts.

The backward runs in a thread of its own: autograd runs the backward of a whole stage in one call, which only a second
stack can leave and enter again in its middle. (On a GPU, it is autograd's thread of the device that waits there.)
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from ingot.trainer.mesh import waiting
from ingot.trainer.torch_private import running_node

Around = Callable[[], AbstractContextManager]


class Holder(Protocol):
    """An object with state of the computation in progress, of which there is usually one."""

    def put_aside(self) -> Callable[[], None]:
        """Give up the state of the computation that runs, and return the function that sets it again."""
        ...


class _BrokenTurnsError(Exception):
    """The other computation has failed."""


class Turns:
    """The turns of two computations.

    sends_again: recomputed blocks repeat their exchanges. holders: each of two computations has its own state of these.
    in_thread: makes the context of the second computation's thread. A thread begins without the modes of its parent.
    """

    def __init__(self, device: torch.device, *, sends_again: bool = True):
        self.holders: list[Holder] = []
        self.in_thread: Around = nullcontext
        self.side = 0  # the computation whose turn it is
        self._device, self._sends_again = device, sends_again
        self._threads: ThreadPoolExecutor | None = None
        self._failed = False
        self._ended = [False, False]
        self._go = (threading.Semaphore(0), threading.Semaphore(0))
        self._around: tuple[Around, Around] = (nullcontext, nullcontext)
        self._within: AbstractContextManager = nullcontext()

    def run(
        self,
        first: Callable[[], object],
        second: Callable[[], object],
        around: tuple[Around, Around] = (nullcontext, nullcontext),
    ) -> None:
        """Run both; `first` begins, in this thread. When one has ended, the other runs on alone.

        around: for each of the two, makes the context of every turn. Raises the exception of the one that fails; the
        other one then ends with an exception at its next turn.
        """
        global _running
        assert _running is None, "one pair at a time"
        if self._threads is None:  # made late: threads do not survive a fork
            self._threads = ThreadPoolExecutor(1, "backward", self._use_device)
        self.side, self._failed, self._ended, self._around = 0, False, [False, False], around
        self._go = (threading.Semaphore(0), threading.Semaphore(0))
        _running = self
        other = self._threads.submit(self._second, second)
        try:
            self._take(0, first)
        except _BrokenTurnsError:
            pass  # the other's own exception follows
        finally:
            failure = other.exception()
            _running = None
            _count_waits_here()
        if failure is not None:
            raise failure

    def pass_turn(self, *, in_forward: bool) -> None:
        """See the function `pass_turn`."""
        if self._failed:
            raise _BrokenTurnsError
        if self._ended[1 - self.side] or (in_forward and not self._sends_again and running_node() is not None):
            return
        side, restores = self.side, [holder.put_aside() for holder in self.holders]
        self._within.__exit__(None, None, None)
        self._give(1 - side)
        self._go[side].acquire()
        self._begin(side)
        for restore in restores:
            restore()

    def _use_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own

    def _second(self, work: Callable[[], object]) -> None:
        self._go[1].acquire()
        with self.in_thread():
            self._take(1, work)

    def _take(self, side: int, work: Callable[[], object]) -> None:
        try:
            self._begin(side)
            work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._within.__exit__(None, None, None)
            self._ended[side] = True
            if not self._ended[1 - side]:
                self._give(1 - side)

    def _give(self, side: int) -> None:
        self.side = side
        self._go[side].release()

    def _begin(self, side: int) -> None:
        """Begin a turn in this thread. Raises _BrokenTurnsError if the other computation has failed."""
        self._within = nullcontext()
        if self._failed:
            raise _BrokenTurnsError
        self._within = self._around[side]()
        self._within.__enter__()
        _count_waits_here()


_running: Turns | None = None


def pass_turn(*, in_forward: bool = False) -> None:
    """Let the other of two computations run until it passes the turn back, or ends; without a pair, return at once.

    Call after the start of an exchange and before the wait for it. in_forward: the exchange is of a forward. In a
    recomputed block that keeps the results of its exchanges, nothing is on its way, and the turn stays.
    """
    if _running is not None:
        _running.pass_turn(in_forward=in_forward)


def _count_waits_here() -> None:
    if waiting.running is not None:
        waiting.running.follow_thread()
