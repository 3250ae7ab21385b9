"""The most memory that this process has used."""

import re
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU what it had in use at most, as the planner's bill counts; on a CPU the process's peak resident size."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Device context, libraries, NCCL buffers: what the caching allocator does not know of.
        beside = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(beside, 0)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux its peak also counts what the parent held when it started this process.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.M)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
