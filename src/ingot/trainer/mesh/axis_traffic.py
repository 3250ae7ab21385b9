"""The communication of a rank by axis of the mesh: how long it waits for it, and how long it goes on beside its work.

    exposed    the rank waits for an exchange of the axis, and for the ranks that come late to it
    hidden     an exchange of the axis is in flight while the rank does its own work; several at once count once

On a CPU both are times of the host. An exchange is in flight from its start until it is complete, which is noticed at
the next start or wait of any exchange, or until its result is waited for: messages between two ranks and operators that
a compiler sees show no earlier end. Operators within compiled code are not seen.

On a GPU the host waits for nothing: events in the stream that computes mark the begin and the end of each wait, and are
read at log lines. NCCL shows the end of an exchange only to streams that wait for it, so `hidden` is not known there.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ingot.schema.metrics import ALL_RANKS, TRAFFIC_AXES
from ingot.trainer.mesh.mesh import Mesh
from ingot.trainer.mesh.step_times import marked

# Purpose of a group (mesh.own_group) -> the axis that it belongs to: the first of these with several ranks.
_OF_PURPOSE = {
    "mesh_shard": ("dp_shard", "cp"),
    "mesh_expert_shard": ("dp_shard", "cp", "tp"),
    "mesh_copy": ("dp_shard", "cp", "tp"),
    "mesh_sequence": ("cp", "tp"),
    "mesh_ring": ("cp",),
    "mesh_ulysses": ("cp",),
    "pipeline_channel": ("pp",),
    "tied_ends": ("pp",),
} | {f"mesh_{axis}": (axis,) for axis in TRAFFIC_AXES}
_UNREAD = 4096  # waits of a GPU that are kept before those that are over are read


def traffic_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes with several ranks, and ALL_RANKS for exchanges of no axis; () for a rank alone."""
    found = tuple(axis for axis in TRAFFIC_AXES if axis != ALL_RANKS and mesh.size(axis) > 1)
    return (*found, ALL_RANKS) if found else ()


def axis_of_group(mesh: Mesh, group: dist.ProcessGroup) -> str | None:
    """Return the axis whose ranks exchange something in `group`; None for groups of no axis, and of one rank."""
    if group.size() == 1:
        return None
    purpose = group.group_desc
    if group is dist.group.WORLD:  # the group of an axis or view that has all ranks
        names = (name for name in (*TRAFFIC_AXES, *mesh.views) if name not in (ALL_RANKS, "ep"))
        purpose = next((f"mesh_{name}" for name in names if mesh.size(name) == group.size()), "")
    return next((axis for axis in _OF_PURPOSE.get(purpose, ()) if mesh.size(axis) > 1), None)


@dataclass(slots=True)
class _Axis:
    """The seconds of an axis so far. flying: its exchanges in flight. since: the time, on the clock of the rank's own
    work, from which `hidden` lacks them. shown: those that show when they are complete, in the order of starts."""

    exposed: float = 0.0
    hidden: float = 0.0
    flying: int = 0
    since: float = 0.0
    shown: "deque[tuple[dist.Work, _Flight]]" = field(default_factory=deque)


@dataclass(slots=True)
class _Flight:
    axis: _Axis
    line: int
    ended: bool = False

    def end(self, own: float) -> None:
        if not self.ended:
            self.ended = True
            self.axis.flying -= 1
            if not self.axis.flying:
                self.axis.hidden += own - self.axis.since


