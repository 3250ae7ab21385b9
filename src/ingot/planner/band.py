"""How far predictions of step time are off on runs that the planner was not fitted to."""

import json
from functools import cache
from importlib import resources


@cache
def error_band() -> tuple[float, float] | None:
    """Measured over predicted: the ratios between which 80% of published runs lie, each of a family that was left out
    of the fit (planner/fit.py writes them). None before anything was fitted."""
    source = resources.files("ingot.planner").joinpath("fitted.json")
    if not source.is_file():
        return None
    low, high = json.loads(source.read_text(encoding="utf-8")).get("band", (0.0, 0.0))
    return (float(low), float(high)) if 0 < low <= high else None
