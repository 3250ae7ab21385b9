"""A model's shape from its number of parameters alone, as dense models of that size usually have it."""

import math

from ingot.errors import ConfigError
from ingot.schema.arch import Arch
from ingot.theory.params import block_attention_parameters, block_mlp_parameters, block_norm_parameters

# Width per layer: 128 in Llama 7B and 13B, 102 in 70B, 130 in 405B. The loss hardly depends on it from 50 to 200
# (Kaplan et al. 2020, figure 5).
WIDTH_PER_LAYER = 128
_HEAD_DIM, _SMALL_HEAD_DIM = 128, 64  # the latter below a width of 2,048, as in GPT-2
_GROUPED_WIDTH, _KEY_VALUE_HEADS = 4096, 8  # from Llama 3 8B on
_UNTIED_PARAMETERS = 3e9  # below it, embedding and head share one matrix, which would be much of the model
_LEAST, _MOST = 1e6, 1e14


def shape_of(parameters: float, *, vocab_size: int = 128_256, seq_len: int = 8192) -> Arch:
    """A shape of about as many parameters (within 5% from 100M on), as wide as WIDTH_PER_LAYER x its layers.

    Raises ConfigError for numbers that no model has.
    """
    if not _LEAST <= parameters <= _MOST:
        raise ConfigError(
            f"a model of {parameters:g} parameters",
            rule="a shape is derived for 1M to 100T parameters",
            fix="write a number with a unit, like 70b, or give the shape itself",
        )
    tied = parameters < _UNTIED_PARAMETERS
    best: tuple[float, Arch] | None = None
    # 12 L D^2 parameters with L = D / 128 bound the width from both sides, ends included.
    guess = (parameters * WIDTH_PER_LAYER / 12) ** (1 / 3)
    step = _width_step(guess)
    for width in range(max(step, round(guess / 3 / step) * step), round(1.5 * guess) + step, step):
        block = _shape(width, 1, vocab_size, seq_len, tied)
        ends = width + vocab_size * width * (1 if tied else 2)
        layers = (parameters - ends) / _block_parameters(block)
        if round(layers) < 1:
            continue
        # Far from the usual proportion, or a number of layers that misses the size: both count.
        misfit = abs(math.log(layers * WIDTH_PER_LAYER / width)) + 10 * abs(math.log(layers / round(layers)))
        if best is None or misfit < best[0]:
            best = misfit, _shape(width, round(layers), vocab_size, seq_len, tied)
    return best[1] if best else _shape(step, 1, vocab_size, seq_len, tied)


def _width_step(width: float) -> int:
    """Numbers of heads that tensor parallelism can cut: multiples of 8 in large models, of 4 and 2 in smaller ones."""
    return 1024 if width >= 4096 else 512 if width >= 2048 else 128 if width >= 512 else 64


def _block_parameters(arch: Arch) -> int:
    return block_attention_parameters(arch) + block_mlp_parameters(arch) + block_norm_parameters(arch)


def _shape(width: int, layers: int, vocab_size: int, seq_len: int, tied: bool) -> Arch:
    head_dim = _HEAD_DIM if width % _HEAD_DIM == 0 and width >= 2048 else _SMALL_HEAD_DIM
    heads = width // head_dim
    grouped = width >= _GROUPED_WIDTH and heads % _KEY_VALUE_HEADS == 0
    # A feed-forward takes over what grouped keys and values save: 8/3 of the width becomes 7/2.
    ffn = round((3.5 if grouped else 8 / 3) * width / 256) * 256 or 256
    return Arch(
        vocab_size=vocab_size,
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_KEY_VALUE_HEADS if grouped else heads,
        head_dim=head_dim,
        d_ffn=ffn,
        max_seq_len=seq_len,
        tied_embeddings=tied,
    )
