"""Published rules for hyperparameters: number of tokens, size and shape of the model, batch, learning rate, warm-up.

N: parameters, D: tokens, L: loss in nats per token, C = 6 N D: FLOPs. Batches are in tokens, not sequences. The laws
are fitted on dense models; in a model with experts, neither all nor the active parameters are exactly their N.
"""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.schema.arch import Arch
from ingot.theory.flops import TRAIN_TO_FORWARD, forward_attention_flops_per_token, train_flops_6nd
from ingot.theory.params import (
    active_block_matrices,
    block_attention_parameters,
    block_mlp_parameters,
    block_norm_parameters,
)

# Repeating data up to four times is nearly as good as new data (Muennighoff et al. 2023, section 6).
MAX_USEFUL_EPOCHS = 4
TOKENS_PER_PARAMETER = 20
# Width divided by layers: 128 in Llama 7B and 13B, 102 in 70B, 130 in 405B. The loss hardly depends on this ratio
# between 50 and 200 (Kaplan et al. 2020, figure 5).
WIDTH_PER_LAYER = 128
_HEAD_DIM, _SMALL_HEAD_DIM = 128, 64  # the small one for widths below 2,048, as in GPT-2
_GROUPED_WIDTH, _KEY_VALUE_HEADS = 4096, 8  # grouped-query attention from this width on, as in Llama 3 8B
_UNTIED_PARAMETERS = 3e9  # smaller models share one matrix for embedding and head, a large part of their parameters
_LEAST, _MOST = 1e6, 1e14
# Kaplan et al. 2020, eq. 1.4: with batches of B* / L^(1/alpha) tokens, training takes twice the minimum of steps.
_KAPLAN_BATCH_TOKENS, _KAPLAN_EXPONENT = 2e8, 0.21


def compute_optimal_tokens(parameters: int) -> int:
    """Return the compute-optimal number of training tokens, 20 per parameter (Hoffmann et al. 2022, table 3). Small
    models are often trained on many more."""
    return TOKENS_PER_PARAMETER * parameters


def compute_optimal(flops: float) -> tuple[float, float]:
    """Return the compute-optimal (parameters, tokens) for a budget of `flops`, which solve C = 6 N x 20 N (Hoffmann et
    al. 2022, approaches 1 and 2)."""
    parameters = math.sqrt(flops / train_flops_6nd(1, TOKENS_PER_PARAMETER))
    return parameters, TOKENS_PER_PARAMETER * parameters


@dataclass(frozen=True)
class LossFit:
    """A fit of the loss: L(N, D) = E + A / N^alpha + B / D^beta. parameters, tokens: the least and the largest N and D
    of the runs to which it is fitted; elsewhere it is extrapolated."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str
    parameters: tuple[float, float]
    tokens: tuple[float, float]

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def tokens_for(self, parameters: float, loss: float) -> float:
        """Return the number of tokens after which a model of this size reaches the loss; infinity if it never does."""
        left = loss - self.e - self.a / parameters**self.alpha
        return (self.b / left) ** (1 / self.beta) if left > 0 else math.inf

    def smallest(self, loss: float) -> float:
        """Return the number of parameters of a model that reaches the loss only after infinitely many tokens."""
        return (self.a / self._reducible(loss)) ** (1 / self.alpha)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the (parameters, tokens) with the lowest loss for `flops` FLOPs (Hoffmann et al. 2022, eq. 4)."""
        share = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / share)
        work = flops / train_flops_6nd(1, 1)
        return g * work ** (self.beta / share), work ** (self.alpha / share) / g

    def cheapest(self, loss: float) -> tuple[float, float]:
        """Return the (parameters, tokens) that reach the loss with the fewest FLOPs, where alpha A/N^alpha = beta
        B/D^beta. Raises ConfigError for a loss that no model reaches.
        """
        parameters = (self.a * (1 + self.alpha / self.beta) / self._reducible(loss)) ** (1 / self.alpha)
        return parameters, self.tokens_for(parameters, loss)

    def _reducible(self, loss: float) -> float:
        if loss <= self.e:
            raise ConfigError(
                "E-LOSS-RANGE",
                f"a loss of {loss:.3f} is asked for",
                rule=f"a loss is above {self.e}, the limit for infinitely large models ({self.source})",
                fix=f"ask for a loss above {self.e}",
                loss=loss,
                least=self.e,
            )
        return loss - self.e


