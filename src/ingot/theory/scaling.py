"""Rules of thumb from published fits: how many tokens, how large a batch, which learning rate."""

import math

from ingot.schema.arch import Arch
from ingot.theory.flops import TRAIN_TO_FORWARD, forward_attention_flops_per_token
from ingot.theory.params import active_block_matrices

# Repeating data up to four times is nearly as good as new data (Muennighoff et al. 2023, section 6).
MAX_USEFUL_EPOCHS = 4
TOKENS_PER_PARAMETER = 20


def compute_optimal_tokens(parameters: int) -> int:
    """About 20 tokens per parameter (Hoffmann et al. 2022, table 3). Smaller models are often trained on far more."""
    return TOKENS_PER_PARAMETER * parameters


def compute_budget(arch: Arch, seq_len: int, tokens: int) -> float:
    """FLOPs as Bi et al. 2024 count them (section 3.2): blocks with full attention, without embedding and head. They
    fitted dense models; of experts, those that a token is sent to count."""
    blocks = active_block_matrices(arch)
    attention = forward_attention_flops_per_token(arch, seq_len, causal=False)
    return TRAIN_TO_FORWARD * (2.0 * blocks + attention) * tokens


def suggested_batch_tokens(arch: Arch, seq_len: int, tokens: int) -> float:
    """0.2920 C^0.3271 tokens per step (Bi et al. 2024, eq. 1; fitted from 1e17 to 2e19 FLOPs, tried at 1e20)."""
    return 0.2920 * compute_budget(arch, seq_len, tokens) ** 0.3271


def suggested_learning_rate(arch: Arch, seq_len: int, tokens: int) -> float:
    """0.3118 C^-0.1250 (Bi et al. 2024, eq. 1), two digits."""
    lr = 0.3118 * compute_budget(arch, seq_len, tokens) ** -0.1250
    digits = 1 - math.floor(math.log10(lr))
    return round(lr, digits)
