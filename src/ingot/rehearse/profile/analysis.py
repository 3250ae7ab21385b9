"""The profile of one rank as plain values, from its trace and from what it noted itself. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.rehearse.profile.kinds import KINDS
from ingot.rehearse.profile.operations import measured_operations
from ingot.rehearse.profile.timeline import divide_device, divide_thread, waits_for_device
from ingot.rehearse.profile.trace import RUNTIME, Interval, TraceSpan, read_spans, window_of


def analyze(
    events: Sequence[Any],
    *,
    steps: int,
    on_gpu: bool,
    exchanges: Mapping[str, Sequence[Interval]],
    axes: Mapping[str, str],
) -> dict[str, Any]:
    """Return the profile of a rank; all seconds are per step. events: of the trace. exchanges, axes: as of
    `divide_thread` and `divide_device`. Raises DataError for a trace without the profiled steps.

    The values: `profiled_step_seconds`; `seconds` by kind, which add up to it; `exposed` and `hidden` communication by
    axis; `operations`, the longest first; `device_waits`, calls with which the host waited for a GPU, by name.
    """
    spans = read_spans(events)
    window = window_of(spans)
    divided = divide_device(spans, window, axes) if on_gpu else divide_thread(spans, window, exchanges)
    per_step = 1 / steps / 1e6
    return {
        "profiled_step_seconds": divided.window * per_step,
        "seconds": {kind: divided.by_kind.get(kind, 0.0) * per_step for kind in KINDS},
        "exposed": _per_step(divided.exposed, per_step),
        "hidden": _per_step(divided.hidden, per_step),
        "operations": [one.facts() for one in measured_operations(divided.operations, steps)],
        "device_waits": _device_waits(spans, window, steps),
    }


def _per_step(microseconds: Mapping[str, float], per_step: float) -> dict[str, float]:
    return {axis: value * per_step for axis, value in sorted(microseconds.items())}


def _device_waits(spans: Sequence[TraceSpan], window: TraceSpan, steps: int) -> dict[str, dict[str, float]]:
    """Return, for each call of the runtime with which the host waits for the device: number and seconds per step."""
    found: dict[str, list[float]] = {}
    for span in spans:
        if span.category in RUNTIME and window.begin <= span.begin < window.end and waits_for_device(span.name):
            found.setdefault(span.name, []).append(span.end - span.begin)
    return {
        name: {"count": len(waits) / steps, "seconds": sum(waits) / steps / 1e6}
        for name, waits in sorted(found.items(), key=lambda item: -sum(item[1]))
    }
