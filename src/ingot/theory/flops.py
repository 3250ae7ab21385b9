"""Floating-point operations per token, and model FLOPs utilisation (MFU).

A multiply and an add are two operations. Conventions differ between systems and move a printed MFU by more than 10%,
so this module names the two it knows:

  norm   (causal=True, ingot's own): matmul parameters x 6, plus the causal half of attention, 6·L·N·H·T.
  full   (causal=False): the same with all of attention, 12·L·N·H·T. Megatron-LM's and torchtitan's tables count so.

Both leave out the embedding look-up, norms, softmax and the other elementwise work, and count no recomputation
(Chowdhery et al. 2022, PaLM, appendix B). Backward costs twice the forward: a gradient for the input and one for the
weight of every multiplication.
"""

from ingot.schema.arch import Arch
from ingot.theory.params import count_matrix_parameters

TRAIN_TO_FORWARD = 3


def forward_attention_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """QK^T and PV: 2 products x 2·N·H·T operations in each layer. A causal token sees half of T on average."""
    return arch.num_layers * 4 * arch.num_heads * arch.head_dim * seq_len * (0.5 if causal else 1.0)


def forward_matmul_flops_per_token(arch: Arch) -> float:
    return 2.0 * count_matrix_parameters(arch)


def forward_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    return forward_matmul_flops_per_token(arch) + forward_attention_flops_per_token(arch, seq_len, causal)


def train_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """Forward and backward of one token in a sequence of `seq_len`. `causal` picks the convention: see above."""
    return TRAIN_TO_FORWARD * forward_flops_per_token(arch, seq_len, causal)


def model_flops_utilisation(tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """Share of the peak that useful work reached. `peak_flops`: of all devices together, dense, of the dtype used."""
    return tokens_per_second * flops_per_token / peak_flops
