"""Alerts of the guard: what a run shows over many steps. An alert is reported, and changes nothing. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOSS_RATIO = "loss ratio"
EXPLOSION = "gradient explosion"
VANISHED = "gradient vanished"
PLATEAU = "plateau"
UNIFORM = "uniform guess"
UNCHANGED = "weights unchanged"
LOSS_SCALE = "loss scale"
UNDERFLOW = "underflow"
SATURATION = "saturation"
ACTIVATIONS = "activation saturation"
TRANSIENT = "transient faults"

_TEXTS = {
    LOSS_RATIO: "the loss is {value:.2f} times the mean of the steps before (limit {limit:g})",
    EXPLOSION: "the gradient norm is {value:.4g}, far above the clip limit and its median (limit {limit:.4g})",
    VANISHED: "since step {since:,}, the gradient norm is {value:.3g} times its median, or less (limit {limit:g})",
    PLATEAU: "since step {since:,}, the loss has not fallen: the later half has {value:.4f} times that of the first",
    UNIFORM: "since step {since:,}, the loss is {value:.3f} times that of a uniform guess (limit {limit:g})",
    UNCHANGED: "{value:,.0f} updates since step {since:,} changed no weights",
    LOSS_SCALE: "the loss scale is {value:g} (limit {limit:g})",
    UNDERFLOW: "{value:.0%} of the gradient is 0 or subnormal in the training precision (limit {limit:.0%})",
    ACTIVATIONS: "{value:.1%} of the hidden states are near the largest number of the training precision, or not "
    "finite (limit {limit:.1%})",
    TRANSIENT: "since step {since:,}, {value:,.0f} steps had a fault that was gone in the second try (limit {limit:g})",
    SATURATION: "{value:.1%} of the gradient is near the largest number of the training precision (limit {limit:.1%})",
}
_SHOWN_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert at `step`.

    alert: its kind, one of this file. since: the first step that shows it. value, limit: the figure, and the one that
    it is compared with. places: the ranks or layers that show it, the worst first; (): all, or it has no place. cause:
    what explains it; "": not known.
    """

    alert: str
    step: int
    since: int
    value: float
    limit: float
    places: tuple[str, ...] = ()
    cause: str = ""


def alert_of(event: Mapping[str, Any]) -> Alert:
    """Return the alert of an `alert` event. Raises KeyError, TypeError or ValueError for other values."""
    if event["alert"] not in _TEXTS:
        raise ValueError(f"alert {event['alert']!r}")
    return Alert(
        alert=event["alert"],
        step=int(event["step"]),
        since=int(event["since"]),
        value=float(event["value"]),
        limit=float(event["limit"]),
        places=tuple(map(str, event["places"])),
        cause=str(event["cause"]),
    )


def described(alert: Alert) -> str:
    """Return a sentence for people."""
    text = _TEXTS[alert.alert].format(since=alert.since, value=alert.value, limit=alert.limit)
    shown, more = ", ".join(alert.places[:_SHOWN_PLACES]), len(alert.places) - _SHOWN_PLACES
    shown += f" and {more} more" if more > 0 else ""
    where = f": {shown}" if shown else ""
    return f"step {alert.step}: {text}{where}{f'; {alert.cause}' if alert.cause else ''}"
