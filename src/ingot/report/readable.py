"""Checks of the events of a log: which have what their kind requires. Logs can be damaged or of other versions."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from ingot.report.timeline import KINDS, entry_of
from ingot.schema import events as kinds

# Fields that an event of a kind must have as finite numbers, and fields that may be NaN or infinite.
_NUMBERS = {
    kinds.RUN_STARTED: ("from_step", "world_size"),
    kinds.START_TIMES: ("attempt", "total_seconds"),
    kinds.STEP: ("step",),
    kinds.PROGRESS: ("step", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds"),
    kinds.WAITS: ("step", "steps"),
    kinds.EXPERTS: ("step", "steps"),
    kinds.METRICS: ("step",),
    kinds.MEASURED: ("step",),
    kinds.SOURCES: ("step",),
    kinds.CHECKPOINT: ("step", "bytes", "stall_seconds"),
    kinds.WEIGHTS_SAVED: ("step", "bytes", "stall_seconds"),
    kinds.CHECKPOINT_STORED: ("step", "bytes", "seconds"),
    kinds.SNAPSHOT_KEPT: ("step", "nodes"),
    kinds.STRAGGLER: ("step", "rank", "factor"),
    kinds.CHECKPOINT_FAILED: ("step",),
    kinds.CHECKPOINT_SKIPPED: ("step",),
    kinds.EVALUATION: ("step", "tokens"),
    kinds.SAMPLE: ("step",),
    kinds.TASK_SCORES: ("step",),
    kinds.BACKGROUND_EVALUATION: ("step",),
    kinds.STAGE: ("seconds",),
    kinds.FINISHED: ("step", "tokens"),
    kinds.SETTING_CHANGED: ("step",),
    kinds.ROLLED_BACK: ("from_step", "to_step"),
    kinds.REWOUND: ("step",),
    kinds.FINDING: ("step",),
    kinds.RETRIED: ("step",),
    kinds.METRICS_LOST: ("step", "rows"),
    kinds.SANITY: ("step",),
    kinds.GRADIENT_RANGE: ("step",),
}
_PERHAPS_NOT_FINITE = {
    kinds.STEP: ("loss", "grad_norm", "lr"),
    kinds.EVALUATION: ("bpb", "loss", "unigram_bpb"),
    kinds.SANITY: ("loss",),
}
_SIZES = ("loss", "grad_norm", "loss_sigmas", "norm_sigmas")  # of a finding
# Lists of an `experts` event with one value per layer, and such lists that may be null.
_BY_LAYER = ("layers", "load_cv", "max_load", "min_load", "entropy")
_BEYOND = ("dropped", "fallback")
_YEAR_5000_SECONDS = 95_617_584_000


def is_readable(event) -> bool:
    """Check whether an event has a kind, a time, and the fields that its kind requires."""
    kind = event.get("kind") if isinstance(event, dict) else None
    if not isinstance(kind, str) or not is_finite(event.get("time")) or abs(event["time"]) > _YEAR_5000_SECONDS:
        return False
    step = event.get("step")
    if step is not None and not (isinstance(step, int) and is_finite(step)):
        return False
    if kind == kinds.EXPERTS and not _has_numbers_by_layer(event):
        return False
    if kind in (kinds.SKIPPED, kinds.PASSED) and not _has_steps(event):
        return False
    if kind == kinds.METRICS and not has_values(event):
        return False
    if kind in (kinds.FINDING, kinds.RETRIED) and not _has_kinds(event):
        return False
    if kind == kinds.FINDING and not all(is_number(event.get(name)) for name in _SIZES):
        return False
    if kind == kinds.GRADIENT_RANGE and not _has_shares_by_layer(event):
        return False
    required = ("step", "tokens") if is_passed_line(event) else _NUMBERS.get(kind, ())
    finite = all(is_finite(event.get(name)) for name in required)
    finite = finite and all(is_number(event.get(name)) for name in _PERHAPS_NOT_FINITE.get(kind, ()))
    return finite and (kind not in KINDS or _has_text(event))


def is_passed_line(event: Mapping[str, Any]) -> bool:
    """Check whether an event is a log line of steps whose data all were passed: it has no number of a trained step."""
    return event.get("kind") == kinds.PROGRESS and is_number(event.get("passed")) and event.get("step_seconds") is None


def _has_text(event: dict) -> bool:
    try:
        entry_of(event)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def _has_kinds(event: dict) -> bool:
    found = event.get("found")
    return isinstance(found, list) and bool(found) and all(isinstance(one, str) for one in found)


def _has_steps(event: dict) -> bool:
    steps = event.get("steps")
    return isinstance(steps, list) and bool(steps) and all(isinstance(step, int) for step in steps)


def has_values(event: dict) -> bool:
    """Check whether a `metrics` event has numbers by name, and the name of the callback that wrote them."""
    values = event.get("values")
    return (
        isinstance(event.get("by"), str)
        and isinstance(values, dict)
        and all(isinstance(value, float) or is_finite(value) for value in values.values())
    )


def _has_numbers_by_layer(event: dict) -> bool:
    names = (*_BY_LAYER, *(name for name in _BEYOND if event.setdefault(name, None) is not None))
    columns = [column for name in names if isinstance(column := event.get(name), list) and column]
    if len(columns) < len(names) or len({len(column) for column in columns}) > 1:
        return False
    return all(is_finite(value) or value != value for column in columns for value in column)


def _has_shares_by_layer(event: dict) -> bool:
    columns = [event.get(name) for name in ("layers", "underflow", "saturation")]
    if not all(isinstance(column, list) for column in columns) or len({len(column or ()) for column in columns}) > 1:
        return False
    return all(is_number(share) for column in columns[1:] for share in column or ())


def is_number(value) -> TypeGuard[float]:
    """Check whether `value` is an int or a float; True and False do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value) -> TypeGuard[float]:
    """Check whether `value` is a number below 1e18 in absolute value, so neither NaN nor infinite."""
    return is_number(value) and abs(value) < 1e18
