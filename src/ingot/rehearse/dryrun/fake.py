"""A fast mode of fake tensors for whole programs: shapes, dtypes and storages without memory or arithmetic.

PyTorch's FakeTensorMode takes about 80 microseconds per operation, most of it to derive a result that it has derived
before. A training step repeats the same few hundred operations tens of thousands of times, so results are cached by the
shapes, strides and dtypes of the inputs.

Two kinds of tensors stay real: tensors made outside the mode (the ranks of a mesh), and modules on the meta device
until they get memory, so that a program builds its model here as it does on a cluster.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ingot.trainer.torch_private import (
    FakeTensor,
    UncompiledFakeMode,
    functional_collectives,
    new_fake_tensor,
    storage_key,
    tree_leaves,
    without_dispatch,
)

_CPU = torch.device("cpu")
_META = torch.device("meta")
_Shape = tuple[torch.Size, tuple[int, ...], int, torch.dtype]  # sizes, strides, storage offset, dtype
# Operation and its inputs -> (source of the results' memory, results, True if there are several), as `_describe`
# returns it; None: not cached. A result is the shape of a tensor, or a number or None that is returned as it is.
_Described = tuple[Any, list[_Shape | int | float | None], bool]
Known = dict[Any, _Described | None]

_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_UNSEEN: Any = object()
_WAIT = functional_collectives().wait_tensor.default
# Namespaces whose operations without a result only write values, which fake tensors do not have.
_WRITERS = ("aten", "fsdp")


class _NotRemembered(Exception):
    pass


class FakeProgram(UncompiledFakeMode):
    """A mode of fake tensors with a cache. Enter this mode before other modes (such as a Tracker), so that those see
    each operation first.

    known: the cache; several programs may share one cache.
    """

    def __init__(self, known: Known | None = None):
        super().__init__(allow_non_fake_inputs=True)
        self._known: Known = {} if known is None else known
        self._attributes = dict(FakeTensor(self, torch.empty(0, device=_META), _CPU).__dict__)

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
        kwargs = kwargs or {}
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as the real operation does; PyTorch's fake version returns another tensor
        if not types and _stays_real(args, kwargs):
            return func(*args, **kwargs)
        try:
            key = _key_of_call(func, args, kwargs)
            known = self._known.get(key, _UNSEEN)
        except (_NotRemembered, TypeError):  # TypeError: an argument that cannot be hashed
            known = None
        if known is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if known is _UNSEEN:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            # What writes to `out` returns it, which is none of `args`: a cached result would be another tensor.
            self._known[key] = None if "out" in kwargs else _describe(func, args, result)
            return result
        return self._again(known, args)

    def call(self, func, args: Any, kwargs) -> Any:
        """Return func(*args, **kwargs), for a mode that was entered inside this mode. A cached result skips the
        dispatchers.
        """
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]
        if (namespace := _namespace(func)) == "profiler":  # it neither takes nor returns tensors
            with without_dispatch():
                return func(*args, **kwargs)
        if namespace == "c10d":  # never cached: process groups are equal only to themselves
            return func(*args, **kwargs)
        try:
            known = self._known.get(_key_of_call(func, args, kwargs))
        except (_NotRemembered, TypeError):
            known = None
        if known is None:
            return func(*args, **kwargs)
        with without_dispatch():
            return self._again(known, args)

    def _again(self, known: _Described, args: Any) -> Any:
        source, described, several = known
        if source == "itself":
            return args[0]
        viewed = None if source == "new" else args[source]
        results = [self._make(viewed, *found) if type(found) is tuple else found for found in described]
        return results if several else results[0]

    def _make(self, viewed: Tensor | None, size, stride, offset: int, dtype: torch.dtype) -> FakeTensor:
        if viewed is None:
            meta = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        else:
            meta = torch.empty(0, dtype=dtype, device=_META)
            meta.set_(viewed.untyped_storage(), offset, size, stride)
        return new_fake_tensor(meta, self._attributes)


def _stays_real(args, kwargs) -> bool:
    """Return whether an operation without fake arguments returns real tensors.

    Factory functions make fake tensors, except on the meta device. A meta tensor that is moved to another device
    becomes fake. Every other operation on real tensors returns real tensors.
    """
    device = kwargs.get("device")
    to_meta = device is not None and torch.device(device).type == "meta"
    real = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not real:
        return to_meta
    materialised = device is not None and not to_meta and all(tensor.is_meta for tensor in real)
    return not materialised


def _key_of_call(func, args, kwargs) -> Any:
    return func, _key(args), _key(tuple(kwargs.items())) if kwargs else ()


def _key(value) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.fake_device != _CPU:
            raise _NotRemembered
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind is tuple or kind is list or kind is torch.Size:
        # Written out for numbers and the like, of which most arguments consist: a trace makes a million keys.
        # NaN, which is not equal to itself, is a key as None.
        return tuple(
            [(of, item if item == item else None) if (of := type(item)) in _PLAIN else _key(item) for item in value]
        )
    if isinstance(value, (Tensor, torch.ScriptObject)):  # a script object is equal only to itself
        raise _NotRemembered
    return kind, value


@cache
def _namespace(func) -> str:
    return func.namespace


def _describe(func, args, result) -> _Described | None:
    """Return the entry of `Known` from which the result of an operation can be made again; None if that is impossible.

    The entry is (source, results, True if there are several). source: "new" (new tensors), the index of the argument
    whose storage the results share, or "itself" (the result is the first argument).
    """
    if torch.Tag.inplace_view in func.tags:
        return None
    if args and result is args[0] and isinstance(result, FakeTensor):
        return "itself", [], False
    if result is None and func.namespace in _WRITERS:
        return "new", [None], False
    several = isinstance(result, (tuple, list))
    returned = list(result) if several else [result]
    results = [value for value in returned if isinstance(value, Tensor)]
    others = [value for value in returned if not isinstance(value, Tensor)]
    if not all(value is None or type(value) in (int, float) for value in others):
        return None
    if not results or not all(isinstance(tensor, FakeTensor) and tensor.fake_device == _CPU for tensor in results):
        return None
    owners = {
        storage_key(arg.untyped_storage()): place for place, arg in enumerate(args) if isinstance(arg, FakeTensor)
    }
    sources = {owners.get(storage_key(tensor.untyped_storage()), "new") for tensor in results}
    inside = {storage_key(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)}
    if len(sources) > 1 or (sources == {"new"} and not all(_is_fresh(tensor, inside) for tensor in results)):
        return None
    described: list[Any] = [
        (value.shape, value.stride(), value.storage_offset(), value.dtype) if isinstance(value, Tensor) else value
        for value in returned
    ]
    return sources.pop(), described, several


def _is_fresh(tensor: Tensor, others: set[int]) -> bool:
    """Check that `tensor` fills its whole storage, and that this storage is not among `others` (keys of storages)."""
    storage = tensor.untyped_storage()
    whole = tensor.storage_offset() == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
    return whole and storage_key(storage) not in others
