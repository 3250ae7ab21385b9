"""Floating-point operations per token, and model FLOPs utilization (MFU).

A multiplication and an addition are two operations. Conventions differ between systems, which changes a printed MFU by
more than 10%. This module has two conventions:

  norm   (causal=True, ingot's own): matmul parameters x 6, plus the causal half of attention, 6·L·N·H·T.
  full   (causal=False): the same with all of attention, 12·L·N·H·T, as in Megatron-LM's and torchtitan's tables.

Of the experts, only the top_k of each token are counted (count_matrix_parameters), as if no token were dropped. With a
sliding window, T is the number of keys that a token attends to. With latent attention, H is the mean of the widths of a
head's keys and values. Both conventions leave out the embedding look-up, norms, softmax, other elementwise work and
recomputation (Chowdhery et al. 2022, PaLM, appendix B). A backward costs twice its forward: every multiplication has a
gradient of its input and a gradient of its weight.
"""

from ingot.schema.arch import Arch
from ingot.theory.params import count_matrix_parameters, value_width

TRAIN_TO_FORWARD = 3
# The least MFU of each band on GPUs, in 16 bits, and the word for it. Large runs report 38% to 46% (Llama 3, PaLM).
_MFU_BANDS = (
    (0.50, "excellent"),
    (0.45, "as the largest runs report"),
    (0.35, "good"),
    (0.15, "poor"),
    (0.0, "a fault of layout, data or network"),
)


def mean_keys(seq_len: int, window: int = 0, causal: bool = True) -> float:
    """Return how many keys a token of a sequence attends to on average.

    Causal: half of the sequence; with a window W < T, W - W²/2T, because the first W tokens have fewer keys. Not
      causal: the whole sequence, or the whole window.
    """
    seen = min(window or seq_len, seq_len)
    return seen * (1 - seen / (2 * seq_len)) if causal else float(seen)


def forward_attention_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """Return the forward FLOPs of attention (QK^T and PV) per token, summed over all layers and heads."""
    widths = arch.num_heads * (arch.head_dim + value_width(arch))
    return arch.num_layers * 2 * widths * mean_keys(seq_len, arch.sliding_window, causal)


def forward_matmul_flops_per_token(arch: Arch) -> float:
    """Return the forward FLOPs of matrix products per token, without QK^T and PV of attention."""
    return 2.0 * count_matrix_parameters(arch)


def forward_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs per token of a forward pass."""
    return forward_matmul_flops_per_token(arch) + forward_attention_flops_per_token(arch, seq_len, causal)


def train_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> float:
    """Return the FLOPs of forward and backward per token, in sequences of `seq_len` tokens. causal: the convention (see
    the module).
    """
    return TRAIN_TO_FORWARD * forward_flops_per_token(arch, seq_len, causal)


def model_flops_utilization(tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """Return MFU, the share of the peak that useful work reached. peak_flops: dense FLOP/s of all devices together, in
    the dtype of the computation.
    """
    return tokens_per_second * flops_per_token / peak_flops


def mfu_words(mfu: float) -> str:
    """Return what an MFU on GPUs means, in words: of 38%, "good". The same words are in alerts, states and plans."""
    return next((words for least, words in _MFU_BANDS if mfu >= least), _MFU_BANDS[-1][1])


def train_flops_6nd(parameters: float, tokens: float) -> float:
    """Return 6 N D, the FLOPs of a training if only the model's size is known (Kaplan et al. 2020, section 2.1).

    It leaves out attention and counts the embedding. The two errors nearly cancel in models of 7B to 100B with
    sequences of 2k to 8k tokens.
    """
    return TRAIN_TO_FORWARD * 2.0 * parameters * tokens


def training_seconds(flops: float, devices: int, peak_flops: float, mfu: float = 1.0) -> float:
    """Return the time of a training run in seconds. peak_flops: dense FLOP/s of one device; if it is a sustained rate,
    pass mfu = 1.
    """
    return flops / (devices * peak_flops * mfu)
