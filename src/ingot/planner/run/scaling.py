"""Published scaling laws: how many tokens, how large a model, how large a batch, which learning rate.

N parameters, D tokens, L loss in nats per token, C = 6 N D FLOPs. The fits are of dense models; of one with experts
neither all nor the active parameters are its N.
"""

import math
from dataclasses import dataclass

from ingot.errors import ConfigError
from ingot.schema.arch import Arch
from ingot.theory.flops import TRAIN_TO_FORWARD, forward_attention_flops_per_token, train_flops_6nd
from ingot.theory.params import active_block_matrices

# Repeating data up to four times is nearly as good as new data (Muennighoff et al. 2023, section 6).
MAX_USEFUL_EPOCHS = 4
TOKENS_PER_PARAMETER = 20


def compute_optimal_tokens(parameters: int) -> int:
    """About 20 tokens per parameter (Hoffmann et al. 2022, table 3). Smaller models are often trained on far more."""
    return TOKENS_PER_PARAMETER * parameters


def compute_optimal(flops: float) -> tuple[float, float]:
    """Parameters and tokens of a budget: C = 6 N x 20 N (Hoffmann et al. 2022, approaches 1 and 2)."""
    parameters = math.sqrt(flops / train_flops_6nd(1, TOKENS_PER_PARAMETER))
    return parameters, TOKENS_PER_PARAMETER * parameters


@dataclass(frozen=True)
class LossFit:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def tokens_for(self, parameters: float, loss: float) -> float:
        """With which a model of this size reaches the loss; infinite where it never does."""
        left = loss - self.e - self.a / parameters**self.alpha
        return (self.b / left) ** (1 / self.beta) if left > 0 else math.inf

    def smallest(self, loss: float) -> float:
        """Parameters with which the loss is reached on infinitely many tokens."""
        return (self.a / self._reducible(loss)) ** (1 / self.alpha)

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of least loss (Hoffmann et al. 2022, eq. 4)."""
        share = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / share)
        work = flops / train_flops_6nd(1, 1)
        return g * work ** (self.beta / share), work ** (self.alpha / share) / g

    def cheapest(self, loss: float) -> tuple[float, float]:
        """Parameters and tokens that reach the loss with the fewest FLOPs. There alpha A/N^alpha = beta B/D^beta."""
        parameters = (self.a * (1 + self.alpha / self.beta) / self._reducible(loss)) ** (1 / self.alpha)
        return parameters, self.tokens_for(parameters, loss)

    def _reducible(self, loss: float) -> float:
        if loss <= self.e:
            raise ConfigError(f"a loss of {loss:.3f}", rule=f"above {self.e}, which no size reaches ({self.source})")
        return loss - self.e


HOFFMANN = LossFit(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, approach 3")
# The same runs fitted again: the printed fit was not at its optimum, and disagreed with approaches 1 and 2.
BESIROGLU = LossFit(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024")


@dataclass(frozen=True)
class Overtraining:
    """A model trained on more tokens (or fewer) than its compute asks for.

    multiple: of 20 tokens per parameter. loss: by the fit. best_loss: of the same FLOPs, best_parameters of them.
    wasted: share of its FLOPs that the best size for this loss saves in training; serving the smaller model is cheaper.
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
class Served:
    """Model that is cheapest to train and serve at one loss. flops: of both, weighed. usual: the same of the model that
    is cheapest to train."""

    parameters: float
    tokens: float
    flops: float
    usual_parameters: float
    usual_tokens: float
    usual_flops: float

    @property
    def saved(self) -> float:
        """Share of the usual model's FLOPs (or cost)."""
        return 1 - self.flops / self.usual_flops


def cheapest_to_serve(loss: float, served_tokens: float, weight: float = 1.0, fit: LossFit = BESIROGLU) -> Served:
    """Least 6 N D + weight x 2 N D_served at a given loss (Sardana et al. 2024, eq. 3 and 5).

    weight: what a served FLOP costs, in training FLOPs: 1 counts FLOPs; for money, the price of an hour over the
    utilisation, of serving over that of training (generation has an MFU of a few percent).
    """

    def total(parameters: float) -> float:
        serving = weight * train_flops_6nd(parameters, served_tokens) / TRAIN_TO_FORWARD
        return train_flops_6nd(parameters, fit.tokens_for(parameters, loss)) + serving

    usual = fit.cheapest(loss)
    parameters = _least(total, fit.smallest(loss), usual[0])
    return Served(parameters, fit.tokens_for(parameters, loss), total(parameters), *usual, total(usual[0]))


def _least(cost, low: float, high: float) -> float:
    """Golden-section search by ratio; `cost` has one minimum between them."""
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
