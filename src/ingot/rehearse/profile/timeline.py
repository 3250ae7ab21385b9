"""The time of the profiled steps of one rank by kind of work: of its thread on a CPU, of its device on a GPU. No torch.

Each moment of the window belongs to one kind, so the kinds add up to the window. kinds.py has what belongs to which.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ingot.rehearse.profile.kinds import (
    ATTENTION,
    COMMUNICATION,
    ELEMENTWISE,
    HOST,
    IDLE,
    OPTIMIZER,
    PRODUCTS,
    kind_of_kernel,
    kind_of_operation,
)
from ingot.rehearse.profile.trace import (
    DATA,
    DEVICE,
    HOST_SPANS,
    OPTIMIZING,
    RUNTIME,
    WAIT,
    Interval,
    TraceSpan,
    common,
    length,
    union,
)

UNKNOWN_AXIS = "unknown"
# Calls with which the host waits for the device, by parts of their names.
_WAITS_FOR_DEVICE = ("Synchronize", "cudaMemcpy", "cuMemcpy")
_DOES_NOT_WAIT = "Async"
_IN_FLIGHT = ("gloo:", "nccl:")


@dataclass
class DividedTime:
    """The microseconds of a window by kind.

    exposed, hidden: communication by axis. operations: the spans that own time, with their kind and microseconds: an
    operation with all that it calls, or a kernel that none launched. The spans are in the order of their begins.
    """

    window: float
    by_kind: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    operations: dict[TraceSpan, tuple[str, float]] = field(default_factory=dict)

    def add(self, kind: str, axis: str, owner: TraceSpan | None, microseconds: float) -> None:
        self.by_kind[kind] += microseconds
        if kind == COMMUNICATION:
            self.exposed[axis] += microseconds
        elif owner is not None:
            self.operations[owner] = kind, self.operations.get(owner, (kind, 0.0))[1] + microseconds


@dataclass(slots=True)
class _Place:
    """A span that is open in a thread, and what it makes of the time in it. owner: the operation that owns the time;
    None: nobody does. optimizing: it is a part of the update."""

    end: float
    kind: str = HOST
    axis: str = ""
    owner: TraceSpan | None = None
    optimizing: bool = False

    def inner(self, span: TraceSpan) -> "_Place":
        """Return the place of a span that begins in this one. It ends with this one at the latest."""
        end = min(span.end, self.end)
        if self.kind == COMMUNICATION:
            return _Place(end, COMMUNICATION, self.axis)
        if span.category == "user_annotation":
            if span.name.startswith(WAIT):
                return _Place(end, COMMUNICATION, span.name.removeprefix(WAIT))
            if self.owner is None and span.name == DATA:
                return _Place(end, IDLE)
            return _Place(end, self.kind, "", self.owner, self.optimizing or span.name == OPTIMIZING)
        kind = kind_of_operation(span.name) if span.category == "cpu_op" else HOST
        if self.owner is not None:  # the outermost operation owns the time, unless another is more than elementwise
            if self.kind != ELEMENTWISE or kind not in (PRODUCTS, ATTENTION):
                return _Place(end, self.kind, "", self.owner, self.optimizing)
        elif kind == HOST:
            return _Place(end, self.kind, "", None, self.optimizing)
        return _Place(end, OPTIMIZER if self.optimizing else kind, "", span, self.optimizing)


def divide_thread(
    spans: Sequence[TraceSpan], window: TraceSpan, exchanges: Mapping[str, Sequence[Interval]]
) -> DividedTime:
    """Return the DividedTime of a rank without a GPU: of the thread in which the window was open.

    spans: of read_spans. exchanges: axis -> when its exchanges were in flight, on the clock of the trace.
    """
    divided, waits = DividedTime(window.end - window.begin), []
    places = [_Place(window.end)]
    now = window.begin

    def advance(to: float) -> None:
        while places[1:] and places[-1].end <= to:
            spend(places[-1].end)
            places.pop()
        spend(to)

    def spend(to: float) -> None:
        nonlocal now
        if to > now:
            divided.add(places[-1].kind, places[-1].axis, places[-1].owner, to - now)
            now = to

    for span in _of_thread(spans, window):
        advance(span.begin)
        places.append(places[-1].inner(span))
        if span.name.startswith(WAIT):
            waits.append((span.begin, span.end))
    advance(window.end)
    own, waiting = [(window.begin, window.end)], union(waits)
    for axis, flights in exchanges.items():
        flying = common(union(flights), own)
        divided.hidden[axis] = length(flying) - length(common(flying, waiting))
    return divided


def _of_thread(spans: Iterable[TraceSpan], window: TraceSpan) -> Iterable[TraceSpan]:
    for span in spans:
        is_inside = window.begin <= span.begin < window.end and span is not window
        if is_inside and span.thread == window.thread and _is_of_host(span):
            yield span


def _is_of_host(span: TraceSpan) -> bool:
    """Return whether a span is the work of a thread. Exchanges of gloo and NCCL are not: they go on while the thread
    that began them does other work."""
    return span.category in HOST_SPANS and not span.name.startswith(_IN_FLIGHT)


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of the device. owner: the operation that launched it, or the kernel itself."""

    begin: float
    end: float
    kind: str
    axis: str
    owner: TraceSpan


