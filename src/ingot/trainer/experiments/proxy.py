"""A small model as a proxy for a large model when mixtures are compared, and its training in one process.

A training step here takes one weight per source. An ordinary run has no such weights: its mixture decides which samples
it reads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ingot.errors import ConfigError
from ingot.plugins.optimizer import RuleOf
from ingot.plugins.piece import ParameterShard, PlacedBlock, PlacedParameter
from ingot.schema.arch import Arch
from ingot.schema.run import Data, Evaluate, Optim, RunConfig, Schedule, Train, WatchSettings
from ingot.schema.tokens import TokenManifest, check_vocabulary
from ingot.trainer.loader.order import Order
from ingot.trainer.loader.reader import TokenReader
from ingot.trainer.model.init import initialize
from ingot.trainer.model.transformer import Transformer
from ingot.trainer.optim.build import optimizer_rules
from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.optim.matrices import Matrices
from ingot.trainer.optim.optimizer import Optimizer
from ingot.trainer.optim.schedule import learning_rate

HEAD_DIM = 32


def proxy_run(
    tokens: Path,
    manifest: TokenManifest,
    *,
    steps: int,
    heldout: Path | None = None,
    tokenizer: Path | None = None,
    width: int = 64,
    layers: int = 2,
    seq_len: int = 128,
    global_batch: int = 16,
    seed: int = 1234,
) -> RunConfig:
    """Return a run on `tokens` that takes minutes on a laptop: a dense model of `layers` x `width`, fp32 on the CPU."""
    heads = max(width // HEAD_DIM, 1)
    return RunConfig(
        name="proxy",
        seed=seed,
        model=Arch(
            vocab_size=manifest.vocab_size,
            d_model=width,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=HEAD_DIM,
            d_ffn=3 * width,
            max_seq_len=seq_len,
            tied_embeddings=True,
        ),
        data=Data(
            tokens=str(tokens.resolve()),
            heldout=str(heldout.resolve()) if heldout else "",
            tokenizer=str(tokenizer.resolve()) if tokenizer else "",
        ),
        train=Train(
            steps=steps,
            seq_len=seq_len,
            global_batch=global_batch,
            micro_batch=global_batch,
            precision="fp32",
            device="cpu",
        ),
        optim=Optim(lr=3e-3),
        schedule=Schedule(warmup_steps=max(steps // 20, 1) if steps > 1 else 0),
        evaluate=Evaluate(sample_tokens=1),
        watch=WatchSettings(log_every=max(steps // 10, 1)),
    )


def _matrices(pieces: Sequence[ParameterShard], rules: RuleOf) -> Matrices:
    """Return the matrices of a model without experts that one process holds."""
    placed = {
        p.name: PlacedParameter(p.shape, 1, (PlacedBlock(0, p.offsets, p.sizes),)) for p in pieces if len(p.shape) == 2
    }
    return Matrices(placed, rules, [0], None, pieces[0].value)


class SourceBatches:
    """Batches with `per_source` samples of every source. Like those of a run, a function of (seed, tokens, step)."""

    def __init__(self, tokens: Path, manifest: TokenManifest, seq_len: int, seed: int, per_source: int):
        self.sources, self.per_source = manifest.sources, per_source
        self._reader = TokenReader(tokens, seq_len, manifest=manifest)
        self._orders = [Order(manifest, seq_len, seed, {source: 1.0}) for source in manifest.sources]

    def step(self, step: int) -> list[Tensor]:
        """Return the tokens of step `step` (from 1) by source, each int64 [per_source, seq_len + 1]."""
        return [torch.from_numpy(self._reader.read(order.step(step, self.per_source))) for order in self._orders]


class Proxy:
    """A dense model of `config` and its optimizer. The first weights are those of a run of `config`."""

    def __init__(self, config: RunConfig, manifest: TokenManifest, device: torch.device):
        if config.model.is_moe:
            raise ConfigError(
                "E-PROXY-EXPERTS",
                "the proxy model has experts",
                rule="a proxy is a small dense model, whose mixture transfers to the large one (Xie et al. 2023)",
                fix="use a run file with a dense model",
            )
        check_vocabulary(manifest, config.model.vocab_size)
        self.config, self.device = config, device
        self.model = Transformer(config.model)
        initialize(self.model, config.model, config.seed)
        self.model.to(device)
        self._parameters = dict(self.model.named_parameters())
        self._pieces = [
            ParameterShard(name, tuple(p.shape), (0,) * p.dim(), tuple(p.shape), p.data, owner=True)
            for name, p in self._parameters.items()
        ]
        rules = optimizer_rules(config.optim)
        self._optimizer = Optimizer(self._pieces, rules, _matrices(self._pieces, rules))

    @torch.no_grad()
    def nats(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Return -log p of every target, one tensor [per_source * seq_len] per source."""
        return [torch.cat([self._forward(part, per_token=True) for part in self._parts(batch)]) for batch in batches]

    def train(self, step: int, batches: Sequence[Tensor], weights: np.ndarray) -> None:
        """Make one update on the sum over sources of weight x mean nats. weights: float64 [sources]."""
        for batch, weight in zip(batches, weights.tolist(), strict=True):
            targets = batch[:, 1:].numel()
            for part in self._parts(batch):
                (self._forward(part) * (weight / targets)).backward()
        for piece in self._pieces:
            piece.grad = self._parameters[piece.name].grad
        optim, train = self.config.optim, self.config.train
        norm = gradient_norm(self._pieces, world=1)
        lr = learning_rate(train.steps, optim.lr, self.config.schedule)(step)
        self._optimizer.step(lr, scale=clip_factor(norm, optim.clip_norm))
        self.model.zero_grad(set_to_none=True)

    def _parts(self, batch: Tensor) -> Sequence[Tensor]:
        return batch.to(self.device).split(self.config.train.micro_batch)

    def _forward(self, tokens: Tensor, *, per_token: bool = False) -> Tensor:
        return self.model(tokens[:, :-1], tokens[:, 1:], per_token=per_token)


def as_array(weights: Mapping[str, float], sources: Sequence[str]) -> np.ndarray:
    """Return the shares of `sources`, float64 [sources] with the sum 1; 0 for a source without a weight."""
    values = np.array([weights.get(source, 0.0) for source in sources], np.float64)
    return values / values.sum()
