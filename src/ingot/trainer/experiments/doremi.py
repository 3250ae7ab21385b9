"""DoReMi: tune the mixture of a large model with two small ones (Xie et al. 2023, arXiv:2305.10429).

A small reference model is trained on a base mixture. Then a proxy of the same size is trained by group DRO (Sagawa et
al. 2020): a source on which the proxy is worse than the reference gets more weight, because there is something left to
learn. Noise, which no model learns, and text that is already learned get less. The mean of the weights over the steps
is the mixture for the large model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ingot.config import to_dict
from ingot.errors import ConfigError
from ingot.schema.run import RunConfig
from ingot.schema.tokens import read_token_manifest
from ingot.storage import write_json
from ingot.trainer.experiments.proxy import Proxy, SourceBatches, as_array
from ingot.trainer.mesh.start import choose_device

_HISTORY_LINES = 200
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class DoremiRules:
    """The settings of DoReMi. step_size: eta of the exponentiated gradient. smoothing: share c of the uniform mixture.

    The defaults are those of the paper (section 2, "Practical details").
    """

    step_size: float = 1.0
    smoothing: float = 1e-3

    def problems(self):
        """Yield (name of a setting, problem with its value)."""
        if not 0 < self.step_size < float("inf"):
            yield "step_size", f"is {self.step_size}, must be positive"
        if not 0 <= self.smoothing <= 1:
            yield "smoothing", f"is {self.smoothing}, must be in [0, 1]"


@dataclass(frozen=True, kw_only=True)
class DoremiStep:
    """A training step of the proxy. excess: by source, nats per token above the reference, clipped at 0 per token."""

    step: int
    weights: dict[str, float]
    excess: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Doremi:
    """The result of DoReMi. base, weights: shares by source, before and after. history: evenly spaced steps."""

    base: dict[str, float]
    weights: dict[str, float]
    steps: int
    tokens_per_step: int
    parameters: int
    data_fingerprint: str
    rules: DoremiRules
    history: tuple[DoremiStep, ...]


def updated_weights(weights: np.ndarray, excess: np.ndarray, rules: DoremiRules) -> np.ndarray:
    """Return the weights after one step of group DRO (algorithm 1, lines 5 to 7). All arrays are float64 [sources]."""
    logits = np.log(weights) + rules.step_size * excess
    grown = np.exp(logits - logits.max())
    return (1 - rules.smoothing) * grown / grown.sum() + rules.smoothing / len(weights)


def excess_nats(proxy: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the mean over each source's tokens of max(proxy - reference, 0), float64 [sources]."""
    pairs = zip(proxy, reference, strict=True)
    return np.array([float((ours - theirs).clamp(min=0).double().mean()) for ours, theirs in pairs])


def doremi(
    config: RunConfig,
    base: Mapping[str, float] | None = None,
    rules: DoremiRules | None = None,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Doremi:
    """Tune the mixture of config.data.tokens with two models of config.model; write the result to `out` if given.

    config: both trainings use its seed, train, optim and schedule; its data.weights are not used. A step takes the same
    number of samples from every source, together about train.global_batch. base: the reference's mixture, in any unit
    (default: natural shares). Raises ConfigError, DataError.
    """
    rules = rules or DoremiRules()
    for name, problem in rules.problems():
        raise ConfigError(
            "E-DOREMI-SETTING",
            f"{name} {problem}",
            rule="step_size is positive, and smoothing is in [0, 1]",
            fix=f"change {name}",
            setting=name,
        )
    tokens = Path(config.data.tokens)
    manifest = read_token_manifest(tokens)
    sources = manifest.sources
    if len(sources) < 2:
        raise ConfigError(
            "E-MIXTURE-SOURCES",
            f"the tokens have fewer than two sources ({', '.join(sources)})",
            rule="a mixture has at least two sources",
            fix="build the tokens with --source NAME FILES",
            sources=list(sources),
        )
    natural = {source: sum(s.tokens for s in manifest.shards if s.source == source) for source in sources}
    if unknown := set(base or ()) - set(sources):
        raise ConfigError(
            "E-SOURCE-UNKNOWN",
            f"the tokens have no source {min(unknown)!r}",
            rule=f"the tokens have these sources: {', '.join(sources)}",
            fix="remove this source from the weights",
            source=min(unknown),
            sources=list(sources),
        )
    shares = as_array(base or natural, sources)
    device, say = choose_device(config.train.device, 0), progress or (lambda fraction, text: None)
    steps, per_source = config.train.steps, max(config.train.global_batch // len(sources), 1)
    batches = SourceBatches(tokens, manifest, config.train.seq_len, config.seed, per_source)

    reference = Proxy(config, manifest, device)
    for step in range(1, steps + 1):
        reference.train(step, batches.step(step), shares)
        say(0.4 * step / steps, "reference")
    proxy = Proxy(config, manifest, device)
    weights, total = np.full(len(sources), 1 / len(sources)), np.zeros(len(sources))
    history = []
    for step in range(1, steps + 1):
        batch = batches.step(step)
        excess = excess_nats(proxy.nats(batch), reference.nats(batch))
        weights = updated_weights(weights, excess, rules)
        total += weights
        proxy.train(step, batch, weights)
        if step % max(steps // _HISTORY_LINES, 1) == 0:
            history.append(
                DoremiStep(step=step, weights=_by_source(sources, weights), excess=_by_source(sources, excess))
            )
        say(0.4 + 0.6 * step / steps, "proxy")
    result = Doremi(
        base=_by_source(sources, shares),
        weights=_by_source(sources, total / steps),
        steps=steps,
        tokens_per_step=per_source * len(sources) * config.train.seq_len,
        parameters=sum(p.numel() for p in proxy.model.parameters()),
        data_fingerprint=manifest.fingerprint(),
        rules=rules,
        history=tuple(history),
    )
    if out is not None:
        write_json(out, to_dict(result))
    return result


def _by_source(sources: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return dict(zip(sources, values.tolist(), strict=True))
