"""How large a batch should be, and how the learning rate goes with the size of a model: published rules and runs.

Tokens, not sequences. Bi et al. 2024's fits over compute are in theory/scaling.py.
"""

import math
from dataclasses import dataclass

# Kaplan et al. 2020, eq. 1.4: batches of B* / L^(1/alpha) tokens take twice the fewest steps.
_KAPLAN_BATCH_TOKENS, _KAPLAN_EXPONENT = 2e8, 0.21


@dataclass(frozen=True)
class PublishedRun:
    """parameters: active ones of a model with experts. learning_rate: the peak. batch_tokens: the last one of a ramp, 0
    where it was not published."""

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
PUBLISHED_RUNS = (
    PublishedRun(125e6, 6e-4, 0.5e6, "GPT-3 125M", _GPT3),
    PublishedRun(350e6, 3e-4, 0.5e6, "GPT-3 350M", _GPT3),
    PublishedRun(760e6, 2.5e-4, 0.5e6, "GPT-3 760M", _GPT3),
    PublishedRun(1.3e9, 2e-4, 1e6, "GPT-3 1.3B", _GPT3),
    PublishedRun(2.7e9, 1.6e-4, 1e6, "GPT-3 2.7B", _GPT3),
    PublishedRun(6.7e9, 1.2e-4, 2e6, "GPT-3 6.7B", _GPT3),
    PublishedRun(13e9, 1e-4, 2e6, "GPT-3 13B", _GPT3),
    PublishedRun(175e9, 0.6e-4, 3.2e6, "GPT-3 175B", _GPT3),
    PublishedRun(6.7e9, 3e-4, 4e6, "LLaMA 7B", _LLAMA),
    PublishedRun(13e9, 3e-4, 4e6, "LLaMA 13B", _LLAMA),
    PublishedRun(32.5e9, 1.5e-4, 4e6, "LLaMA 33B", _LLAMA),
    PublishedRun(65.2e9, 1.5e-4, 4e6, "LLaMA 65B", _LLAMA),
    PublishedRun(7e9, 4.2e-4, 9.4e6, "DeepSeek LLM 7B", _DEEPSEEK),
    PublishedRun(67e9, 3.2e-4, 18.9e6, "DeepSeek LLM 67B", _DEEPSEEK),
    PublishedRun(8.03e9, 3e-4, 0, "Llama 3 8B", _LLAMA3),
    PublishedRun(70.6e9, 1.5e-4, 0, "Llama 3 70B", _LLAMA3),
    PublishedRun(405e9, 8e-5, 16e6, "Llama 3 405B", _LLAMA3),
    PublishedRun(37e9, 2.2e-4, 62.9e6, "DeepSeek-V3", "DeepSeek-AI 2024, V3, section 4.2", experts=True),
)


def nearest_runs(parameters: float, experts: bool = False) -> tuple[PublishedRun, ...]:
    """All of them by the ratio of sizes, those of the same kind (dense, or with experts) first; of two that are as
    near, the one with larger batches, which is of later years."""

    def distance(run: PublishedRun) -> tuple[bool, float, float]:
        return run.experts != experts, abs(math.log(run.parameters / parameters)), -run.batch_tokens

    return tuple(sorted(PUBLISHED_RUNS, key=distance))


def kaplan_learning_rate(parameters: float) -> float:
    """0.003239 - 0.0001395 ln N (Kaplan et al. 2020, eq. D.1), without embeddings; 0 where it has left its range, which
    ends above 10B."""
    return max(0.003239 - 0.0001395 * math.log(parameters), 0.0)


def kaplan_critical_batch(loss: float) -> float:
    """2e8 / L^(1/0.21) tokens at a loss of L nats per token (Kaplan et al. 2020, eq. 1.4)."""
    return _KAPLAN_BATCH_TOKENS / loss ** (1 / _KAPLAN_EXPONENT)


def simple_noise_scale(gradient_variance: float, gradient_norm_squared: float) -> float:
    """tr(S) / |G|^2 (McCandlish et al. 2018, eq. 2.9), in the unit of which the variance is that of one."""
    return gradient_variance / gradient_norm_squared


def noise_scale_of_batches(small: float, small_norm_squared: float, big: float, big_norm_squared: float) -> float:
    """The same from squared gradient norms, each the mean over batches of one of two sizes (McCandlish et al. 2018,
    appendix A.1): |G|^2 and tr(S) are taken out of E|G_B|^2 = |G|^2 + tr(S)/B. Not finite where noise hides |G|."""
    norm = (big * big_norm_squared - small * small_norm_squared) / (big - small)
    variance = (small_norm_squared - big_norm_squared) / (1 / small - 1 / big)
    return simple_noise_scale(variance, norm) if norm > 0 else math.inf


def token_factor(batch: float, critical_batch: float) -> float:
    """Tokens to a loss, relative to those of very small batches: 1 + B/B_crit (McCandlish et al. 2018, eq. 2.11)."""
    return 1 + batch / critical_batch


def step_factor(batch: float, critical_batch: float) -> float:
    """Steps to a given loss, relative to those of very large batches: 1 + B_crit/B."""
    return 1 + critical_batch / batch


def warmup_steps(steps: int) -> int:
    """5% of the steps, at most the 2,000 of LLaMA (Touvron et al. 2023)."""
    return min(max(steps // 20, 1), 2000)


def batch_ramp(batch_tokens: float, tokens: float) -> tuple[tuple[float, float], ...]:
    """(tokens per step, tokens after which the next batch begins): a quarter, a half, all.

    A quarter for 5% and a half until 20% of the tokens lie between published ramps: PaLM 1M, 2M from 7%, 4M from 24%
    (Chowdhery et al. 2022, section 5); Llama 3 405B 4M, 8M almost at once, 16M from 18% (Llama team 2024, section
    3.4.1); GPT-3 from 32k over its first 1 to 4% (Brown et al. 2020, appendix B).
    """
    return (batch_tokens / 4, 0.05 * tokens), (batch_tokens / 2, 0.20 * tokens), (batch_tokens, tokens)
