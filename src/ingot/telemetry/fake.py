"""Fake tensors for a whole program: shapes, dtypes and storages without memory or arithmetic, at the speed of a trace.

PyTorch's FakeTensorMode takes about 80 microseconds for an operation, most of it to find out what it found out before.
A trace of a training step repeats the same few hundred operations ten thousands of times, so their results are
remembered by the shapes, strides and dtypes of what goes in.

What stays real: tensors that were made outside (the ranks of a mesh), and modules on the meta device until they are
given memory, so that a program builds its model here as it does on a cluster.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

_CPU = torch.device("cpu")
_META = torch.device("meta")
_Shape = tuple[torch.Size, tuple[int, ...], int, torch.dtype]  # sizes, strides, storage offset, dtype


_UNSEEN: Any = object()


class _NotRemembered(Exception):
    pass


class FakeProgram(FakeTensorMode):
    """Enter it outermost: what is entered inside sees the operations as the program issues them."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        # operation and its inputs -> what it makes: (how, shapes of the results, whether there are several)
        self._known: dict[Any, tuple[Any, list[_Shape], bool] | None] = {}

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
        kwargs = kwargs or {}
        if not types and _stays_real(args, kwargs):
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
            known = self._known.get(key, _UNSEEN)
        except (_NotRemembered, TypeError):  # TypeError: an argument that cannot be hashed
            known = None
        if known is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if known is _UNSEEN:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self._known[key] = _describe(func, args, result)  # pyright: ignore[reportPossiblyUnboundVariable]
            return result
        source, shapes, several = known
        if source == "itself":
            return args[0]
        results = [self._make(None if source == "new" else args[source], *shape) for shape in shapes]
        return results if several else results[0]

    def _make(self, viewed: Tensor | None, size, stride, offset: int, dtype: torch.dtype) -> FakeTensor:
        if viewed is None:
            return FakeTensor(self, torch.empty_strided(size, stride, dtype=dtype, device=_META), _CPU)
        view = torch.empty(0, dtype=dtype, device=_META)
        view.set_(viewed.untyped_storage(), offset, size, stride)
        return FakeTensor(self, view, _CPU)


def _stays_real(args, kwargs) -> bool:
    """No fake tensor is among the arguments. Factories make fakes, unless for the meta device; a meta tensor gets a
    fake when it is asked for on another device; every other operation on real tensors stays real."""
    device = kwargs.get("device")
    to_meta = device is not None and torch.device(device).type == "meta"
    real = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not real:
        return to_meta
    materialised = device is not None and not to_meta and all(tensor.is_meta for tensor in real)
    return not materialised


def _key(value) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.fake_device != _CPU:
            raise _NotRemembered
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, Tensor):
        raise _NotRemembered
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    return type(value), value


def _describe(func, args, result) -> tuple[Any, list[_Shape], bool] | None:
    """How to make the result again; None where it is more than new tensors, views of one argument, or the first one."""
    if torch.Tag.inplace_view in func.tags or func.namespace == "profiler":
        return None
    if args and result is args[0] and isinstance(result, FakeTensor):
        return "itself", [], False
    several = isinstance(result, (tuple, list))
    results = list(result) if several else [result]
    if not results or not all(isinstance(tensor, FakeTensor) and tensor.fake_device == _CPU for tensor in results):
        return None
    owners = {arg.untyped_storage()._cdata: place for place, arg in enumerate(args) if isinstance(arg, FakeTensor)}
    sources = {owners.get(tensor.untyped_storage()._cdata, "new") for tensor in results}
    inside = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)}
    if len(sources) > 1 or (sources == {"new"} and not all(_is_fresh(tensor, inside) for tensor in results)):
        return None
    shapes = [(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype) for tensor in results]
    return sources.pop(), shapes, several


def _is_fresh(tensor: Tensor, others: set[int]) -> bool:
    """It alone fills its storage, which is none of the others."""
    storage = tensor.untyped_storage()
    whole = tensor.storage_offset() == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
    return whole and storage._cdata not in others
