"""The peak memory of this process, and the cost of the run in US dollars."""

import re
import resource
import sys
import time
from pathlib import Path

import torch

from ingot.events import read_events
from ingot.schema import events


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: on a GPU as the planner counts it, on a CPU the peak resident size of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Device context, libraries, NCCL buffers: memory that the caching allocator does not know of.
        outside = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(outside, 0)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak also counts what the parent held when it started this process.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class CostMeter:
    """The cost of a run: from now on, plus the cost of earlier attempts in its log (lost work was paid for, too)."""

    def __init__(self, usd_per_hour: float, devices: int, log: Path):
        """Start the clock. usd_per_hour: the price of one device, 0 if unknown. log: the run's event log."""
        self._usd_per_second = usd_per_hour * devices / 3600
        self._began = time.monotonic()
        earlier = [e["cost_usd"] for e in read_events(log, events.PROGRESS) if e.get("cost_usd") is not None]
        self._spent_usd = max(earlier, default=0.0)

    def usd(self) -> float | None:
        """Return the cost so far in US dollars; None if the price is unknown."""
        if not self._usd_per_second:
            return None
        return self._spent_usd + (time.monotonic() - self._began) * self._usd_per_second
