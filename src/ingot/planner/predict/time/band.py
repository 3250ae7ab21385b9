"""How far a predicted step time may be off: from the planner's errors on published runs that its fit had not seen."""

import json
from functools import cache
from importlib import resources


@cache
def ratios() -> tuple[float, float]:
    """Measured over predicted: 80% of the rows of families that were left out lie between (planner/fit.py). 1.0 and 1.0
    before there was a fit."""
    source = resources.files("ingot.planner.predict.time").joinpath("fitted.json")
    if not source.is_file():
        return 1.0, 1.0
    low, high = json.loads(source.read_text(encoding="utf-8"))["band"]
    return float(low), float(high)


def error_band(seconds: float) -> tuple[float, float]:
    """Of a predicted step of `seconds`."""
    low, high = ratios()
    return low * seconds, high * seconds
