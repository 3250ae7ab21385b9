"""The most memory that this process has used."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU what the allocator handed out at most; on a CPU the peak resident size of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
