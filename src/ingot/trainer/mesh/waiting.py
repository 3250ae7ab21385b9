"""The time that this rank waits for other ranks: in collectives, and for messages.

Ranks of a job wait for each other several times in a step, so all have steps of the same length, and a slow rank is the
one that waits least. On a GPU the host does not wait for collectives, so the time says nothing there.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from ingot.trainer.mesh.axis_traffic import AxisTraffic, DeviceTraffic
from ingot.trainer.torch_private import group_of_fsdp_wait, waits_of_fsdp

# The collectives that FSDP2 calls, by their names in torch 2.12, and before.
_OF_FSDP = (
    *("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce",
)


class WaitObserver(Protocol):
    """Sees the exchanges and the waits that a clock counts. A profile has one (rehearse/profile/ranges.py)."""

    def began(self, handle: Any, group: dist.ProcessGroup, *, shows_end: bool) -> None:
        """Take in that an exchange in `group` began. handle, shows_end: as of `WaitClock.begun`."""
        ...

    def around(self, wait: Callable[..., Any], *args, **kwargs) -> Any:
        """Call `wait`. The first of `args` is what is waited for."""
        ...


class WaitClock:
    """The seconds that the thread which started this clock has waited (see `follow_thread`). One clock runs at a time.

    set_waiting: called with True when such a wait begins, and with False when it ends. traffic: divides the time by
    axis of the mesh. observer: sees what is counted; None: nobody.

    FSDP2 and torch's own blocking functions wait inside of torch, so the clock takes the place of `Work.wait`, with
    which all of them wait. Operators of compiled code wait elsewhere (see `collectives.finish`), and are not counted.
    With `traffic`, it takes the place of the collectives that FSDP2 calls, too, because a Work does not show its group.
    """

    def __init__(self, set_waiting: Callable[[bool], object] = bool, traffic: AxisTraffic | None = None):
        self.seconds, self.traffic = 0.0, traffic
        self.observer: WaitObserver | None = None
        self._set_waiting = set_waiting
        self._replaced: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        global running
        self._thread = threading.get_ident()
        clock, wait = self, dist.Work.wait

        def timed_wait(work: dist.Work, *args, **kwargs) -> bool:
            return clock.time(wait, work, *args, **kwargs)

        self._replace(dist.Work, "wait", timed_wait)
        for name in _OF_FSDP if self.traffic is not None else ():
            if (function := getattr(dist, name, None)) is not None:
                self._replace(dist, name, functools.partial(self.call, function))
        if isinstance(self.traffic, DeviceTraffic):
            units, names = waits_of_fsdp()
            for name in names:
                self._replace(units, name, _within(self.traffic, getattr(units, name)))
            streams = self.traffic.streams
            self._replace(streams, "wait_event", _for_event(self.traffic, streams.wait_event))
        running = self

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def follow_thread(self) -> None:
        """Count the waits of this thread from now on, instead of those of the thread before it."""
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Stop the clock. It may be stopped already."""
        global running
        if self._replaced:
            running = None
        while self._replaced:
            setattr(*self._replaced.pop())

    def time(self, wait: Callable[..., Any], *args, **kwargs) -> Any:
        """Call `wait` and count its time, in the thread of this clock: a thread that saves keeps nobody waiting. The
        first of `args` is what is waited for."""
        traffic = self.traffic
        if isinstance(traffic, DeviceTraffic) and args:
            wait = functools.partial(traffic.around, wait)
        if threading.get_ident() != self._thread:
            return wait(*args, **kwargs)
        if self.observer is not None:
            wait = functools.partial(self.observer.around, wait)
        began = time.monotonic()
        self._set_waiting(True)
        try:
            return wait(*args, **kwargs)
        finally:
            self._set_waiting(False)
            ended = time.monotonic()
            self.seconds += ended - began
            if traffic is not None:
                traffic.waited(args[0] if args else None, ended - began, ended - self.seconds)

    def begun(self, handle: Any, group: dist.ProcessGroup, *, shows_end: bool = True) -> None:
        """Take in that an exchange in `group` began. handle: what is waited for later, a Work or a tensor. shows_end:
        whether the handle shows when the exchange is complete."""
        if self.traffic is not None:
            self.traffic.began(handle, group, time.monotonic() - self.seconds, shows_end=shows_end)
        if self.observer is not None:
            self.observer.began(handle, group, shows_end=shows_end)

    def by_axis(self) -> dict[str, tuple[float, float]]:
        """Return axis -> (exposed, hidden) seconds so far (AxisTraffic.seconds); {} without `traffic`."""
        return {} if self.traffic is None else self.traffic.seconds(time.monotonic() - self.seconds)

    def call(self, function: Callable[..., Any], *args, **kwargs) -> Any:
        """Call a collective of torch, which may wait for its own end. Its group is a keyword argument."""
        traffic, group = self.traffic, kwargs.get("group")
        if traffic is None or group is None or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        traffic.blocking, before = group, traffic.blocking
        try:
            work = function(*args, **kwargs)
        finally:
            traffic.blocking = before
        if work is not None:
            self.begun(work, group)
        return work


def _within(traffic: DeviceTraffic, method: Callable[..., Any]) -> Callable[..., Any]:
    def entered(unit: Any, *args, **kwargs) -> Any:
        with traffic.within(functools.partial(group_of_fsdp_wait, unit)):
            return method(unit, *args, **kwargs)

    return entered


def _for_event(traffic: DeviceTraffic, wait: Callable[..., Any]) -> Callable[..., Any]:
    def marked(stream: Any, event: Any) -> Any:
        return traffic.for_event(wait, stream, event)

    return marked


running: WaitClock | None = None
