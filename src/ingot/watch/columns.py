"""The columns of the series of a run, and their numbers from events."""

import math
from collections.abc import Mapping
from typing import Any

from ingot.observe.scalars import TRAFFIC
from ingot.report.readable import is_number
from ingot.schema.metric_files import MISSING
from ingot.schema.metrics import TRAFFIC_AXES

STEP_COLUMNS = ("loss", "grad_norm", "lr")
LINE_COLUMNS = (
    "bpb", "tokens", "tokens_per_second", "mfu", "step_seconds", "data_wait_seconds", "peak_memory_bytes", "cost_usd",
    "eta_seconds",
)  # fmt: skip
EXPERT_COLUMNS = ("load_cv", "max_load", "min_load", "entropy", "dropped", "fallback")
TRAFFIC_COLUMNS = tuple(f"{axis}/{part}" for axis in TRAFFIC_AXES for part in TRAFFIC)


def number_of(value: Any) -> float:
    """Return a field of an event; MISSING for one that is no number."""
    try:
        return float(value) if is_number(value) else MISSING
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def over_layers(event: Mapping) -> dict:
    """Return an `experts` event with one number per column: means over layers, the largest and the least load."""
    found = {"step": event["step"], "time": event["time"]}
    for name in EXPERT_COLUMNS:
        values = event.get(name) or []
        over = {"max_load": max, "min_load": min}.get(name, lambda own: sum(own) / len(own))
        found[name] = over(values) if values else None
    return found
