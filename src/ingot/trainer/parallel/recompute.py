"""Recompute of activations in the backward (Chen et al. 2016): memory is bought with a second forward of a block.

full       a block keeps its input alone. Its forward runs again in the backward, as far as the last tensor that the
           backward needs: the last matrix product of the block, and a collective behind it, are not run twice.
selective  a block also keeps what is dear to run again: the results of matrix products, of attention, of the
           collectives that leave a region of tensor parallelism, and of all-to-alls. Norms, rotations and activations,
           which are cheap and fill most of the memory, run again (the choice by cost is Korthikanti et al. 2022,
           section 5; theirs is the other way round, attention before it was flash). Two things are as wide as the model
           on every rank of tensor parallelism and so are not kept: gathered tokens, which are gathered again, and the
           product of a matrix that is cut by rows, which runs again where the backward gets that far, though only its
           sum over ranks is used. Of a ring the result is kept (`kept_whole`), not the results of its steps, which are
           as large each; it does not go round again.

Compiled blocks follow the same policy, but leave out what leads to a kept result only. Experts are chosen again from
the same numbers, so their rows have the same sizes, and all ranks exchange again what is not kept, in the same order.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
# What "selective" keeps. `linear` and `matmul` have become mm, addmm and bmm where these are seen.
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _collectives.reduce_scatter_tensor.default,
    _collectives.all_reduce.default,
    _collectives.all_to_all_single.default,
}


def recompute(blocks: nn.ModuleDict, how: Literal["full", "selective"], every: int, *, rings: bool = False) -> None:
    """From now on the blocks whose layer number divides by `every` are recomputed. Gradients keep their bits.

    blocks: keyed by layer number, so a pipeline recomputes the same layers as one process does. Only `forward` of a
    block is replaced: its names and parameters stay, hooks run once and stay outside. To be called before blocks are
    compiled and sharded. A block must not draw random numbers, whose state is not kept. rings: attention goes through
    some; a selectively recomputed block is not for the compiler then.
    """
    for layer, block in blocks.items():
        if int(layer) % every == 0:
            _recompute(block, how, rings)


def _recompute(block: nn.Module, how: Literal["full", "selective"], rings: bool) -> None:
    once: Callable[..., Tensor] = block.forward
    selective = {}
    if how == "selective":
        # A matrix with fewer columns than its layer has inputs is cut by rows (parallel/tensor.py).
        linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
        cut = [part for part in linears if part.weight.shape[1] < part.in_features]
        policy = partial(_keep, cut)
        contexts = _with_wholes if rings else create_selective_checkpoint_contexts
        selective = {"context_fn": lambda: contexts(policy)}

    # A function of our own, not functools.partial: a compiled block is compiled from the first frame that is not
    # PyTorch's, and without one it would silently run uncompiled.
    def forward(*args, **kwargs) -> Tensor:
        return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **selective, **kwargs)  # type: ignore

    block.forward = forward


def _keep(cut_by_rows: list[nn.Linear], context, op, *args, **kwargs) -> CheckpointPolicy:
    """PyTorch may ask again in the recompute: the answer must be the same, though weights may have moved since."""
    if _open is not None and _open.making:
        return CheckpointPolicy.PREFER_RECOMPUTE
    if op not in KEPT or (op is _aten.mm.default and any(_lies_in(args[1], part.weight) for part in cut_by_rows)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _lies_in(matrix: Tensor, weight: Tensor) -> bool:
    """Whether `matrix` is `weight`, or its transpose: the same memory. Tensors of a trace have storages as well."""
    same = matrix.untyped_storage()._cdata == weight.untyped_storage()._cdata
    return same and matrix.storage_offset() == weight.storage_offset()


@dataclass
class _Wholes:
    """Results of one forward of a block that its recompute takes, in order. making: one of them, now."""

    made: list[tuple[Tensor, ...]] = field(default_factory=list)
    again: bool = False
    making: bool = False


# One for the process, not one per thread: on GPUs, autograd recomputes blocks in a thread of its own.
_open: _Wholes | None = None


def kept_whole(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `make` returns, for an autograd.Function's forward. Where blocks are recomputed selectively it is kept, and
    nothing that it is made from; it is not made again."""
    if _open is None:
        return make()
    if _open.again:
        return _open.made.pop(0)
    _open.making = True
    try:
        made = make()
    finally:
        _open.making = False
    _open.made.append(tuple(x.detach() for x in made))  # else the graph would be kept that gets to own what is returned
    return made


def _with_wholes(policy: Callable[..., CheckpointPolicy]) -> tuple[AbstractContextManager, AbstractContextManager]:
    first, again = create_selective_checkpoint_contexts(policy)
    wholes = _Wholes()
    return _opened(wholes, first, again=False), _opened(wholes, again, again=True)


@contextmanager
def _opened(wholes: _Wholes, operations: AbstractContextManager, *, again: bool) -> Iterator[None]:
    global _open
    assert _open is None, "one block at a time"
    _open, wholes.again = wholes, again
    try:
        with operations:
            yield
    finally:
        _open = None
