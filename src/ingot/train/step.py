"""One optimizer step. Nothing in it waits for the device: what it measures stays there until the log wants it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ingot.optim.adamw import set_learning_rate
from ingot.optim.clip import clip_grad_norm
from ingot.parallel.data import before_backward

if TYPE_CHECKING:
    from ingot.loader.loader import Batch


@dataclass(frozen=True)
class StepFacts:
    """loss: mean nats per token of this rank's samples; grad_norm: global, before clipping. Scalars on the device."""

    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: "Batch", lr: float, clip_norm: float
) -> StepFacts:
    """Forward and backward of every micro-batch, clip, update.

    Each rank divides by its own number of tokens and gradients are averaged over ranks; all ranks have equally many
    tokens, so this is the gradient of the mean over the global batch. Micro-batches accumulate in float32 (float64 in a
    float64 run), see parallel/data.py.
    """
    set_learning_rate(optimizer, lr)
    micro_batches, tokens = len(batch.inputs), batch.inputs.numel()
    losses = []
    for i in range(micro_batches):
        documents = None if batch.document_ids is None else batch.document_ids[i]
        before_backward(model, last=i == micro_batches - 1)
        loss = model(batch.inputs[i], batch.targets[i], documents) / tokens
        loss.backward()
        losses.append(loss.detach())
    grad_norm = clip_grad_norm(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return StepFacts(batch.step, lr, torch.stack(losses).sum(), grad_norm)
