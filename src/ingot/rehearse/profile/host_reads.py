"""The operations of a step for which the host waits for its device, because it needs what the device has computed.

On a CPU, where the host is the device, the same reads of values show where a GPU would make it wait.
"""

from collections import Counter
from typing import Any

import torch

from ingot.rehearse.profile.ranges import calling_line
from ingot.trainer.torch_private import TraceMode, tree_leaves

_aten = torch.ops.aten
# The result of these, or its shape, depends on values: an item, a truth value, the places that are not zero.
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = {"aten._to_copy", "aten.copy_"}
_MASKS = (torch.bool, torch.uint8)


class HostReads(TraceMode):
    """A mode that counts the operations for which the host waits. found: (operation, line) -> times. seen: the number
    of all operations.

    device: where the step computes. Values of tensors elsewhere are read without a wait.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.seen = 0
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.seen += 1
        waits = kwargs.get("output_size") is None and reads_values(func, args, self._device)
        result = func(*args, **kwargs)
        name = str(func).rpartition(".")[0]  # without its overload
        if waits or (name in _COPIES and _waits_for_copy(name, args, kwargs, result)):
            self.found[name.removeprefix("aten."), calling_line()] += 1
        return result


def reads_values(func: Any, args: tuple, device: torch.device) -> bool:
    """Return whether the host needs values of tensors on `device` to run `func`, or to know the shape of its result, if
    its caller does not."""
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        # By places, or by a mask, whose number of places is a value. One number for all of them needs no places.
        by_value = any(one is not None and one.dtype in _MASKS for one in args[1])
        by_value = by_value and (len(args) == 2 or args[2].numel() > 1)
    else:
        by_value = not _BY_VALUE.isdisjoint(func.tags)
    tensors = (one for one in tree_leaves(args) if isinstance(one, torch.Tensor))
    return by_value and any(one.device.type == device.type for one in tensors)


def _waits_for_copy(name: str, args: tuple, kwargs: dict, result: torch.Tensor) -> bool:
    """Return whether the host waits for a copy: one between host and device, unless it is asynchronous. One to the
    device, too, is complete only after the work that was begun before it."""
    source = args[1] if name == "aten.copy_" else args[0]
    waits = not (kwargs.get("non_blocking") or (name == "aten.copy_" and len(args) > 2 and args[2]))
    return waits and source.device.type != result.device.type
