"""The most memory that this process has used."""

import re
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU what the allocator handed out at most; on a CPU the peak resident size of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak also counts what the parent held when it started this process.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
