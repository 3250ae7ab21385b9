"""One optimizer step, which never waits for the device: measured values stay there until the log reads them."""

from torch import Tensor

from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.parallel.pipeline import MicroBatches
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import StepResult


def train_step(parts: StepParts, batch: MicroBatches, lr: float) -> StepResult:
    """Run forward and backward of every micro-batch, reduce, clip, update, balance experts. Collective."""
    return update(parts, batch.step, forward_backward(parts, batch), lr)


def forward_backward(parts: StepParts, batch: MicroBatches) -> Tensor:
    """Run forward and backward of every micro-batch. Returns the loss of this rank's tokens. Collective.

    Each rank that reads tokens divides its loss by its own number of tokens, and gradients are averaged over these
    ranks (data x cp). All have equally many tokens, so this is the gradient of the mean over the global batch.
    """
    return parts.program.train(batch, loss_scale(parts))


def update(parts: StepParts, step: int, loss: Tensor, lr: float) -> StepResult:
    """Reduce the gradients of `step`, clip, update unless the policy vetoes, publish, balance experts. Collective."""
    scale = loss_scale(parts)
    parts.model.reduce()
    grad_norm = gradient_norm(parts.model.shards, scale=scale)
    parts.callbacks.gradients(step)
    veto = parts.policy.veto(loss, grad_norm)
    parts.optimizer.step(lr, scale=clip_factor(grad_norm, parts.config.optim.clip_norm, scale=scale), found_inf=veto)
    if parts.loss_scale and veto is not None:
        parts.loss_scale.update(veto)
    parts.model.publish()
    parts.callbacks.updated(step)
    experts = parts.balance.step(step, veto) if parts.balance else None
    return StepResult(step, lr, loss, grad_norm, veto, parts.token_readers, experts=experts)


def loss_scale(parts: StepParts) -> Tensor | None:
    """Return the factor of the loss that is minimized: the loss scale of fp16, None in other precisions."""
    return parts.loss_scale.scale if parts.loss_scale else None
