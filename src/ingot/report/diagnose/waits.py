"""The waits of the ranks, and their communication by axis, from the `waits` events of a log."""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.observe.scalars import axis_title
from ingot.report.diagnose.device_times import Spread
from ingot.report.readable import is_finite
from ingot.schema.metrics import ALL_RANKS, TRAFFIC_AXES
from ingot.units import format_seconds

_LEAST_SHARE = 0.01  # of a step; axes below it are not named
_SHOWN = 3


def mean_waits(events: Mapping[int, Mapping[str, Any]], lines: Mapping[int, int]) -> dict[str, Spread]:
    """Return the mean of each kind of wait over the log lines that have it. events: `waits` events by step. lines: the
    number of steps of each line."""
    found: dict[str, list[tuple[int, Spread]]] = {}
    for step, steps in lines.items():
        for kind, values in events.get(step, {}).items():
            if spread := spread_of(values):
                found.setdefault(kind, []).append((steps, spread))
    return {kind: _mean(spreads) for kind, spreads in found.items()}


def by_axis(events: Mapping[int, Mapping[str, Any]], part: str) -> dict[int, dict[str, Any]]:
    """Return step -> axis -> a part of its communication. events: `waits` events by step. part: "exposed", "hidden"."""
    found: dict[int, dict[str, Any]] = {}
    for step, event in events.items():
        axes = event.get("axes")
        for axis, parts in axes.items() if isinstance(axes, dict) else ():
            if axis in TRAFFIC_AXES and isinstance(parts, dict):
                found.setdefault(step, {})[axis] = parts.get(part)
    return found


def spread_of(values: Any) -> Spread | None:
    """Return a field of a `waits` event; None if it is something else."""
    if not isinstance(values, dict) or not all(is_finite(values.get(k)) for k in ("mean", "least", "most", "rank")):
        return None
    return Spread(values["mean"], values["least"], values["most"], int(values["rank"]))


def _mean(spreads: Sequence[tuple[int, Spread]]) -> Spread:
    total = sum(steps for steps, _ in spreads)
    mean, least, most = (
        sum(steps * getattr(spread, name) for steps, spread in spreads) / total for name in ("mean", "least", "most")
    )
    ranks = [spread.rank for _, spread in spreads]
    return Spread(mean, least, most, max(set(ranks), key=ranks.count))


def exposed_axes(exposed: Mapping[str, Spread], step_seconds: float) -> list[str]:
    """Return the axes for whose exchanges ranks wait 1% of a step or more, the longest wait first."""
    long = [axis for axis, seconds in exposed.items() if seconds.mean >= _LEAST_SHARE * step_seconds]
    return sorted(long, key=lambda axis: -exposed[axis].mean)


def traffic_words(exposed: Mapping[str, Spread], hidden: Mapping[str, Spread], step_seconds: float) -> str:
    """Return the communication of the axes that ranks wait for most, as a phrase; "" for none."""
    phrases = []
    for axis in exposed_axes(exposed, step_seconds)[:_SHOWN]:
        name = axis_title(axis)
        beside = f" (and {format_seconds(hidden[axis].mean)} hidden)" if axis in hidden and axis != ALL_RANKS else ""
        phrases.append(f"{name} {format_seconds(exposed[axis].mean)}{beside}")
    return ", ".join(phrases)
