"""Replay a run in one process to a step with a spike, and try its batch and its weights apart. Nothing is written.

The same batch on older weights, and another batch on the same weights, show which of the two made the spike.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ingot.rehearse.replay.found import LAST_WAY, LayerNorms, RecordedWay, ReplayedSpike, ReplayedStep
from ingot.rehearse.replay.opened import OpenedReplay, open_replay
from ingot.trainer.integrity.recompute import unnoticed
from ingot.trainer.loader.loader import Batch, Loader
from ingot.trainer.optim.gradients import gradient_norm
from ingot.trainer.parts import StepParts
from ingot.trainer.step import forward_backward, loss_scale, update

BEFORE = 16  # steps before the spike whose norms are compared with its own
_LINE_SECONDS = 5.0


def replay_spike(
    root: Path,
    wanted: int,
    *,
    skipped: Iterable[int] = (),
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
    way: RecordedWay = LAST_WAY,
) -> ReplayedSpike:
    """Replay the run folder `root` from the newest usable checkpoint before step `wanted`, up to this step.

    skipped: the steps whose updates the run skipped. device: "auto", "cpu" or "cuda". way: of the run to this training
    of the step, with its learning rates. The run may still be training. Raises ConfigError for a run file that cannot
    be used here, ResourceError if this machine has too little memory,
    DataError for damaged tokens, CheckpointError if a checkpoint vanishes meanwhile.
    """
    with open_replay(root, wanted, skipped=skipped, device=device, say=say, way=way) as opened:
        return _SpikePlayer(opened, wanted, say, progress).play()


class _SpikePlayer:
    """The steps of a replay up to `wanted`, and the experiments there."""

    def __init__(
        self,
        opened: OpenedReplay,
        wanted: int,
        say: Callable[[str], None],
        progress: Callable[[float, str], None],
    ):
        self.opened, self.wanted, self._say, self._progress = opened, wanted, say, progress
        self.parts, self.policy = opened.parts, opened.policy
        self._norms: dict[str, float] = {}
        self.policy.look = self._look

    def play(self) -> ReplayedSpike:
        opened, parts = self.opened, self.parts
        batch = opened.loader.part_of(self.wanted, 0)
        other_step = _other_step(opened.loader, self.wanted, opened.first, parts.config.train.steps)
        other = opened.loader.part_of(other_step, 0) if other_step else None
        early, early_other = self._mean_loss(batch), self._mean_loss(other)
        steps, before = self._steps_before()
        nats, other_nats = self._nats(batch), None if other is None else self._nats(other)
        other_norm, other_layers = self._gradient(other)
        weights = _weight_norms(parts)
        own = self._step(batch)
        after = _weight_norms(parts)
        missing = math.nan
        layers = tuple(
            LayerNorms(
                name=name,
                gradient=self._norms.get(name, missing),
                gradient_before=statistics.median(before[name]) if before[name] else missing,
                gradient_other=other_layers.get(name, missing),
                weights_before=norm,
                weights_after=after[name],
            )
            for name, norm in weights.items()
        )
        return ReplayedSpike(
            checkpoint=opened.first,
            unused=opened.unused,
            steps=tuple(steps),
            own=own,
            nats=nats,
            other_step=other_step,
            other_loss=missing if other_nats is None else float(other_nats.mean(dtype=np.float64)),
            other_grad_norm=other_norm,
            other_nats=other_nats,
            other_loss_after=self._mean_loss(other),
            early_loss=early,
            early_other_loss=early_other,
            layers=layers,
            device=opened.device.type,
            precision=parts.config.train.precision,
            notes=opened.notes,
        )

    def _steps_before(self) -> tuple[list[ReplayedStep], dict[str, list[float]]]:
        """Run the steps before the wanted one. Return them, and the newest gradient norms of each layer."""
        first, steps = self.opened.first, []
        norms: dict[str, list[float]] = defaultdict(list)
        began = shown = time.monotonic()
        if self.opened.first + 1 == self.wanted:
            return steps, norms
        for batch in self.opened.loader:
            if not batch.passed:
                steps.append(self._step(batch))
                if batch.step >= self.wanted - BEFORE and not steps[-1].skipped:
                    for name, norm in self._norms.items():
                        norms[name].append(norm)
            if time.monotonic() - shown > _LINE_SECONDS:
                shown = time.monotonic()
                left = (shown - began) / (batch.step - first) * (self.wanted - batch.step)
                self._say(f"replay    step {batch.step} of {self.wanted}  {left:.0f} s left")
            self._progress((batch.step - first) / (self.wanted - first), f"step {batch.step}")
            if batch.step == self.wanted - 1:
                break
        return steps, norms

    def _step(self, batch: Batch) -> ReplayedStep:
        parts, lr = self.parts, self.opened.rate_of(batch.step)
        self.policy.step = batch.step
        result = update(parts, batch.step, forward_backward(parts, batch), lr)
        assert result.skipped is not None
        return ReplayedStep(
            step=batch.step,
            loss=float(result.loss),
            grad_norm=float(result.grad_norm),
            lr=lr,
            skipped=bool(result.skipped),
            change=math.nan,
        )

    def _look(self) -> None:
        """Take the gradient norms of a step; called before its update."""
        if self.policy.step >= self.wanted - BEFORE:
            self._norms = _gradient_norms(self.parts)

    def _gradient(self, batch: Batch | None) -> tuple[float, dict[str, float]]:
        """Return the gradient norm of a batch, and that of each layer. No weight changes."""
        if batch is None:
            return math.nan, {}
        parts = self.parts
        with unnoticed(parts.program.stages, self.opened.device):  # or the step would balance experts by this batch too
            forward_backward(parts, batch)
        parts.model.reduce()
        norm, layers = float(gradient_norm(parts.model.shards, scale=loss_scale(parts))), _gradient_norms(parts)
        parts.model.publish()
        return norm, layers

    def _nats(self, batch: Batch) -> np.ndarray:
        """Return the loss of every target: float32 [samples, T]."""
        count, rows, _ = batch.inputs.shape
        found = []
        for number in range(count):
            documents = None if batch.document_ids is None else batch.document_ids[number]
            nats = self.parts.program.forward_only(
                batch.inputs[number], batch.targets[number], documents, per_token=True
            )
            assert nats is not None
            found.append(nats.detach().view(rows, -1).float().cpu().numpy())
        return np.concatenate(found)

    def _mean_loss(self, batch: Batch | None) -> float:
        return math.nan if batch is None else float(self._nats(batch).mean(dtype=np.float64))


def _other_step(loader: Loader, wanted: int, first: int, last: int) -> int:
    """Return the step after `wanted` whose batch the weights have not been trained on, else the one before; 0: none."""
    after = next((step for step in range(wanted + 1, last + 1) if not loader.passes(step)), 0)
    return after or next((step for step in range(wanted - 1, first, -1) if not loader.passes(step)), 0)


def _gradient_norms(parts: StepParts) -> dict[str, float]:
    """Return the norm of the gradient by layer, without the loss scale."""
    scale = loss_scale(parts)
    divisor = 1.0 if scale is None else float(scale)
    gradients = ((one.name, one.grad) for one in parts.model.shards if one.grad is not None)
    return {name: norm / divisor for name, norm in _by_layer(gradients).items()}


def _weight_norms(parts: StepParts) -> dict[str, float]:
    return _by_layer((one.name, one.value) for one in parts.model.shards)


def _by_layer(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the Euclidean norm of all tensors of each layer, in the order of the model."""
    squares: dict[str, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for name, tensor in tensors:
            squares[layer_of(name)].append(
                torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).cpu().square()
            )
    return {name: math.sqrt(float(sum(own, torch.zeros((), dtype=torch.float64)))) for name, own in squares.items()}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: "blocks.3" of "blocks.3.mlp.up.weight", "embed" of "embed.weight"."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first
