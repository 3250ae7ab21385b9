"""Recompute of activations in the backward (Chen et al. 2016): less memory for a second forward of a block.

full       A block keeps only its input. Its forward runs again in the backward, up to the last tensor that the backward
           needs: the last matrix product of the block, and a collective after it, do not run again.
selective  A block also keeps the results of expensive operations: matrix products, attention, the collectives that
           leave a region of tensor parallelism, and all-to-alls. Norms, rotations and activations run again; they are
           cheap and fill most of the memory. (Korthikanti et al. 2022, section 5, chose by cost in the same way, but
           recomputed attention, which was not flash attention then.) Two kinds of results are as wide as the model on
           every tensor-parallel rank and are not kept: gathered tokens, and products of matrices split by rows, which
           run again if the backward gets that far, though only their sum over ranks is used. Of a ring, only the final
           result is kept (KeptResults), not those of its steps, which are as large; the ring does not run again.

Compiled blocks follow the same policy, but do not repeat operations that lead to kept results only. The recomputed
router chooses the same experts from the same numbers, so row counts are the same: both forms keep them on the host,
which waits for them in the forward alone. All ranks repeat the exchanges that are not kept in the same order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ingot.trainer.torch_private import (
    attention_kernels,
    functional_collectives,
    grouped_product_kernel,
    storage_key,
)

_aten, _kernels, _collectives = torch.ops.aten, attention_kernels(), functional_collectives()
# The operators whose results "selective" keeps. Below autograd, `linear` and `matmul` are mm, addmm and bmm.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    grouped_product_kernel().default,
    _kernels.flash.default,
    _kernels.efficient.default,
    _kernels.cudnn.default,
    _kernels.flash_on_cpu.default,
    _kernels.packed.default,
    _collectives.reduce_scatter_tensor.default,
    _collectives.all_reduce.default,
    _collectives.all_to_all_single.default,
}


_Value = TypeVar("_Value")


@dataclass
class _BlockResults:
    """The kept results of one forward of a block, in order.

    selective: results are kept, too, not only values. again: the block is being recomputed and takes what was kept.
    taken: how many of them this recompute took. making: something that is kept is being computed.
    """

    selective: bool
    made: list[Any] = field(default_factory=list)
    taken: int = 0
    again: bool = False
    making: bool = False


class KeptResults:
    """Results that a selectively recomputed block keeps as a whole, without the results of their operations; and values
    that every recomputed block keeps, because they are worth a wait.

    A model has one instance, shared by its blocks and by the functions that compute such results (a ring, the dispatch
    of experts). All threads share the block in progress: on GPUs, autograd recomputes blocks in a thread of its own.
    """

    def __init__(self):
        self._block: _BlockResults | None = None

    def put_aside(self) -> Callable[[], None]:
        """Leave the block in progress for a while, and return the function that enters it again."""
        held, self._block = self._block, None

        def restore() -> None:
            self._block = held

        return restore

    @property
    def making(self) -> bool:
        """True while a kept result is being computed; then the results of single operations are not kept."""
        return self._block is not None and self._block.making

    def keep(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return make() and keep the result; in a recompute, return the kept result. For use in autograd.Functions."""
        if self._block is None or not self._block.selective:
            return make()
        # Detached, so that no autograd graph is kept.
        return self._kept(self._block, make, lambda made: tuple(x.detach() for x in made))

    def once(self, make: Callable[[], _Value]) -> _Value:
        """Return make() and keep the value; in a recompute, return the kept value.

        For numbers of the host. `make` must not call an operator of KEPT: PyTorch numbers the calls of each operator,
        also of those whose results are not kept, so later results would be those of other calls.
        """
        return make() if self._block is None else self._kept(self._block, make, lambda made: made)

    def _kept(self, block: _BlockResults, make: Callable[[], _Value], as_kept: Callable[[_Value], Any]) -> _Value:
        if block.again:
            value, place = block.made[block.taken], block.taken
            block.taken += 1
            if block.selective:  # free it: PyTorch refuses a second backward here
                block.made[place] = None
            return value
        block.making = True
        try:
            made = make()
        finally:
            block.making = False
        block.made.append(as_kept(made))
        return made

    def contexts(
        self, policy: Callable[..., CheckpointPolicy] | None
    ) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the context for a block's forward and the context for its recompute. policy: of selective recompute;
        None if the recompute is full."""
        first = again = nullcontext()
        if policy is not None:
            first, again = create_selective_checkpoint_contexts(policy)
        results = _BlockResults(selective=policy is not None)
        return _Opened(self, results, first, again=False), _Opened(self, results, again, again=True)

    def opened(self, results: "_BlockResults | None") -> None:
        """Begin a forward or a recompute with `results`, or end it with None."""
        assert results is None or self._block is None, "one block at a time"
        self._block = results


@dataclass(frozen=True)
class _Opened(AbstractContextManager):
    """A forward of a block, or a recompute; the latter may be entered again, for a second backward."""

    kept: KeptResults
    results: _BlockResults
    operations: AbstractContextManager
    again: bool

    def __enter__(self) -> None:
        self.kept.opened(self.results)
        self.results.again, self.results.taken = self.again, 0
        self.operations.__enter__()

    def __exit__(self, *error) -> None:
        self.kept.opened(None)
        self.operations.__exit__(*error)


def recompute(
    blocks: nn.ModuleDict,
    how: Literal["full", "selective"],
    every: int,
    kept: KeptResults | None = None,
    *,
    ring: bool = False,
) -> None:
    """Recompute the blocks whose layer number is divisible by `every`. Gradients keep their bits.

    blocks: keyed by layer number, so a pipeline recomputes the same layers as one process does. kept: used by blocks
    with experts, and with `ring` (ring attention) by all; such a block is not compiled as a whole. Replaces only
    `forward` of a block: names and parameters stay, and hooks run once, outside the recomputed part. Call before blocks
    are compiled and sharded. A block must not draw random numbers, because their state is not restored.
    """
    for layer, block in blocks.items():
        if int(layer) % every == 0:
            _recompute(block, how, kept if ring or getattr(block, "moe", None) is not None else None)


def _recompute(block: nn.Module, how: Literal["full", "selective"], kept: KeptResults | None) -> None:
    once: Callable[..., Tensor] = block.forward
    contexts_of: dict[str, Any] = {} if kept is None else {"context_fn": lambda: kept.contexts(None)}
    if how == "selective":
        # A matrix with fewer columns than its layer has inputs is split by rows (parallel/tensor.py).
        linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
        split = [part for part in linears if part.weight.shape[1] < part.in_features]
        policy = partial(_keep, split, kept)
        contexts = create_selective_checkpoint_contexts if kept is None else kept.contexts
        contexts_of = {"context_fn": lambda: contexts(policy)}

    # A Python function, not functools.partial: the compiler starts at the first frame outside PyTorch's code, and
    # without such a frame the block would silently run uncompiled.
    def forward(*args, **kwargs) -> Tensor:
        return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **contexts_of, **kwargs)

    block.forward = forward


def _keep(split_by_rows: list[nn.Linear], kept: KeptResults | None, context, op, *args, **kwargs) -> CheckpointPolicy:
    """Decide whether the result of `op` is kept.

    PyTorch may call this again in the recompute and must get the same answer, even if weights have moved since.
    """
    if kept is not None and kept.making:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if op not in KEPT or (op is _aten.mm.default and any(_is_view_of(args[1], part.weight) for part in split_by_rows)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _is_view_of(matrix: Tensor, weight: Tensor) -> bool:
    """Return whether `matrix` is `weight` or its transpose: a view of the same memory. Works for fake tensors, too."""
    same = storage_key(matrix.untyped_storage()) == storage_key(weight.untyped_storage())
    return same and matrix.storage_offset() == weight.storage_offset()
