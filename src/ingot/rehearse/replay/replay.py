"""Replay a run in one process from a checkpoint to a step, and find what was not finite first. Nothing is written.

Steps before the one that is looked for run as in training. If the numbers of a step are not finite, its update was
vetoed: the weights are as before it, and its forward and backward run once more under a FiniteWatch.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ingot.errors import CheckpointError
from ingot.rehearse.replay.found import (
    LAST_WAY,
    NotFiniteOrigin,
    Phase,
    RecordedWay,
    Replayed,
    ReplayedStep,
    TensorRange,
)
from ingot.rehearse.replay.opened import OpenedReplay, open_replay
from ingot.rehearse.replay.watch import FiniteWatch, is_finite, range_of
from ingot.trainer.checkpoint.manifest import ListedCheckpoint, verify_tensors
from ingot.trainer.checkpoint.reader import read_blocks
from ingot.trainer.checkpoint.state import StateBlock
from ingot.trainer.loader.loader import Batch
from ingot.trainer.optim.gradients import gradient_norm
from ingot.trainer.parts import StepParts
from ingot.trainer.step import forward_backward, loss_scale, update

MORE_STEPS = 5  # beyond the step that is looked for: another layout rounds otherwise, and the end may come later
_SAMPLED = 4096  # elements of each matrix that show the size of an update
_LINE_SECONDS = 5.0
_NAMED = 8  # tensors that are looked for in older checkpoints, and token ids that are named


def replay(
    root: Path,
    wanted: int,
    *,
    skipped: Iterable[int] = (),
    device: str = "auto",
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[float, str], None] = lambda fraction, text: None,
    way: RecordedWay = LAST_WAY,
) -> Replayed:
    """Replay the run folder `root` from the newest usable checkpoint before step `wanted`, up to MORE_STEPS beyond it.

    skipped: the steps whose updates the run skipped. device: "auto", "cpu" or "cuda". way: of the run to this training
    of the step, with its learning rates. The run may still be training. Raises ConfigError for a run file that cannot
    be used here, ResourceError if this machine has too little memory,
    DataError for damaged tokens, CheckpointError if a checkpoint vanishes meanwhile.
    """
    with open_replay(root, wanted, skipped=skipped, device=device, say=say, way=way) as opened:
        config, parts = opened.parts.config, opened.parts
        bad = _bad_state(parts)
        player = _Player(opened, say, progress, watch_state=not bad)
        player.play(opened.loader, opened.first, wanted)
        found = Replayed(
            checkpoint=opened.first,
            unused=opened.unused,
            wanted=wanted,
            steps=tuple(player.steps),
            loaded_bad=bool(bad),
            bad_state=bad or player.bad_state,
            finite_at=_finite_at(opened.older, bad) if bad else None,
            step=player.step,
            phase=player.phase,
            origin=player.origin,
            samples=player.samples,
            batch=config.train.global_batch,
            own_tokens=player.own_tokens,
            loss_scale=player.scale,
            finite_unscaled=player.finite_unscaled,
            device=opened.device.type,
            precision=config.train.precision,
            notes=opened.notes,
        )
        del player, parts  # before the group ends
        return found


def _bad_state(parts: StepParts) -> tuple[TensorRange, ...]:
    """Return the weights, moments and buffers that are not finite."""
    blocks = parts.state.blocks(parts.optimizer.moments(), first_rank=True)
    floats = [one for one in blocks if one.tensor.is_floating_point() and one.tensor.numel()]
    return tuple(range_of(one.tensor, one.name) for one in floats if not is_finite(one.tensor))


def _finite_at(older: Sequence[ListedCheckpoint], bad: Sequence[TensorRange]) -> int | None:
    """Return the step of the newest of the `older` checkpoints in which these tensors are finite."""
    for one in older:
        if one.damage or one.manifest is None:
            continue
        named = [tensor for tensor in bad[:_NAMED] if tensor.name in one.manifest.tensors]
        blocks = [_empty_block(tensor) for tensor in named]
        try:
            verify_tensors(one.path)
            read_blocks(one.path, one.manifest, blocks)
        except CheckpointError:
            continue
        if all(is_finite(block.tensor) for block in blocks):
            return one.step
    return None


def _empty_block(tensor: TensorRange) -> StateBlock:
    empty = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    return StateBlock(tensor.name, tensor.shape, (0,) * len(tensor.shape), empty)


class _Player:
    """The steps of a replay, and what they found; the fields are those of Replayed."""

    def __init__(
        self,
        opened: OpenedReplay,
        say: Callable[[str], None],
        progress: Callable[[float, str], None],
        *,
        watch_state: bool,
    ):
        self.parts, self.policy, self._rate_of = opened.parts, opened.policy, opened.rate_of
        self._say, self._progress = say, progress
        self._watch_state = watch_state  # else it was not finite before
        self.steps: list[ReplayedStep] = []
        self.bad_state: tuple[TensorRange, ...] = ()
        self.step = 0
        self.phase: Phase = ""
        self.origin: NotFiniteOrigin | None = None
        self.samples: tuple[int, ...] = ()
        self.own_tokens: tuple[int, ...] = ()
        self.scale: float | None = None
        self.finite_unscaled: bool | None = None

    def play(self, batches: Iterable[Batch], first: int, wanted: int) -> None:
        """Run the steps after `first`, until one is not finite, at most to MORE_STEPS beyond `wanted`."""
        began = shown = time.monotonic()
        for batch in batches:
            if batch.step > wanted + MORE_STEPS:
                return
            if batch.passed:
                continue
            own = self.steps[-1] if self.steps else None
            if own is not None and time.monotonic() - shown > _LINE_SECONDS:
                shown = time.monotonic()
                seconds = (shown - began) / len(self.steps) * (wanted - own.step)
                self._say(_step_line(own, wanted, seconds))
            self._progress(min((batch.step - first - 1) / (wanted - first), 1.0), f"step {batch.step}")
            if self._ends(batch, wanted):
                return

    def _ends(self, batch: Batch, wanted: int) -> bool:
        """Run one step, and return whether something of it is not finite that the run did not go over."""
        parts, lr = self.parts, self._rate_of(batch.step)
        self.policy.step = batch.step
        scales = [(one, one.clone()) for one in (parts.loss_scale.state().values() if parts.loss_scale else ())]
        sampled = _samples(parts)
        result = update(parts, batch.step, forward_backward(parts, batch), lr)
        assert result.skipped is not None
        loss, norm, skipped = float(result.loss), float(result.grad_norm), bool(result.skipped)
        own = ReplayedStep(
            step=batch.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            skipped=skipped,
            change=_change(sampled, _samples(parts)),
        )
        self.steps.append(own)
        if own.is_finite:
            self.bad_state = _bad_state(parts) if self._watch_state else ()
            if self.bad_state:
                self.step, self.phase = batch.step, "update"
            return bool(self.bad_state)
        if batch.step < wanted and batch.step in self.policy.steps:
            return False
        for one, before in scales:  # the scale that the step had
            one.copy_(before)
        self.step = batch.step
        self._find(batch)
        return True

    def _find(self, batch: Batch) -> None:
        """Run forward and backward of `batch` once more, and find the origin of its values that are not finite."""
        parts = self.parts
        (stage,) = parts.model.stages.values()
        scale = loss_scale(parts)
        self.scale = None if scale is None else float(scale)
        self._say(f"replay    step {batch.step} is not finite: once more, with a look at every operation")
        watch = FiniteWatch(stage)
        with watch.watching():
            loss = forward_backward(parts, batch)
            parts.model.reduce()
            norm = gradient_norm(parts.model.shards, scale=scale)
        bad = [one.grad for one in parts.model.shards if one.grad is not None and not is_finite(one.grad)]
        blamed = [one for one in map(watch.origin_of, (loss, *bad)) if one is not None]
        if blamed:
            self.origin = min(blamed, key=watch.origins.index)
            self.phase = self.origin.phase
        elif not bad and is_finite(loss):
            self.origin, self.phase = watch.origin_of(norm), "gradient norm"
        else:
            self.phase = "backward" if is_finite(loss) else "forward"
        parts.model.publish()
        if scale is not None and is_finite(loss):
            scale.fill_(1.0)
            forward_backward(parts, batch)
            parts.model.reduce()
            self.finite_unscaled = is_finite(gradient_norm(parts.model.shards, scale=scale))
            parts.model.publish()
        self.samples = self._affected(batch, finite_loss=is_finite(loss))
        self.own_tokens = _own_tokens(batch, self.samples)

    def _affected(self, batch: Batch, *, finite_loss: bool) -> tuple[int, ...]:
        """Return the samples of the batch whose own loss is not finite or, if all are, those that the origin names."""
        count, rows, _ = batch.inputs.shape
        if finite_loss:
            if self.origin is None or not self.origin.sequences:
                return ()
            return tuple(self.origin.micro_batch * rows + row for row in self.origin.sequences)
        found = []
        for number in range(count):
            documents = None if batch.document_ids is None else batch.document_ids[number]
            nats = self.parts.program.forward_only(
                batch.inputs[number], batch.targets[number], documents, per_token=True
            )
            assert nats is not None
            bad = (~nats.view(rows, -1).isfinite()).any(1).nonzero().flatten().tolist()
            found += [number * rows + row for row in bad]
        return tuple(found)


def _step_line(own: ReplayedStep, wanted: int, seconds: float) -> str:
    """Return the line of a replayed step. seconds: from it to the step that is `wanted`."""
    place = f"{own.step} of {wanted}" if own.step <= wanted else f"{own.step}, beyond {wanted}"
    left = f"  {seconds:.0f} s left" if own.step < wanted else ""
    return f"replay    step {place}  loss {own.loss:.4g}{left}"


def _samples(parts: StepParts) -> list[Tensor]:
    """Return copies of some elements of each matrix of weights."""
    matrices = [one.value.detach().reshape(-1) for one in parts.model.shards if one.value.dim() > 1]
    return [one[:: max(one.numel() // _SAMPLED, 1)].clone() for one in matrices if one.numel()]


def _change(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the root mean square of the change, divided by that of the values before; 0 for infinite ones."""
    old, new = (torch.cat([one.double() for one in tensors]) for tensors in (before, after))
    ratio = float((new - old).norm() / old.norm().clamp(min=1e-30))
    return ratio if math.isfinite(ratio) else 0.0


def _own_tokens(batch: Batch, samples: Sequence[int]) -> tuple[int, ...]:
    """Return the first token ids that all of `samples` have, and no other sample of the batch."""
    ids = batch.inputs.flatten(0, 1).cpu()
    if not samples or len(samples) == len(ids):
        return ()
    common = set.intersection(*(set(ids[one].tolist()) for one in samples))
    others = {token for one in range(len(ids)) if one not in samples for token in ids[one].unique().tolist()}
    return tuple(sorted(common - others)[:_NAMED])
