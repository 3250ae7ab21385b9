"""The bound of step times beyond which a run is slower than the noise of undisturbed runs, on a shared machine."""

import itertools
import os
from collections.abc import Sequence
from statistics import median, quantiles

from ingot.events import read_events
from ingot.schema import events
from ingot.schema.run_folder import RunFolder

NOISES = 2.0
_MOST_LOAD = 2.0  # for each core: beyond it, one run may have had more of the machine than another


def step_seconds(folder: RunFolder) -> list[float]:
    """Return the seconds between the steps of a run, in the order of its log."""
    times = [event["time"] for event in read_events(folder.events, events.STEP)]
    return [after - before for before, after in itertools.pairwise(times)]


def longest_median(undisturbed: Sequence[Sequence[float]]) -> float:
    """Return the longest median step, in seconds, that the noise of undisturbed runs explains: the longest of their
    medians and NOISES times the noise, which is the distance between their medians, or the spread of the middle half
    of the steps of one of them if that is more.

    undisturbed: the seconds of the steps of at least two runs."""
    middles = [median(own) for own in undisturbed]
    spreads = [high - low for low, _, high in (quantiles(own, n=4) for own in undisturbed)]
    return max(middles) + NOISES * max(max(middles) - min(middles), *spreads)


def machine_is_shared_fairly() -> bool:
    """Return whether the load of the last minute lets step times of runs be compared at all."""
    return os.getloadavg()[0] <= _MOST_LOAD * (os.cpu_count() or 1)
