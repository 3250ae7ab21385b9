"""Floating-point operations per token, and model FLOPs utilisation (MFU).

A multiply and an add are two operations. Conventions differ between systems and move a printed MFU by more than 10%,
so this module names the two it knows:

  norm   (causal=True, ingot's own): matmul parameters x 6, plus the causal half of attention, 6·L·N·H·T.
  full   (causal=False): the same with all of attention, 12·L·N·H·T. Megatron-LM's and torchtitan's tables count so.

Of experts, the ones that a token is sent to count (count_matrix_parameters), as if none were dropped. With a sliding
window, T is the number of keys that a token sees; with latent attention, H is the mean of what a head's scores and its
values are wide. Both leave out the embedding look-up, norms, softmax and the other elementwise work, and count no
recomputation (Chowdhery et al. 2022, PaLM, appendix B). Backward costs twice the forward: a gradient for the input and
one for the weight of every multiplication.
"""

from ingot.schema.arch import Arch
from ingot.theory.params import count_matrix_parameters, value_width

TRAIN_TO_FORWARD = 3


def mean_keys(seq_len: int, window: int = 0, causal: bool = True) -> float:
    """Keys that a token of a sequence sees on average: half of it where all before it are seen (causal), and with a
    window W below T, W - W²/2T, for the first W tokens see fewer. Not causal: all of T, or of the window."""
    seen = min(window or seq_len, seq_len)
    return seen * (1 - seen / (2 * seq_len)) if causal else float(seen)


def forward_attention_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """QK^T of width H and PV as wide as values, N heads each, with every key seen, in each layer."""
    widths = arch.num_heads * (arch.head_dim + value_width(arch))
    return arch.num_layers * 2 * widths * mean_keys(seq_len, arch.sliding_window, causal)


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


def train_flops_6nd(parameters: float, tokens: float) -> float:
    """6 N D: of a model of which nothing but its size is known (Kaplan et al. 2020, section 2.1). Attention is left out
    and the embedding counted, which about cancel in models of 7B to 100B at sequences of 2k to 8k tokens."""
    return TRAIN_TO_FORWARD * 2.0 * parameters * tokens


def training_seconds(flops: float, devices: int, peak_flops: float, mfu: float = 1.0) -> float:
    """peak_flops: dense, of one device, FLOP/s. A sustained rate already is peak x mfu: it takes mfu = 1."""
    return flops / (devices * peak_flops * mfu)
