"""Find the first operation whose result is not finite although its inputs are, in a forward and a backward.

The mode follows values that are not finite from the operation that made them, by the memory that they are in: a mask
with -inf, or a quotient that a later operation discards, never reaches the loss or a gradient and is not blamed.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from ingot.rehearse.replay.found import NotFiniteOrigin, TensorRange
from ingot.trainer.torch_private import (
    TraceMode,
    changes_its_inputs,
    next_sequence_number,
    running_node,
    storage_key,
    tree_leaves,
    without_dispatch,
)

# Operations whose result is memory as it was before, and operations that do not read their first argument.
_UNSET = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
_OVERWRITES = {"aten.copy_", "aten.fill_", "aten.zero_"}


def range_of(tensor: Tensor, name: str = "", *, rows: bool = True) -> TensorRange:
    """Return the range of a floating-point tensor. rows: count rows of zeros. Waits for the device."""
    values = tensor.detach()
    lowest, highest = _extremes(values)
    nan = infinite = 0
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
        lowest, highest = _extremes(values[values.isfinite()])
    some = nan + infinite < values.numel()
    return TensorRange(
        name=name,
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        lowest=lowest if some else None,
        highest=highest if some else None,
        nan=nan,
        infinite=infinite,
        zero_rows=int((values == 0).all(-1).sum()) if rows and some and values.dim() > 1 else 0,
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the device."""
    return all(map(math.isfinite, _extremes(tensor.detach())))


