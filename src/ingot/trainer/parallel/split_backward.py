"""Backward in two halves for zero-bubble pipelines (Qi et al. 2023, section 2): first the gradients of inputs, because
the previous rank waits for them; later the gradients of weights, when the rank would idle.

Inside an open `WeightGradients` a matrix product defers the gradient of its weight:

    split = SplitBackward()         # one per model
    split_linears(model, split)
    left = WeightGradients(split)   # one per stage and micro-batch
    with left:                      # F
        y = stage(x)
    with left:                      # I: computes x.grad. `left` is open because recomputed blocks rebuild their graph
        y.backward(gradient)
    left.compute()                  # W: the gradients of the weights, through autograd and all its hooks

All other operations (norms, the embedding, experts, the loss with the head) have their whole backward in I.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class SplitBackward:
    """The matrix products of one model that can defer the gradients of their weights.

    open: the WeightGradients that currently collects, or None. All threads share `open`: on GPUs, autograd recomputes
    blocks in a thread of its own.
    """

    def __init__(self):
        self.open: WeightGradients | None = None

    def put_aside(self) -> Callable[[], None]:
        """Close the open WeightGradients for a while, and return the function that opens it again."""
        held, self.open = self.open, None

        def restore() -> None:
            self.open = held

        return restore

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x [.., in] @ weight [out, in].T, and defer the weight's gradient to the open WeightGradients.

        Falls back to F.linear if none is open, or if x or weight needs no gradient: then there is nothing to split.
        """
        if self.open is None or not (weight.requires_grad and x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, weight)
        return _DeferringLinear.apply(x, (weight,), self.open)


class WeightGradients:
    """The deferred gradients of one backward: (input, gradient of the output, weight) of each product, last layer
    first.

    While used as a context, the products of `split` defer here. Inputs and gradients stay in memory until `compute`.
    """

    def __init__(self, split: SplitBackward):
        self._split = split
        self._left: list[tuple[Tensor, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._left)

    def __enter__(self) -> None:
        assert self._split.open is None, "one micro-batch of one stage at a time"
        self._split.open = self

    def __exit__(self, *_) -> None:
        self._split.open = None

    def defer(self, x: Tensor, gradient: Tensor, weight: Tensor) -> None:
        self._left.append((x, gradient, weight))

    def compute(self) -> None:
        """Accumulate the gradients of the weights one by one, and free the inputs of each."""
        left, self._left = self._left[::-1], []
        while left:
            x, gradient, weight = left.pop()
            product = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            # Not `weight.grad +=`: the weight may be a part of a leaf, and hooks must see its gradient.
            torch.autograd.backward([weight], [product])


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: tuple[Tensor], left: WeightGradients) -> Tensor:
        # A tuple hides the weight from autograd. If the weight were an input without gradient, autograd would run its
        # accumulation hooks in I too, once more than there are gradients.
        ctx.save_for_backward(x)
        ctx.weight, ctx.left = weight[0], left
        return F.linear(x, weight[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (gradient,) = grads
        (x,) = ctx.saved_tensors
        ctx.left.defer(x, gradient, ctx.weight)
        return gradient @ ctx.weight, None, None


def split_linears(module: nn.Module, split: SplitBackward) -> None:
    """Let every nn.Linear without bias in `module` compute with `split.linear`. Names, parameters and hooks stay.

    Call before `recompute`. A compiled block cannot defer. Layers whose product has collectives beside it
    (tensor_overlap.py) defer already.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.bias is None and "forward" not in vars(part):
            part.forward = partial(_forward, split, part)


def _forward(split: SplitBackward, part: nn.Linear, input: Tensor) -> Tensor:
    return split.linear(input, part.weight)