class AxisTraffic:
    """The communication of this rank since it was made; WaitClock (mesh/waiting.py) feeds it.

    `own`, in all methods: the seconds that the rank has worked, on a clock that stops while it waits for others.
    blocking: the group of the call in progress that waits for its own exchange; None outside of one.
    """

    def __init__(self, mesh: Mesh):
        self.axes = traffic_axes(mesh)
        self.blocking: dist.ProcessGroup | None = None
        self._mesh = mesh
        self._of_axis = {axis: _Axis() for axis in self.axes}
        self._of_group: dict[str, _Axis | None] = {}
        self._in_flight: dict[Any, _Flight] = {}
        self._line = 0

    def began(self, handle: Any, group: dist.ProcessGroup, own: float, *, shows_end: bool) -> None:
        """Take in that an exchange began. handle: what is waited for later, a Work or a tensor. shows_end: whether the
        handle shows when the exchange is complete."""
        self._look(own)
        if (axis := self._axis(group)) is None or handle in self._in_flight:
            return
        flight = self._in_flight[handle] = _Flight(axis, self._line)
        if not axis.flying:
            axis.since = own
        axis.flying += 1
        if shows_end:
            axis.shown.append((handle, flight))

    def waited(self, handle: Any, seconds: float, own: float) -> None:
        """Count a wait of the host that ends now."""
        flight = self._in_flight.pop(handle, None)
        axis = flight.axis if flight is not None else self._axis_of_call()
        if axis is not None:
            axis.exposed += seconds
        if flight is not None:
            flight.end(own)
        self._look(own)

    def seconds(self, own: float) -> dict[str, tuple[float, float]]:
        """Return axis -> (exposed, hidden) seconds so far; NaN for what is not known. Forgets exchanges that began
        three calls ago and were not waited for: something failed."""
        self._look(own)
        for handle, flight in list(self._in_flight.items()):
            if flight.line < self._line - 2:
                del self._in_flight[handle]
                flight.end(own)
        self._line += 1
        for axis in self._of_axis.values():
            if axis.flying:
                axis.hidden += own - axis.since
                axis.since = own
        return {name: (axis.exposed, axis.hidden) for name, axis in self._of_axis.items()}

    def _look(self, own: float) -> None:
        """Notice which exchanges are complete."""
        for axis in self._of_axis.values():
            shown = axis.shown
            while shown and (shown[0][1].ended or shown[0][0].is_completed()):
                shown.popleft()[1].end(own)

    def _axis(self, group: dist.ProcessGroup) -> _Axis | None:
        name = group.group_name
        if name not in self._of_group:
            self._of_group[name] = self._of_axis.get(axis_of_group(self._mesh, group) or "")
        return self._of_group[name]

    def _axis_of_call(self) -> _Axis | None:
        """Return the axis of the call that waits now; exchanges of no axis are of all ranks."""
        found = self._axis(self.blocking) if self.blocking is not None else None
        return found or self._of_axis.get(ALL_RANKS)


class DeviceTraffic(AxisTraffic):
    """The communication for which the stream waits that was the current one when this was made.

    mark: records an event in the current stream. stream: returns the current stream. streams: the class of streams.
    """

    def __init__(
        self,
        mesh: Mesh,
        mark: Callable[[], Any] = marked,
        stream: Callable[[], Any] = lambda: torch.cuda.current_stream(),
        streams: type = torch.cuda.Stream,
    ):
        super().__init__(mesh)
        self.streams = streams
        self._mark, self._current, self._stream = mark, stream, stream()
        self._thread, self._within = threading.get_ident(), threading.local()
        self._waits: deque[tuple[_Axis, Any, Any]] = deque()

    def began(self, handle: Any, group: dist.ProcessGroup, own: float, *, shows_end: bool) -> None:
        super().began(handle, group, 0.0, shows_end=False)

    def waited(self, handle: Any, seconds: float, own: float) -> None:
        """Count nothing: the device waits later."""

    def around(self, wait: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `wait` and mark its begin and end in the stream; also in the thread of a backward."""
        flight = self._in_flight.pop(handle, None)
        axis = flight.axis if flight is not None else None
        if axis is None and threading.get_ident() == self._thread:
            axis = self._axis_of_call()
        return self._marked(axis, wait, handle, *args, **kwargs)

    @contextmanager
    def within(self, group_of: Callable[[Any], dist.ProcessGroup]) -> Iterator[None]:
        """While this is entered, `for_event` counts the waits of this thread. group_of: event -> the group for whose
        exchange a stream waits that waits for it."""
        before = getattr(self._within, "group_of", None)
        self._within.group_of = group_of
        try:
            yield
        finally:
            self._within.group_of = before

    def for_event(self, wait: Callable[..., Any], stream: Any, event: Any) -> Any:
        """Call `wait`, with which `stream` waits for `event`, and mark its begin and end if that is `within`."""
        group_of = getattr(self._within, "group_of", None)
        if group_of is None or stream != self._stream:
            return wait(stream, event)
        return self._marked(self._axis(group_of(event)), wait, stream, event)

    def _marked(self, axis: _Axis | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if axis is None or self._current() != self._stream:
            return function(*args, **kwargs)
        began = self._mark()
        try:
            return function(*args, **kwargs)
        finally:
            self._waits.append((axis, began, self._mark()))
            while len(self._waits) > _UNREAD and self._waits[0][2].query():
                self._read(*self._waits.popleft())

    def seconds(self, own: float) -> dict[str, tuple[float, float]]:
        """Return the seconds as AxisTraffic does. The host waits for the device."""
        if self._waits:
            self._waits[-1][2].synchronize()
        while self._waits:
            self._read(*self._waits.popleft())
        return {axis: (exposed, math.nan) for axis, (exposed, _) in super().seconds(own).items()}

    def _read(self, axis: _Axis, began: Any, ended: Any) -> None:
        axis.exposed += began.elapsed_time(ended) / 1000