def divide_device(spans: Sequence[TraceSpan], window: TraceSpan, axes: Mapping[str, str]) -> DividedTime:
    """Return the DividedTime of a rank with a GPU. axes: name of a process group -> axis of the mesh."""
    divided = DividedTime(window.end - window.begin)
    launches = _launches(spans)
    work = sorted(_device_work(spans, window, launches, axes), key=lambda one: one.begin)
    waiting = _host_waits(spans, window)
    borders = {window.begin, window.end, *(t for one in work for t in (one.begin, one.end))}
    borders |= {t for interval in waiting for t in interval}
    computing: list[tuple[float, int]] = []  # (begin, number) of those that have begun, the first one first
    sending: list[tuple[float, int]] = []
    following, waits = 0, iter([*waiting, (float("inf"), float("inf"))])
    wait = next(waits)
    cuts = sorted(border for border in borders if window.begin <= border <= window.end)
    for begin, end in pairwise(cuts):
        while following < len(work) and work[following].begin <= begin:
            one = work[following]
            heapq.heappush(sending if one.kind == COMMUNICATION else computing, (one.begin, following))
            following += 1
        for running in (computing, sending):
            while running and work[running[0][1]].end <= begin:
                heapq.heappop(running)
        while wait[1] <= begin:
            wait = next(waits)
        first = next((work[running[0][1]] for running in (computing, sending) if running), None)
        if first is not None:
            divided.add(first.kind, first.axis, first.owner, end - begin)
        else:
            divided.add(IDLE if wait[0] <= begin else HOST, "", None, end - begin)
    busy = union((one.begin, one.end) for one in work if one.kind != COMMUNICATION)
    by_axis: dict[str, list[Interval]] = defaultdict(list)
    for one in work:
        if one.kind == COMMUNICATION:
            by_axis[one.axis].append((one.begin, one.end))
    for axis, flights in by_axis.items():
        divided.hidden[axis] = length(common(union(flights), busy))
    return divided


def _device_work(
    spans: Sequence[TraceSpan], window: TraceSpan, launches: Mapping[int, _Place], axes: Mapping[str, str]
) -> Iterable[_Work]:
    for span in spans:
        begin, end = max(span.begin, window.begin), min(span.end, window.end)
        if span.category not in DEVICE or end <= begin:
            continue
        by_name = kind_of_kernel(span.name) if span.category == "kernel" else None
        launch = launches.get(span.correlation) if span.correlation is not None else None
        if by_name == COMMUNICATION:
            group = str(span.facts.get("Process Group Name", ""))
            yield _Work(begin, end, COMMUNICATION, axes.get(group, UNKNOWN_AXIS), span)
        elif launch is None:
            yield _Work(begin, end, by_name or ELEMENTWISE, "", span)
        else:
            kind = launch.kind if launch.kind in (PRODUCTS, ATTENTION) else by_name or ELEMENTWISE
            yield _Work(begin, end, OPTIMIZER if launch.optimizing else kind, "", launch.owner or span)


def _launches(spans: Sequence[TraceSpan]) -> dict[int, _Place]:
    """Return, for each call of the driver by its correlation number, the place in its thread from which it was made."""
    open_places: dict[tuple, list[_Place]] = defaultdict(lambda: [_Place(float("inf"))])
    found = {}
    for span in spans:
        if not _is_of_host(span):
            continue
        places = open_places[span.thread]
        while places[1:] and places[-1].end <= span.begin:
            places.pop()
        if span.category in RUNTIME:
            if span.correlation is not None:
                found[span.correlation] = places[-1]
        elif not span.name.startswith(WAIT):  # the host waits then, and what it launches is work of the device
            places.append(places[-1].inner(span))
    return found


def _host_waits(spans: Sequence[TraceSpan], window: TraceSpan) -> list[Interval]:
    """Return when the thread of the window waits: for the loader, or in a call that waits for the device."""
    return union(
        (span.begin, min(span.end, window.end))
        for span in _of_thread(spans, window)
        if span.name == DATA or (span.category in RUNTIME and waits_for_device(span.name))
    )


def waits_for_device(call: str) -> bool:
    """Return whether the host waits for the device in this call of the runtime."""
    return any(part in call for part in _WAITS_FOR_DEVICE) and _DOES_NOT_WAIT not in call
