"""The parts of a block that are not attention: RMSNorm, rotary position embedding, SwiGLU.

Shape letters: B batch, T tokens, D d_model, N query heads, G key/value heads, H head_dim, F d_ffn.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The layer x / rms(x) * weight over the last dim (Zhang & Sennrich 2019, eq. 4).

    The mean of squares is computed in float32 for bf16 input, and in the input's dtype for float32 and float64.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [T, H/2] each, of the angles position * theta^(-2i/H), i = 0..H/2-1.

    Su et al. 2021 (RoFormer, section 3.2.2). The angles are float32 as in the Llama of `transformers`, so that an
    exported model uses the same angles. The tables are recomputed in every forward: this takes a few small operations
    and needs no buffer.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_T.device).float() / head_dim
    angles = torch.outer(positions_T.float(), 1.0 / (theta**exponents))
    return angles.cos(), angles.sin()


def rotate(x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of every head by their angles (the rotate-half convention), in float32 or float64.

    In bf16, neighboring positions of a long sequence would have equal angles.
    """
    return _Rotation.apply(x_BNTH, cos, sin)


class _Rotation(torch.autograd.Function):
    """Rotation with the opposite rotation as its gradient: four kernels each, and no tensor in float32 is kept.

    By operations of their own, the products, sums, copies and casts of both directions are more than a third of the
    kernels that a step of a dense model starts (docs/measurements.md).
    """

    @staticmethod
    def forward(ctx, x_BNTH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_BNTH, cos, sin, 1)

    @staticmethod
    def backward(ctx, gradient_BNTH: Tensor):
        cos, sin = ctx.saved_tensors
        return _turned(gradient_BNTH, cos, sin, -1), None, None


def _turned(x_BNTH: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x_BNTH.chunk(2, dim=-1)
    # Products with float32 are in float32 or float64; only their sum is rounded to the dtype of x.
    products = (first * cos, second, sin, -direction), (second * cos, first, sin, direction)
    if torch.compiler.is_compiling():  # fuses all of it, and takes no output that has gaps
        return torch.cat([torch.addcmul(a, b, c, value=sign) for a, b, c, sign in products], dim=-1).type_as(x_BNTH)
    rotated = torch.empty(x_BNTH.shape, dtype=x_BNTH.dtype, device=x_BNTH.device)
    for out, (a, b, c, sign) in zip(rotated.chunk(2, dim=-1), products, strict=True):
        torch.addcmul(a, b, c, value=sign, out=out)
    return rotated


def rms_norm(dim: int, eps: float, options: None = None) -> RMSNorm:
    return RMSNorm(dim, eps)


class SwiGLU(nn.Module):
    """The feed-forward down(silu(gate(x)) * up(x)), without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, d_ffn: int):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ffn, bias=False)
        self.up = nn.Linear(d_model, d_ffn, bias=False)
        self.down = nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class GELU(nn.Module):
    """The feed-forward down(gelu(up(x))), without biases (Hendrycks & Gimpel 2016; GPT-2)."""

    def __init__(self, d_model: int, d_ffn: int):
        super().__init__()
        self.up = nn.Linear(d_model, d_ffn, bias=False)
        self.down = nn.Linear(d_ffn, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


def swiglu(d_model: int, d_ffn: int, options: None = None) -> SwiGLU:
    return SwiGLU(d_model, d_ffn)


def gelu(d_model: int, d_ffn: int, options: None = None) -> GELU:
    return GELU(d_model, d_ffn)
