"""The matrix products of sequence parallelism in chunks of tokens, so that collectives and products run at once.

Where `tensor.py` gathers all tokens and then multiplies, or multiplies and then reduce-scatters, here a rank's tokens
are divided into `chunks` parts, and a collective moves one part of every rank (Wang et al. 2023; the chunked form of
Transformer Engine's userbuffers):

    enter      start gather 0 | start gather 1, wait 0, products 0 | start gather 2, wait 1, products 1 | ...
      backward input gradient 0, start scatter 0 | input gradient 1, start scatter 1 | ... | weight gradients | wait
    leave      product 0, start scatter 0 | product 1, start scatter 1 | ... | wait
      backward start gather 0 | start gather 1, wait 0, input gradient 0 | ... | weight gradient

The bytes are those of the plain form, in `chunks` times as many calls. All matrices that multiply the tokens of a
region (q, k, v or gate, up) share one gather and one sum of input gradients. Results are new tensors in the order of
the plain form; the gathered tokens are kept for the weight gradients, as there, and each weight gradient is one
product.

Shape letters: B batch, T tokens of all ranks, t tokens of one rank, m tokens of a chunk, R ranks, D, F widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.trainer.mesh.collectives import begin_gather, begin_scatter_sum, finish
from ingot.trainer.parallel.split_backward import SplitBackward, WeightGradients

_TOKENS = 1  # the dim of [B, T, D] that sequence parallelism splits


@dataclass(frozen=True)
class OverlappedRegion:
    """The collectives around a region of tensor parallelism, each in `chunks` parts beside the products next to it.

    split: the model's SplitBackward, whose weight gradients come later; None without one.
    """

    group: dist.ProcessGroup
    chunks: int
    split: SplitBackward | None

    def enter(self, module: nn.Module, columns: list[nn.Linear]) -> None:
        """Let `module` get gathered tokens, and each of `columns` the product of its matrix with them.

        columns: linear layers of `module`, without bias and as wide as its input. One that multiplies another tensor
        still gets its product; the one made here is then of no use.
        """
        entry = _Entry(self, columns)
        module.register_forward_pre_hook(lambda _, args: (entry.gather(args[0]), *args[1:]))
        for linear in columns:
            linear.forward = partial(entry.product, linear)

    def leave(self, row: nn.Linear) -> None:
        """Let `row`, a linear layer without bias, return this rank's tokens of the sum over ranks."""
        row.forward = partial(self._scatter, row)

    def deferral(self, x: Tensor, weights: Sequence[Tensor]) -> "_Deferral | None":
        """Return where the gradients of `weights`, which multiply `x`, are left for later; None if they are not."""
        left = None if self.split is None else self.split.open
        return _Deferral(left, weights) if left is not None and x.requires_grad and torch.is_grad_enabled() else None

    def _scatter(self, row: nn.Linear, input: Tensor) -> Tensor:
        deferral = self.deferral(input, [row.weight])
        (weight,) = _seen([row.weight], deferral)
        kept = None
        if not torch.compiler.is_compiling():  # the compiler chooses alone what to recompute
            kept = _KeptInputs()
            input = _Keep.apply(input, kept, weight.detach())
        return _ScatteredProduct.apply(input, self.group, self.chunks, deferral, kept, weight)


class _Entry:
    """The products of one region that are computed while its tokens arrive, until the layers ask for them."""

    def __init__(self, region: OverlappedRegion, columns: list[nn.Linear]):
        self._region, self._columns = region, columns
        self._whole: Tensor | None = None
        self._products: dict[nn.Linear, Tensor] = {}

    def gather(self, x_BtD: Tensor) -> Tensor:
        region, weights = self._region, [linear.weight for linear in self._columns]
        deferral = region.deferral(x_BtD, weights)
        made = _GatheredProducts.apply(x_BtD, region.group, region.chunks, deferral, *_seen(weights, deferral))
        self._whole, self._products = made[0], dict(zip(self._columns, made[1:], strict=True))
        return made[0]

    def product(self, linear: nn.Linear, input: Tensor) -> Tensor:
        if input is not self._whole or linear not in self._products:
            split = self._region.split
            return F.linear(input, linear.weight) if split is None else split.linear(input, linear.weight)
        made = self._products.pop(linear)
        if not self._products:
            self._whole = None  # or it would live until the next micro-batch
        return made


@dataclass(frozen=True)
class _Deferral:
    """The collector of weight gradients that come later, and the parameters they belong to."""

    left: WeightGradients
    weights: Sequence[Tensor]


def _seen(weights: Sequence[Tensor], deferral: _Deferral | None) -> list[Tensor]:
    """Return the matrices for autograd. If their gradients come later, it must not see parameters: it would run their
    accumulation hooks in this backward, too."""
    return list(weights) if deferral is None else [weight.detach() for weight in weights]


