"""Recompute of activations in the backward (Chen et al. 2016): memory is bought with a second forward of a block.

full       a block keeps its input alone. Its forward runs again in the backward, as far as the last tensor that the
           backward needs: the last matrix product of the block, and a collective behind it, are not run twice.
selective  a block also keeps the results of what is dear to run again: matrix products, attention and collectives.
           Norms, rotations and activations, which are cheap and fill most of the memory, run again (the choice by
           cost is Korthikanti et al. 2022, section 5; theirs is the other way round, attention before it was flash).
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
# What "selective" keeps. `linear` and `matmul` have become mm, addmm and bmm where these are seen.
KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _collectives.all_gather_into_tensor.default,
    _collectives.reduce_scatter_tensor.default,
    _collectives.all_reduce.default,
]


def recompute(blocks: nn.ModuleDict, how: Literal["full", "selective"], every: int) -> None:
    """From now on the blocks whose layer number divides by `every` are recomputed. Gradients keep their bits.

    blocks: keyed by layer number, so a pipeline recomputes the same layers as one process does. Only `forward` of a
    block is replaced: its names and parameters stay, hooks run once and stay outside. To be called before blocks are
    compiled and sharded. A block must not draw random numbers, whose state is not kept.
    """
    for layer, block in blocks.items():
        if int(layer) % every == 0:
            _recompute(block, how)


def _recompute(block: nn.Module, how: Literal["full", "selective"]) -> None:
    once: Callable[..., Tensor] = block.forward
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)} if how == "selective" else {}

    # A function of our own, not functools.partial: a compiled block is compiled from the first frame that is not
    # PyTorch's, and without one it would silently run uncompiled.
    def forward(*args, **kwargs) -> Tensor:
        return checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, **selective, **kwargs)  # type: ignore

    block.forward = forward
