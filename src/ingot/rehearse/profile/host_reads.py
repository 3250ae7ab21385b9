"""The operations of a step with which the host reads values of tensors: on a GPU, it waits for the device there."""

from collections import Counter

import torch

from ingot.rehearse.profile.ranges import calling_line
from ingot.trainer.torch_private import TraceMode

_READS = {
    *("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select", "aten.unique_consecutive"),
    *("aten._unique2", "aten.unique_dim", "aten.bincount", "aten.is_nonzero", "aten.item"),
}
_COPIES = {"aten._to_copy", "aten.copy_"}


class HostReads(TraceMode):
    """A mode that counts reads of values: an item, a truth value, a size that depends on values, a copy to the host
    that is not asynchronous. found: (operation, line) -> times."""

    def __init__(self):
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).rpartition(".")[0]  # without its overload
        result = func(*args, **(kwargs or {}))
        if name in _READS or (name in _COPIES and _comes_to_host(name, args, kwargs or {}, result)):
            self.found[name.removeprefix("aten."), calling_line()] += 1
        return result


def _comes_to_host(name: str, args: tuple, kwargs: dict, result: torch.Tensor) -> bool:
    """Return whether a copy comes from a device to the host, which waits for it."""
    source = args[1] if name == "aten.copy_" else args[0]
    waits = not (kwargs.get("non_blocking") or (name == "aten.copy_" and len(args) > 2 and args[2]))
    return waits and source.device.type != "cpu" and result.device.type == "cpu"