class _GatheredProducts(torch.autograd.Function):
    """x [B, t, D], matrices [F, D] -> the gathered tokens [B, T, D] and their products [B, T, F] with each matrix."""

    @staticmethod
    def forward(ctx, x, group, chunks, deferral, *weights):
        ctx.set_materialize_grads(False)  # the gathered tokens may have no other use
        ranks, bounds = group.size(), _bounds(x.shape[_TOKENS], chunks)
        whole = _new_by_rank(x, ranks, x.shape[_TOKENS], x.shape[-1])
        products = [_new_by_rank(x, ranks, x.shape[_TOKENS], len(weight)) for weight in weights]
        for (first, end), part in _arriving(x, bounds, group):
            _tokens_of(whole, first, end).copy_(part)
            for product, weight in zip(products, weights, strict=True):
                _tokens_of(product, first, end).copy_(F.linear(part, weight))
        whole = whole.flatten(_TOKENS, _TOKENS + 1)
        ctx.save_for_backward(whole, *weights)
        ctx.group, ctx.bounds, ctx.deferral = group, bounds, deferral
        return whole, *(product.flatten(_TOKENS, _TOKENS + 1) for product in products)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_whole, *grads):
        whole, *weights = ctx.saved_tensors
        ranks = ctx.group.size()
        known = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        sums = []
        for first, end in ctx.bounds:
            total = None if grad_whole is None else _rows(grad_whole, ranks, first, end)
            for grad, weight in known:
                rows = _rows(grad, ranks, first, end)
                total = rows @ weight if total is None else torch.addmm(total, rows, weight)
            assert total is not None, "autograd calls this for a gradient"
            sums.append(begin_scatter_sum(total, ctx.group))
        found = [
            None if grad is None else _weight_gradient(grad, whole, ctx.deferral, i) for i, grad in enumerate(grads)
        ]
        own = [finish(part).unflatten(0, (len(whole), -1)) for part in sums]
        return torch.cat(own, _TOKENS), None, None, None, *found


@dataclass
class _KeptInputs:
    """The inputs of a product that autograd keeps before the product is computed."""

    context: Any = None


class _Keep(torch.autograd.Function):
    """Return x; keep x and the matrix for _ScatteredProduct.

    Autograd keeps the tensors of a function after its forward. A recomputed block ends with the last tensor that it
    keeps (recompute.py), so the product and its reduce-scatters would run again at the end of each block.
    """

    @staticmethod
    def forward(ctx, x, kept, weight):
        ctx.save_for_backward(x, weight)
        kept.context = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None, None


class _ScatteredProduct(torch.autograd.Function):
    """x [B, T, F], one matrix [D, F] -> this rank's tokens [B, t, D] of the product, summed over ranks.

    kept: the inputs, if `_Keep` has kept them.
    """

    @staticmethod
    def forward(ctx, x, group, chunks, deferral, kept, weight):
        ranks, batch = group.size(), len(x)
        bounds = _bounds(x.shape[_TOKENS] // ranks, chunks)
        if kept is None:
            ctx.save_for_backward(x, weight)
        ctx.group, ctx.bounds, ctx.deferral, ctx.kept = group, bounds, deferral, kept
        sums = [begin_scatter_sum(F.linear(_rows(x, ranks, *bound), weight), group) for bound in bounds]
        return torch.cat([finish(part).unflatten(0, (batch, -1)) for part in sums], _TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (grad,), (x, weight) = grads, (ctx if ctx.kept is None else ctx.kept.context).saved_tensors
        ranks, tokens = ctx.group.size(), grad.shape[_TOKENS]
        whole, own = (_new_by_rank(grad, ranks, tokens, width) for width in (len(weight), x.shape[-1]))
        for (first, end), part in _arriving(grad, ctx.bounds, ctx.group):
            _tokens_of(whole, first, end).copy_(part)
            _tokens_of(own, first, end).copy_(part @ weight)
        found = _weight_gradient(whole.flatten(_TOKENS, _TOKENS + 1), x, ctx.deferral, 0)
        return own.flatten(_TOKENS, _TOKENS + 1), None, None, None, None, found


def _bounds(tokens: int, chunks: int) -> list[tuple[int, int]]:
    """Return (first, end) of each chunk of a rank's tokens; their sizes differ by one at most."""
    chunks = min(chunks, tokens)
    return [(tokens * i // chunks, tokens * (i + 1) // chunks) for i in range(chunks)]


def _arriving(x: Tensor, bounds: list[tuple[int, int]], group: dist.ProcessGroup):
    """Yield each chunk's bounds and its tokens of all ranks [R, B, m, D]. The next chunk is on its way meanwhile."""
    own = [x[:, first:end] for first, end in bounds]
    coming = begin_gather(own[0], group)
    for i, bound in enumerate(bounds):
        arriving = coming
        if i + 1 < len(own):
            coming = begin_gather(own[i + 1], group)
        yield bound, finish(arriving).view(group.size(), *own[i].shape)


def _new_by_rank(like: Tensor, ranks: int, tokens: int, width: int) -> Tensor:
    return like.new_empty(len(like), ranks, tokens, width)


def _tokens_of(by_rank_BRtD: Tensor, first: int, end: int) -> Tensor:
    """Return a view [R, B, m, D] of one chunk."""
    return by_rank_BRtD[:, :, first:end].transpose(0, 1)


def _rows(x_BTD: Tensor, ranks: int, first: int, end: int) -> Tensor:
    """Return the tokens of one chunk, rank by rank: [R x B x m, D]."""
    return _tokens_of(x_BTD.unflatten(_TOKENS, (ranks, -1)), first, end).flatten(0, 2)


def _weight_gradient(grad_BTF: Tensor, x_BTD: Tensor, deferral: _Deferral | None, index: int) -> Tensor | None:
    if deferral is not None:
        return deferral.left.defer(x_BTD, grad_BTF, deferral.weights[index])
    return grad_BTF.flatten(0, 1).T @ x_BTD.flatten(0, 1)
