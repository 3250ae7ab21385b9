"""One optimizer step, which never waits for the device: measured values stay there until the log reads them."""

from ingot.trainer.optim.gradients import clip_factor, gradient_norm
from ingot.trainer.parallel.pipeline import MicroBatches
from ingot.trainer.parts import StepParts
from ingot.trainer.resilience.policy import StepResult


def train_step(parts: StepParts, batch: MicroBatches, lr: float) -> StepResult:
    """Run forward and backward of every micro-batch, reduce, clip, update, balance experts. Collective.

    Each rank that reads tokens divides its loss by its own number of tokens, and gradients are averaged over these
    ranks (data x cp). All have equally many tokens, so this is the gradient of the mean over the global batch.
    """
    scale = parts.loss_scale.scale if parts.loss_scale else None
    loss = parts.program.train(batch, scale)
    parts.model.reduce()
    grad_norm = gradient_norm(parts.model.shards, scale=scale)
    parts.callbacks.gradients(batch.step)
    veto = parts.policy.veto(loss, grad_norm)
    parts.optimizer.step(lr, scale=clip_factor(grad_norm, parts.config.optim.clip_norm, scale=scale), found_inf=veto)
    if parts.loss_scale and veto is not None:
        parts.loss_scale.update(veto)
    parts.model.publish()
    parts.callbacks.updated(batch.step)
    experts = parts.balance.step(batch.step, veto) if parts.balance else None
    return StepResult(batch.step, lr, loss, grad_norm, veto, parts.token_readers, experts=experts)