# Their abstract: 70 million to over 16 billion parameters, on 5 to 500 billion tokens.
HOFFMANN = LossFit(
    1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, approach 3", parameters=(70e6, 16e9), tokens=(5e9, 500e9)
)
# A new fit to the same runs. Hoffmann et al.'s published fit was not at its optimum, and disagreed with their
# approaches 1 and 2. The ranges are those of the 245 runs that they read from Hoffmann et al.'s figure 4 (the table in
# data_analysis.ipynb of github.com/epoch-research/analyzing-chinchilla).
BESIROGLU = LossFit(
    1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024",
    parameters=(57_334_197, 16_183_346_311), tokens=(245_105_958, 317_754_489_344),
)  # fmt: skip


@dataclass(frozen=True)
class Overtraining:
    """A comparison of a model trained on more (or fewer) tokens than is compute-optimal with compute-optimal models.

    multiple: tokens divided by 20 per parameter. loss: the model's loss by the fit. best_loss, best_parameters: loss
    and size of the compute-optimal model for the same FLOPs. wasted: share of the training FLOPs that the
    compute-optimal model with the same loss would save. (An over-trained model is smaller, so cheaper to serve.)
    """

    multiple: float
    loss: float
    best_loss: float
    best_parameters: float
    wasted: float


def overtraining(parameters: float, tokens: float, fit: LossFit = BESIROGLU) -> Overtraining:
    flops, loss = train_flops_6nd(parameters, tokens), fit.loss(parameters, tokens)
    best = fit.optimum(flops)
    return Overtraining(
        multiple=tokens / (TOKENS_PER_PARAMETER * parameters),
        loss=loss,
        best_loss=fit.loss(*best),
        best_parameters=best[0],
        wasted=1 - train_flops_6nd(*fit.cheapest(loss)) / flops,
    )


@dataclass(frozen=True)
class CheapestServed:
    """The model of a given loss that is cheapest to train and to serve. flops: FLOPs of training plus weighted FLOPs of
    serving. usual_*: the same values for the model that is cheapest to train.
    """

    parameters: float
    tokens: float
    flops: float
    usual_parameters: float
    usual_tokens: float
    usual_flops: float

    @property
    def saved(self) -> float:
        """The share of FLOPs (or of cost, by `weight`) that this model saves compared with the one that is cheapest to
        train (`usual_*`)."""
        return 1 - self.flops / self.usual_flops


def cheapest_to_serve(
    loss: float, served_tokens: float, weight: float = 1.0, fit: LossFit = BESIROGLU
) -> CheapestServed:
    """Return the model that minimizes 6 N D + weight x 2 N D_served at a given loss (Sardana et al. 2024, eq. 3 and 5).

    served_tokens: D_served. weight: cost of a served FLOP relative to a training FLOP. 1 minimizes FLOPs; to minimize
    cost, use (price of an hour / MFU) of serving divided by that of training (generation has an MFU of a few percent).
    """

    def total(parameters: float) -> float:
        serving = weight * train_flops_6nd(parameters, served_tokens) / TRAIN_TO_FORWARD
        return train_flops_6nd(parameters, fit.tokens_for(parameters, loss)) + serving

    usual = fit.cheapest(loss)
    parameters = _least(total, fit.smallest(loss), usual[0])
    return CheapestServed(parameters, fit.tokens_for(parameters, loss), total(parameters), *usual, total(usual[0]))


