"""Operations of a step that would make the host wait for its device, counted on a CPU."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import TorchFunctionMode

from ingot.rehearse.profile.host_reads import HostReads

# Functions below which a tensor of a CPU reaches no operator: its values are read where they are.
_READ_IN_PLACE = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
# A list of numbers becomes a tensor of a device by a copy for which the host waits.
_MADE_OF_NUMBERS = {torch.tensor, torch.as_tensor}


class _InPlace(TorchFunctionMode):
    def __init__(self, found: Counter[tuple[str, str]]):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        copied = func in _MADE_OF_NUMBERS and (kwargs or {}).get("device") is not None
        if func in _READ_IN_PLACE or copied:
            self.found[getattr(func, "__name__", str(func)), _caller()] += 1
        return func(*args, **kwargs or {})


def _caller() -> str:
    """Return the innermost function of ingot, and its file."""
    frame = sys._getframe(1)
    while frame and "/ingot/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/ingot/')[2]} {frame.f_code.co_name}" if frame else ""


@contextmanager
def host_waits() -> Iterator[Counter[tuple[str, str]]]:
    """Count, inside the context, (operation, line) -> times: what `ingot profile` counts on a GPU, and the reads and
    copies that only a GPU has as operations."""
    reads = HostReads(torch.device("cpu"))
    with ExitStack() as modes:
        modes.enter_context(reads)
        modes.enter_context(_InPlace(reads.found))
        yield reads.found
