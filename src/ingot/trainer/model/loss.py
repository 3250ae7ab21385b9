"""From hidden states to the loss, or to logits, without ever holding all the logits in training.

The logits of a batch are its largest tensor: 8,192 tokens x 128,256 ids in float32 are 4.2 GB, held three times by the
plain form (logits, their float32 copy, their gradient). Here the tokens pass in chunks, and the gradient of each chunk
is computed while its logits are at hand, as in Liger Kernel's fused linear cross entropy (Hsu et al. 2024, sec. 3.2).
On a CPU the chunk stays in cache, which makes it faster than the plain form as well.

Shape letters: M tokens (batch and sequence flattened), D d_model, V vocab_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.theory.memory import chunk_tokens

SCALED_ELEMENTS = 1 << 24


def _log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last dim, in float32, or in float64 for float64 logits."""
    return F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def nats_and_slope(logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Per token -log p(target), and its gradient by the logits (softmax minus one-hot) in their dtype."""
    log_p_MV = _log_probabilities(logits_MV)
    nats = -log_p_MV.gather(-1, targets_M[:, None])
    slope = log_p_MV.exp_()
    slope.scatter_add_(-1, targets_M[:, None], -torch.ones_like(nats))
    return nats.squeeze(-1), slope.type_as(logits_MV)


class _SummedCrossEntropy(torch.autograd.Function):
    """Sum of nats over tokens. Both gradients are ready after the forward; the backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, chunk: int, piece) -> Tensor:
        # Partial sums in at least float32: bf16 would lose the small contributions of late chunks.
        accurate = torch.promote_types(weight_VD.dtype, torch.float32)
        total = torch.zeros((), dtype=accurate, device=hidden_MD.device)
        hidden_grad, weight_grad = torch.empty_like(hidden_MD), torch.zeros_like(weight_VD, dtype=accurate)
        for start in range(0, len(hidden_MD), chunk):
            part = slice(start, start + chunk)
            nats, slope = piece(hidden_MD[part] @ weight_VD.T, targets_M[part])
            total += nats.sum()
            hidden_grad[part] = slope @ weight_VD
            weight_grad += slope.T @ hidden_MD[part]
        ctx.save_for_backward(hidden_grad, weight_grad.type_as(weight_VD))
        return total

    @staticmethod
    def backward(ctx, *grads):
        hidden_grad, weight_grad = ctx.saved_tensors
        (scale,) = grads
        return _scaled(hidden_grad, scale), _scaled(weight_grad, scale), None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """gradient * scale, in place. In bf16 the scale itself would be rounded, by up to 0.4% and for all gradients alike;
    so some rows at a time are multiplied in the scale's dtype, which takes little memory."""
    for rows in gradient.split(max(SCALED_ELEMENTS // gradient.shape[-1], 1)):
        rows.copy_(rows.to(scale.dtype) * scale)
    return gradient


class Readout(nn.Module):
    """What is asked of the last hidden states, with the head's weight (passed in, because it may be tied).

    It has no parameters. Tensor parallelism gives it another `piece`, and a `whole` that puts logits together.
    """

    def __init__(self):
        super().__init__()
        # (logits [M, V], targets [M]) -> nats [M] and slope [M, V]; a compiled one on a GPU.
        self.piece = nats_and_slope
        # logits of this rank's part of the vocabulary -> logits of all of it
        self.whole = _itself

    def forward(self, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
        """Scalar in float32 (float64 for float64 input): the sum over M of -log p(target). Differentiable."""
        chunk = chunk_tokens(len(weight_VD), hidden_MD.device.type)
        return _SummedCrossEntropy.apply(hidden_MD, weight_VD, targets_M, chunk, self.piece)  # type: ignore[return-value]

    @torch.no_grad()
    def nats(self, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> Tensor:
        """-log p(target) of every token by itself, float32 (float64 for float64), for evaluation: [M]."""
        chunk = chunk_tokens(len(weight_VD), hidden_MD.device.type)
        parts = zip(hidden_MD.split(chunk), targets_M.split(chunk), strict=True)
        return torch.cat([self.piece(hidden @ weight_VD.T, targets)[0] for hidden, targets in parts])

    def logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """[B, T, V] in the compute dtype."""
        return self.whole(F.linear(hidden_BTD, weight_VD))


def _itself(logits: Tensor) -> Tensor:
    return logits