def _extremes(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest element, both NaN if there is one; zeros of an empty tensor. This takes a
    fifth of the time of `isfinite`."""
    if not values.numel():
        return 0.0, 0.0
    lowest, highest = values.aminmax()
    return float(lowest), float(highest)


class FiniteWatch(TraceMode):
    """A mode over the forwards and backwards of one step of `model`, micro-batch after micro-batch.

    origins: every operation that made values that are not finite, in order, and every such tensor from outside. Whether
    they matter, `origin_of` knows: it is asked for the loss and the gradients.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.origins: list[NotFiniteOrigin] = []
        self._model = model
        self._names = {storage_key(p.untyped_storage()): name for name, p in model.named_parameters()}
        self._parameters = {tuple(p.shape) for p in model.parameters()}
        self._classes = {name: type(module).__name__ for name, module in model.named_modules()}
        self._shape = (0, 0)  # sequences and tokens of the micro-batch
        self._micro_batch = -1
        self._stack: list[str] = []  # the modules whose forward runs
        self._begun: list[int] = []  # the sequence number at the begin of each; -1 in a backward
        self._nodes: list[tuple[int, int, str]] = []  # first and last + 1 sequence number of the nodes of a module
        self._inputs: dict[str, TensorRange] = {}  # the first input of each module, in this micro-batch
        # By the key of a storage. Keys are used again when a storage is freed, so every new result sets its own anew.
        self._dirty: dict[int, int] = {}  # the number of the origin of its values that are not finite
        self._meant: set[int] = set()  # infinite on purpose, as a mask is
        self._unset: set[int] = set()  # not written yet

    def origin_of(self, tensor: Tensor) -> NotFiniteOrigin | None:
        """Return the origin of the values of `tensor` that are not finite; None if it has none."""
        if is_finite(tensor):
            return None
        number = self._dirty.get(storage_key(tensor.untyped_storage()))
        return None if number is None else self.origins[number]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the operations of the block, with their modules."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: self._enter(name, args)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- modules --

    def _enter(self, name: str, args: tuple) -> None:
        again = running_node() is not None  # recomputed in a backward
        if not name and not again:
            self._micro_batch += 1
            self._shape = (args[0].shape[0], args[0].shape[1])
            self._inputs.clear()
        self._stack.append(name)
        self._begun.append(-1 if again else next_sequence_number())
        first = next((one for one in args if isinstance(one, Tensor) and one.is_floating_point()), None)
        if first is not None:
            with torch.no_grad(), without_dispatch():
                self._inputs[name] = range_of(first)

    def _leave(self) -> None:
        name, begun = self._stack.pop(), self._begun.pop()
        if begun >= 0:
            self._nodes.append((begun, next_sequence_number(), name))

    def _module(self, node: tuple[str, int] | None) -> str:
        """Return the innermost module that runs, or whose forward made `node`."""
        if self._stack or node is None:
            return self._stack[-1] if self._stack else ""
        around = [(end - begin, name) for begin, end, name in self._nodes if begin <= node[1] < end]
        return min(around)[1] if around else ""

    # -- operations --

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        name = str(func).rpartition(".")[0] or str(func)  # without its overload
        before = {}
        if changes_its_inputs(func):
            read = inputs[1:] if name in _OVERWRITES else inputs
            before = {id(one): range_of(one, rows=False) for one in read if one.is_floating_point()}
        result = func(*args, **kwargs)
        own = {storage_key(one.untyped_storage()) for one in inputs}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.is_floating_point():
                key = storage_key(made.untyped_storage())
                if key not in own:
                    self._forget(key)
                elif not changes_its_inputs(func):
                    continue  # a view
                if name in _UNSET:
                    self._unset.add(key)
                elif not is_finite(made):
                    read = inputs[1:] if name in _OVERWRITES else inputs
                    scalars = [one for one in tree_leaves((args, kwargs)) if isinstance(one, float)]
                    self._blame(name, read, scalars, before, made, key)
                elif made.nbytes == made.untyped_storage().nbytes():
                    self._forget(key)
        return result

    def _forget(self, key: int) -> None:
        self._dirty.pop(key, None)
        self._meant.discard(key)
        self._unset.discard(key)

    def _blame(
        self,
        name: str,
        read: list[Tensor],
        scalars: list[float],
        before: dict[int, TensorRange],
        made: Tensor,
        key: int,
    ) -> None:
        """Find the origin of a result that is not finite: an earlier one, or this operation."""
        meant, unset = any(map(math.isinf, scalars)), False
        parents: list[int] = []
        outside: list[int] = []
        for one in read:
            known = before.get(id(one))
            if not one.is_floating_point() or (known.nan + known.infinite == 0 if known else is_finite(one)):
                continue
            own = storage_key(one.untyped_storage())
            if own in self._dirty:
                parents.append(self._dirty[own])
            elif own in self._meant:
                meant = True
            elif own in self._unset:
                unset = True
            else:
                outside.append(own)
        if parents:
            self._dirty[key] = min(*parents, self._dirty.get(key, parents[0]))
        elif meant and not unset and not outside and not bool(made.isnan().any()):
            self._meant.add(key)
        elif unset and not outside and key in self._unset:
            pass  # a part of a result is written; the rest is still memory as it was before
        else:
            kind = "tensor" if outside else "memory" if unset else "operation"
            tensor = next((self._names[one] for one in outside if one in self._names), "")
            ranges = [before.get(id(one)) or range_of(one) for one in read if one.is_floating_point()]
            self._add(kind, name, tensor, ranges, made)
            for one in (*outside, key):
                self._dirty.setdefault(one, len(self.origins) - 1)

    def _add(
        self,
        kind: Literal["operation", "tensor", "memory"],
        name: str,
        tensor: str,
        ranges: list[TensorRange],
        made: Tensor,
    ) -> None:
        node = running_node()
        module = self._module(node)
        self.origins.append(
            NotFiniteOrigin(
                kind=kind,
                phase="forward" if node is None else "backward",
                module=module,
                module_class=self._classes.get(module, "") if module else "",
                operation=name,
                node=node[0] if node else "",
                micro_batch=max(self._micro_batch, 0),
                tensor=tensor,
                inputs=tuple(ranges),
                output=range_of(made),
                module_input=self._inputs.get(module),
                sequences=self._sequences(made),
            )
        )

    def _sequences(self, made: Tensor) -> tuple[int, ...]:
        """Return the sequences of the micro-batch that have such values, if the result has one part for each."""
        sequences, tokens = self._shape
        shape = tuple(made.shape)
        if not shape or shape[0] not in (sequences, sequences * tokens) or shape in self._parameters:
            return ()
        bad = ~made.detach().isfinite()
        return tuple(bad.reshape(sequences, -1).any(1).nonzero().flatten().tolist())