def _least(cost, low: float, high: float) -> float:
    """Return the x between `low` and `high` at which `cost` is smallest, by golden-section search in the logarithm of
    x. `cost` must have a single minimum."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    for _ in range(80):
        left, right = b - golden * (b - a), a + golden * (b - a)
        if cost(math.exp(left)) <= cost(math.exp(right)):
            b = right
        else:
            a = left
    return math.exp((a + b) / 2)


def compute_budget(arch: Arch, seq_len: int, tokens: int) -> float:
    """Return the training FLOPs as Bi et al. 2024 count them (section 3.2): blocks with full attention, without
    embedding and head. Their models are dense; of experts, only those to which a token is sent count here."""
    blocks = active_block_matrices(arch)
    attention = forward_attention_flops_per_token(arch, seq_len, causal=False)
    return TRAIN_TO_FORWARD * (2.0 * blocks + attention) * tokens


def suggested_batch_tokens(arch: Arch, seq_len: int, tokens: int) -> float:
    """Return the batch 0.2920 C^0.3271 in tokens (Bi et al. 2024, eq. 1; fitted from 1e17 to 2e19 FLOPs, tested at
    1e20)."""
    return 0.2920 * compute_budget(arch, seq_len, tokens) ** 0.3271


def suggested_learning_rate(arch: Arch, seq_len: int, tokens: int) -> float:
    """Return the learning rate 0.3118 C^-0.1250 (Bi et al. 2024, eq. 1), rounded to two significant digits."""
    lr = 0.3118 * compute_budget(arch, seq_len, tokens) ** -0.1250
    digits = 1 - math.floor(math.log10(lr))
    return round(lr, digits)


def shape_of(parameters: float, *, vocab_size: int = 128_256, seq_len: int = 8192) -> Arch:
    """Return a dense model of usual shape with about `parameters` parameters (within 5% from 100M on).

    Its width is about WIDTH_PER_LAYER x its layers. Raises ConfigError for fewer than 1M or more than 100T parameters.
    """
    if not _LEAST <= parameters <= _MOST:
        raise ConfigError(
            "E-SHAPE-SIZE",
            f"a model of {parameters:g} parameters has no usual shape",
            rule="shapes are derived for 1M to 100T parameters",
            fix="write a number with a unit, like 70b, or give the shape itself",
            parameters=parameters,
        )
    tied = parameters < _UNTIED_PARAMETERS
    best: tuple[float, Arch] | None = None
    # A model of width D has about 12 L D^2 parameters and L = D / 128 layers. This gives bounds for the width on both
    # sides, even with embedding and head.
    guess = (parameters * WIDTH_PER_LAYER / 12) ** (1 / 3)
    step = _width_step(guess)
    for width in range(max(step, round(guess / 3 / step) * step), round(1.5 * guess) + step, step):
        block = _shape(width, 1, vocab_size, seq_len, tied)
        ends = width + vocab_size * width * (1 if tied else 2)
        layers = (parameters - ends) / _block_parameters(block)
        if round(layers) < 1:
            continue
        # The misfit is the distance from the usual proportion plus the error of the size from rounding the layers.
        misfit = abs(math.log(layers * WIDTH_PER_LAYER / width)) + 10 * abs(math.log(layers / round(layers)))
        if best is None or misfit < best[0]:
            best = misfit, _shape(width, round(layers), vocab_size, seq_len, tied)
    return best[1] if best else _shape(step, 1, vocab_size, seq_len, tied)


def _width_step(width: float) -> int:
    """Return the step between the widths to try, such that tensor parallelism can divide the heads: by 8 in large
    models, by 4 or 2 in smaller ones."""
    return 1024 if width >= 4096 else 512 if width >= 2048 else 128 if width >= 512 else 64


def _block_parameters(arch: Arch) -> int:
    return block_attention_parameters(arch) + block_mlp_parameters(arch) + block_norm_parameters(arch)


def _shape(width: int, layers: int, vocab_size: int, seq_len: int, tied: bool) -> Arch:
    head_dim = _HEAD_DIM if width % _HEAD_DIM == 0 and width >= 2048 else _SMALL_HEAD_DIM
    heads = width // head_dim
    grouped = width >= _GROUPED_WIDTH and heads % _KEY_VALUE_HEADS == 0
    # The feed-forward gets the parameters that grouped keys and values save: 7/2 of the width instead of 8/3.
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


@dataclass(frozen=True)
class PublishedHyperparameters:
    """The learning rate and batch of a published training run.

    parameters: number of parameters, for a model with experts only the active ones. learning_rate: the peak.
    batch_tokens: tokens per step, at the end of a ramp; 0 if not published. experts: the model has experts.
    """

    parameters: float
    learning_rate: float
    batch_tokens: float
    name: str
    source: str
    experts: bool = False


_GPT3 = "Brown et al. 2020, table 2.1"
_LLAMA = "Touvron et al. 2023 (LLaMA), table 2"
_DEEPSEEK = "Bi et al. 2024 (DeepSeek LLM), table 2"
_LLAMA3 = "Llama team 2024, table 3 and section 3.4.1"
PUBLISHED_HYPERPARAMETERS = (
    PublishedHyperparameters(125e6, 6e-4, 0.5e6, "GPT-3 125M", _GPT3),
    PublishedHyperparameters(350e6, 3e-4, 0.5e6, "GPT-3 350M", _GPT3),
    PublishedHyperparameters(760e6, 2.5e-4, 0.5e6, "GPT-3 760M", _GPT3),
    PublishedHyperparameters(1.3e9, 2e-4, 1e6, "GPT-3 1.3B", _GPT3),
    PublishedHyperparameters(2.7e9, 1.6e-4, 1e6, "GPT-3 2.7B", _GPT3),
    PublishedHyperparameters(6.7e9, 1.2e-4, 2e6, "GPT-3 6.7B", _GPT3),
    PublishedHyperparameters(13e9, 1e-4, 2e6, "GPT-3 13B", _GPT3),
    PublishedHyperparameters(175e9, 0.6e-4, 3.2e6, "GPT-3 175B", _GPT3),
    PublishedHyperparameters(6.7e9, 3e-4, 4e6, "LLaMA 7B", _LLAMA),
    PublishedHyperparameters(13e9, 3e-4, 4e6, "LLaMA 13B", _LLAMA),
    PublishedHyperparameters(32.5e9, 1.5e-4, 4e6, "LLaMA 33B", _LLAMA),
    PublishedHyperparameters(65.2e9, 1.5e-4, 4e6, "LLaMA 65B", _LLAMA),
    PublishedHyperparameters(7e9, 4.2e-4, 9.4e6, "DeepSeek LLM 7B", _DEEPSEEK),
    PublishedHyperparameters(67e9, 3.2e-4, 18.9e6, "DeepSeek LLM 67B", _DEEPSEEK),
    PublishedHyperparameters(8.03e9, 3e-4, 0, "Llama 3 8B", _LLAMA3),
    PublishedHyperparameters(70.6e9, 1.5e-4, 0, "Llama 3 70B", _LLAMA3),
    PublishedHyperparameters(405e9, 8e-5, 16e6, "Llama 3 405B", _LLAMA3),
    PublishedHyperparameters(37e9, 2.2e-4, 62.9e6, "DeepSeek-V3", "DeepSeek-AI 2024, V3, section 4.2", experts=True),
)


def nearest_runs(parameters: float, experts: bool = False) -> tuple[PublishedHyperparameters, ...]:
    """Return all published runs: first those of the same kind (dense, or with experts), in each kind those nearest in
    size first. Of two equally near runs, the run with the larger batch is first, because it is more recent."""

    def distance(run: PublishedHyperparameters) -> tuple[bool, float, float]:
        return run.experts != experts, abs(math.log(run.parameters / parameters)), -run.batch_tokens

    return tuple(sorted(PUBLISHED_HYPERPARAMETERS, key=distance))


def kaplan_learning_rate(parameters: float) -> float:
    """Return the learning rate 0.003239 - 0.0001395 ln N (Kaplan et al. 2020, eq. D.1), where N does not count
    embeddings; 0 for sizes (above 10B) at which this is negative."""
    return max(0.003239 - 0.0001395 * math.log(parameters), 0.0)


def kaplan_critical_batch(loss: float) -> float:
    """Return the critical batch in tokens, 2e8 / L^(1/0.21), at a loss of L nats per token (Kaplan et al. 2020,
    eq. 1.4)."""
    return _KAPLAN_BATCH_TOKENS / loss ** (1 / _KAPLAN_EXPONENT)


def simple_noise_scale(gradient_variance: float, gradient_norm_squared: float) -> float:
    """Return the gradient noise scale tr(S) / |G|^2 (McCandlish et al. 2018, eq. 2.9). Its unit is the batch for which
    the variance tr(S) is given: samples for the variance of one sample."""
    return gradient_variance / gradient_norm_squared


def noise_scale_of_batches(small: float, small_norm_squared: float, big: float, big_norm_squared: float) -> float:
    """Return the noise scale estimated from gradient norms at two batch sizes (McCandlish et al. 2018, appendix A.1).

    small, big: the batch sizes B. small_norm_squared, big_norm_squared: mean squared norms of the gradient at these
    sizes; |G|^2 and tr(S) follow from E|G_B|^2 = |G|^2 + tr(S)/B. Infinity if the estimate of |G|^2 is not positive.
    """
    norm = (big * big_norm_squared - small * small_norm_squared) / (big - small)
    variance = (small_norm_squared - big_norm_squared) / (1 / small - 1 / big)
    return simple_noise_scale(variance, norm) if norm > 0 else math.inf


def token_factor(batch: float, critical_batch: float) -> float:
    """Return the number of tokens to reach a loss, relative to that with very small batches: 1 + B/B_crit (McCandlish
    et al. 2018, eq. 2.11)."""
    return 1 + batch / critical_batch


def step_factor(batch: float, critical_batch: float) -> float:
    """Return the number of steps to reach a loss, relative to that with very large batches: 1 + B_crit/B (McCandlish et
    al. 2018, eq. 2.11)."""
    return 1 + critical_batch / batch


# Models with more parameters need a warm-up of at least _LEAST_WARMUP steps: their early steps diverge more easily.
LARGE_PARAMETERS = 1e9
_LEAST_WARMUP = 1000


def warmup_steps(steps: int, parameters: float) -> int:
    """Return the number of warm-up steps: 5% of all steps, at least 1, at most 2,000 (LLaMA, Touvron et al. 2023), and
    at least `least_warmup_steps`."""
    return max(min(max(steps // 20, 1), 2000), least_warmup_steps(steps, parameters))


def least_warmup_steps(steps: int, parameters: float) -> int:
    """Return the least number of warm-up steps: above 1B parameters 1,000, but at most half of all steps; else 0."""
    return min(_LEAST_WARMUP, steps // 2) if parameters > LARGE_PARAMETERS else 0


def batch_ramp(batch_tokens: float, tokens: float) -> tuple[tuple[float, float], ...]:
    """Return the stages of a batch ramp as (tokens per step, tokens of the run at the end of the stage): a quarter of
    the batch for the first 5% of the tokens, a half until 20%, then the whole batch.

    Published ramps are similar: PaLM 1M, 2M from 7%, 4M from 24% (Chowdhery et al. 2022, section 5); Llama 3 405B 4M,
    8M soon after the start, 16M from 18% (Llama team 2024, section 3.4.1); GPT-3 from 32k over its first 1 to 4% (Brown
    et al. 2020, appendix B).
    """
    return (batch_tokens / 4, 0.05 * tokens), (batch_tokens / 2, 0.20 * tokens), (batch_tokens, tokens)
