"""Backward in two halves for zero-bubble pipelines (Qi et al. 2023, section 2): gradients of inputs first, which the
rank before waits for; those of weights later, when there is time.

A matrix product inside an open `WeightGradients` puts its weight's gradient aside:

    left = WeightGradients()
    with left:                      # F
        y = stage(x)
    with left:                      # I: x.grad is ready. Open, because recomputed blocks build their graph once more
        y.backward(gradient)
    left.compute()                  # W: the weights' gradients, through autograd and all its hooks

Everything that is not such a product (norms, the embedding, experts, the loss with the head) has its whole backward in
I.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class WeightGradients:
    """What one backward left for later: (input, gradient of the output, weight) of every product, last layer first.

    Inputs and gradients stay alive until `compute`.
    """

    def __init__(self):
        self._left: list[tuple[Tensor, Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._left)

    def __enter__(self) -> None:
        global _open
        assert _open is None, "one micro-batch of one stage at a time"
        _open = self

    def __exit__(self, *_) -> None:
        global _open
        _open = None

    def compute(self) -> None:
        """Accumulate the gradients into the weights, one after the other, and let go of what they were made from."""
        left, self._left = self._left[::-1], []
        while left:
            x, gradient, weight = left.pop()
            product = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            # Not `weight.grad +=`: the weight may be a part of a leaf, and hooks have to see its gradient.
            torch.autograd.backward([weight], [product])


# One for the process, not one per thread: on GPUs, autograd recomputes blocks in a thread of its own.
_open: WeightGradients | None = None


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: tuple[Tensor], left: WeightGradients) -> Tensor:
        # The weight comes in a tuple, out of autograd's sight. An input without gradient would make autograd run its
        # accumulation hooks with nothing in I, once more than there are gradients.
        ctx.save_for_backward(x)
        ctx.weight, ctx.left = weight[0], left
        return F.linear(x, weight[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (gradient,) = grads
        (x,) = ctx.saved_tensors
        ctx.left._left.append((x, gradient, ctx.weight))
        return gradient @ ctx.weight, None, None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in] @ weight [out, in].T. It is F.linear unless a `WeightGradients` is open, which then takes the weight's
    gradient in the backward. Input that needs no gradient has no half to do first: F.linear as well."""
    if _open is None or not (weight.requires_grad and x.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight)
    return _DeferringLinear.apply(x, (weight,), _open)  # type: ignore[return-value]


def split_linears(module: nn.Module) -> None:
    """Let every nn.Linear without bias in `module` compute by `linear`. Names, parameters and hooks stay. To be called
    before blocks are recomputed; a compiled block cannot defer."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and part.bias is None:
            part.forward = partial(_forward, part)


def _forward(part: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, part.weight)
