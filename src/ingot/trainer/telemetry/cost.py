"""What a run has cost so far, at the price that the user named."""

import time
from pathlib import Path

from ingot.events import read_events
from ingot.schema import events


class CostMeter:
    """Counts from now on, on top of what earlier attempts of the run in `log` have cost; lost work was paid too."""

    def __init__(self, usd_per_hour: float, devices: int, log: Path):
        """usd_per_hour: of one device; 0 means that the price is unknown."""
        self._usd_per_second = usd_per_hour * devices / 3600
        self._began = time.monotonic()
        earlier = [e["cost_usd"] for e in read_events(log, events.PROGRESS) if e.get("cost_usd") is not None]
        self._spent_usd = max(earlier, default=0.0)

    def usd(self) -> float | None:
        if not self._usd_per_second:
            return None
        return self._spent_usd + (time.monotonic() - self._began) * self._usd_per_second
